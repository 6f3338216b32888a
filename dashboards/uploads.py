"""Uploaded pictures: checked, the last ones kept in memory for as long as the app runs, known by their content."""

from __future__ import annotations

import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from ibot_eval.errors import BadImage, DataError
from ibot_eval.visual.pictures import UPLOAD_BYTES, Source, open_upload

KEPT = 16
"""Uploads; the oldest is forgotten for a new one. At most 10 MB each."""
PREFIX = "upload:"
TYPES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
"""Endings that the browser offers; what a file is, its bytes tell."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What is decoded. PIL knows more, and hands some of it (EPS) to other programs."""


@dataclass(frozen=True)
class Upload:
    name: str
    """As the machine of whoever sent it last calls the file; text, never markup."""
    data: bytes


class Uploads:
    """Uploads of all sessions of this process, so that a link opens in another tab as well.

    An upload is known by the hash of its bytes, which nobody guesses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, Upload] = OrderedDict()

    def add(self, data: bytes, name: str) -> str:
        """Takes an upload in and returns its id.

        Raises:
            BadImage: too many bytes or pixels, or nothing that can be decoded; nothing is kept then.
        """
        source = open_checked(data, name)
        key = PREFIX + hashlib.sha256(data).hexdigest()[:32]
        with self._lock:
            self._uploads[key] = Upload(source.name, data)
            self._uploads.move_to_end(key)
            while len(self._uploads) > KEPT:
                self._uploads.popitem(last=False)
        return key

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._uploads

    def get(self, key: str) -> Upload:
        """Raises DataError: the app was started anew since, or other uploads took its place."""
        with self._lock:
            if key in self._uploads:
                return self._uploads[key]
        raise DataError("the uploaded picture of this link is no longer here", todo="upload it again")

    def open(self, key: str) -> Source:
        upload = self.get(key)
        return open_checked(upload.data, upload.name)


def open_checked(data: bytes, name: str) -> Source:
    """An upload as a picture.

    Raises:
        BadImage: too many bytes or pixels, of a format that is not taken, or nothing that can be decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its size, which open_upload limits
            if len(data) <= UPLOAD_BYTES:
                Image.open(io.BytesIO(data), formats=FORMATS).close()
        return open_upload(data, name)
    except Image.DecompressionBombError:
        what, todo = f"{name} declares far too many pixels", "reduce it first"
    except UnidentifiedImageError:
        what, todo = f"{name} is not a picture that can be read here", f"upload {', '.join(FORMATS)}"
    except BadImage as error:
        # The core's advice is for files of a data set.
        what, todo = error.what, "upload another picture"
    except Exception as error:  # noqa: BLE001 - PIL's decoders raise anything on damaged headers
        what, todo = f"{name} cannot be decoded: {error or type(error).__name__}", "upload another picture"
    raise BadImage(what, todo=todo)
