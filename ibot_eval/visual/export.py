"""Figures as files that tell where they come from: PNG and SVG with the checkpoint and the settings inside."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

import numpy as np
from PIL import Image, PngImagePlugin

from ibot_eval.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.checkpoint import LoadedCheckpoint

Format = Literal["png", "svg"]
DOTS_PER_INCH = 300
CHUNK = "ibot-eval"
"""Key of the PNG text chunk that holds everything as JSON."""
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Provenance:
    """What a figure shows and how to make it again. JSON-ready."""

    title: str
    checkpoints: tuple[dict[str, Any], ...]
    """name, sha256, key and architecture of each network."""
    settings: dict[str, Any]
    pictures: tuple[str, ...]
    """Names of the images, without their folders."""
    command: str
    """The line that draws it again."""
    software: str = ""

    def as_json(self) -> str:
        """ASCII, so that any file can hold it."""
        return json.dumps(asdict(self), default=str)


def provenance(
    title: str,
    loaded: LoadedCheckpoint | Sequence[LoadedCheckpoint],
    settings: Mapping[str, Any],
    pictures: Sequence[str],
    command: str,
) -> Provenance:
    """What goes into a figure's file.

    Args:
        loaded: the network or networks that it shows.
        settings: of the drawing; paths and other values are written as text.
        pictures: names of the images.
        command: see ``command_lines``.
    """
    networks = loaded if isinstance(loaded, Sequence) else (loaded,)
    described = tuple(
        {
            "name": Path(one.report.reference).name,
            "sha256": one.report.sha256,
            "key": one.report.key,
            "architecture": one.backbone.architecture,
        }
        for one in networks
    )
    software = f"ibot-eval {version('ibot-eval')}"
    return Provenance(title, described, dict(settings), tuple(pictures), command, software)


def figure_bytes(figure: Figure, about: Provenance, format: Format = "png", dpi: int = DOTS_PER_INCH) -> bytes:
    """``figure`` as a file's content; the same bytes for the same figure.

    PNG: the text chunks Title, Software, Checkpoint, Checkpoint SHA-256, Command and ``ibot-eval`` (all as JSON). SVG:
    the RDF ``<metadata>`` element, its description being that JSON. Text is drawn as paths, so no fonts are needed.

    Args:
        dpi: of pictures inside of it; 300 is print quality.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "ibot-eval", "svg.fonttype": "path"}), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; its letters are in the metadata.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        if format == "svg":
            metadata: dict[str, Any] = {
                "Title": _printable(about.title),
                "Creator": about.software,
                "Description": about.as_json(),
                "Date": None,
            }
            figure.savefig(buffer, format="svg", dpi=dpi, metadata=metadata)
        else:
            figure.savefig(buffer, format="png", dpi=dpi, metadata=_chunks(about))
    return buffer.getvalue()


def array_png(pixels: np.ndarray, about: Provenance) -> bytes:
    """(H, W, 3) uint8 as a PNG of that many pixels, with the text chunks of :func:`figure_bytes`."""
    chunks = PngImagePlugin.PngInfo()
    for name, text in _chunks(about).items():
        chunks.add_text(name, text)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=chunks)
    return buffer.getvalue()


def read_metadata(data: bytes) -> dict[str, Any]:
    """What :func:`figure_bytes` or :func:`array_png` wrote into a file.

    Raises:
        DataError: the file has none.
    """
    text: str | None = None
    if data.startswith(b"\x89PNG"):
        with Image.open(io.BytesIO(data)) as image:
            text = image.info.get(CHUNK)
    elif b"<svg" in data[:2000]:
        found = ElementTree.fromstring(data).find(f".//{_DESCRIPTION}")
        text = None if found is None else found.text
    if not text:
        raise DataError("the file does not tell how it was made")
    return json.loads(text)


def _chunks(about: Provenance) -> dict[str, str]:
    return {
        "Title": _printable(about.title),
        "Software": about.software,
        "Checkpoint": _printable(", ".join(one["name"] for one in about.checkpoints)),
        "Checkpoint SHA-256": ", ".join(str(one["sha256"]) for one in about.checkpoints),
        "Command": _printable(about.command),
        CHUNK: about.as_json(),
    }


def _printable(text: str) -> str:
    # Surrogates, of names that are not UTF-8, fit neither format; control characters are no XML.
    return "".join(c if c.isprintable() else "?" for c in text).encode("utf-8", "replace").decode()
