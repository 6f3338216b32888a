"""Which image to look at: one of the gallery, or an upload."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import streamlit as st

from dashboards.frame import mistake, plain
from dashboards.gallery import Folder, Gallery, Samples
from dashboards.given import Given
from dashboards.link import Link
from dashboards.uploads import KEPT, PREFIX, TYPES, Uploads
from ibot_eval.errors import BadImage, DataError, UserError
from ibot_eval.visual.pictures import Source

OPENED = 4
"""Decoded images that are kept; one may take 120 MB."""
AT_MOST = 12
"""Images at once, where several are chosen."""
FIRST_SHOWN = 3
"""How many of them, before anything is chosen."""
UPLOADED = "/uploads"
"""The uploads of this session in the list of folders; no folder below --data begins so."""
GONE = f"The uploaded picture is no longer here: the last {KEPT} uploads are kept. Upload it again to see it."


@st.cache_resource(show_spinner="Looking for images …")
def gallery() -> Gallery:
    """The images of the command line."""
    data = Given.from_environment().data
    return Folder(Path(data)) if data else Samples()


@st.cache_resource(show_spinner=False)
def uploads() -> Uploads:
    """Those of all sessions."""
    return Uploads()


@st.cache_resource(max_entries=OPENED, show_spinner=False)
def _opened(image: str, stamp: str) -> Source:
    return uploads().open(image) if is_upload(image) else gallery().open(image)


def is_upload(image: str) -> bool:
    """Whether an id is that of an upload. A file cannot be called so: names of the gallery come first."""
    folder, _, file = image.rpartition("/")
    return image.startswith(PREFIX) and file not in gallery().folders.get(folder, ())


def open_image(image: str) -> Source:
    """The image of an id, decoded.

    Raises:
        DataError: no image of the gallery and no upload has this id.
        BadImage: it cannot be decoded.
    """
    try:
        if is_upload(image):
            return replace(_opened(image, ""), name=_name(image))
        return _opened(image, gallery().stamp(image))
    except BadImage as error:
        # The core's advice is for data sets.
        raise BadImage(error.what, todo="choose another image, or replace the file") from error


@dataclass(frozen=True)
class Chosen:
    """An image that was chosen, and its id in links."""

    image: str
    source: Source


def choose_image(link: Link, name: str = "image", label: str = "Image", *, default: int = 0) -> Chosen:
    """Widgets for one image; with an upload, that.

    Args:
        name: of the setting in the link.
        default: the place of the image in the list that is taken first.

    Raises:
        DataError, BadImage: the image cannot be read.
    """
    lists = st.container()
    # First, so that it is there whatever goes wrong with the list.
    _take_upload(link, name, label)
    with lists:
        image = _choose(link, name, label, default)
    for note in gallery().notes:
        st.caption(plain(note))
    return Chosen(image, open_image(image))


def _choose(link: Link, name: str, label: str, default: int) -> str:
    wanted = link.wanted(name) or ""
    key = link.key(name)
    if is_upload(wanted):
        if wanted in uploads():
            _names().setdefault(wanted, uploads().get(wanted).name)
        else:
            # Unless another one was chosen since the link was written.
            if st.session_state.get(key, wanted) == wanted:
                link.forget(name)
                st.warning(GONE)
            wanted = ""
    mine = _mine()
    folder = _folder(link, name, label, wanted if key not in st.session_state else "", bool(mine))
    options = mine if folder == UPLOADED else _in_folder(folder)
    if key not in st.session_state and wanted and wanted not in options:
        st.warning("The image of this link is not here; another one is shown.")
    labels = _labels(options)
    return link.choice(label, name, options, options[min(default, len(options) - 1)], format=labels.__getitem__)


def choose_images(link: Link, name: str = "images") -> list[Source]:
    """Widgets for several images, of any folders and uploads.

    Raises:
        DataError, BadImage: an image cannot be read, or none is chosen.
    """
    lists = st.container()
    _take_upload(link, name, "Images", several=True)
    with lists:
        folder = _folder(link, name, "Images", "", uploaded=False)
        key = link.key(name)
        first = _in_folder(folder)[:FIRST_SHOWN]
        if key not in st.session_state:
            st.session_state[key] = _from_link(link.wanted(name)) or first
        chosen = [image for image in st.session_state[key] if not is_upload(image) or image in uploads()]
        if len(chosen) < len(st.session_state[key]):
            st.warning(GONE)
            chosen = chosen or first
        for image in filter(is_upload, chosen):
            _names().setdefault(image, uploads().get(image).name)
        options = list(dict.fromkeys([*chosen, *_mine(), *_in_folder(folder)]))
        st.session_state[key] = chosen
        labels = _labels(options)
        images = st.multiselect("Images", options, key=key, format_func=labels.__getitem__, max_selections=AT_MOST)
    link.keep(name, json.dumps(images))
    if not images:
        raise DataError("no image is chosen", todo="choose one or more in the list")
    return [open_image(image) for image in images]


def _from_link(text: str | None) -> list[str]:
    """Ids in a link that are images here, and of uploads, which may be gone."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    known = [image for image in found if isinstance(image, str) and _is_known(image)] if isinstance(found, list) else []
    return list(dict.fromkeys(known))[:AT_MOST]


def _is_known(image: str) -> bool:
    folder, _, file = image.rpartition("/")
    return file in gallery().folders.get(folder, ()) or is_upload(image)


def _in_folder(folder: str) -> list[str]:
    return [f"{folder}/{file}" if folder else file for file in gallery().folders[folder]]


def _folder(link: Link, name: str, label: str, wanted: str, uploaded: bool) -> str:
    """The folder to choose from; not asked where there is one only. Not in the link: the image's id tells it."""
    folders = sorted(gallery().folders)
    options = [*([UPLOADED] if uploaded else []), *folders]
    key = link.key(f"{name}.folder")
    if wanted:
        st.session_state[key] = UPLOADED if is_upload(wanted) else wanted.rpartition("/")[0]
    if st.session_state.get(key) not in options:
        st.session_state[key] = folders[0]
    if len(options) == 1:
        return options[0]
    shown = _distinct({option: {UPLOADED: "uploads", "": "(top)"}.get(option, option) for option in reversed(options)})
    return st.selectbox(f"{label}: folder", options, key=key, format_func=shown.__getitem__)


def _labels(options: Sequence[str]) -> dict[str, str]:
    """What images are called in a list: by file, with the folder where two files are called alike."""
    names = {image: _name(image) if is_upload(image) else image.rpartition("/")[2] for image in options}
    often = Counter(names.values())
    return _distinct({image: name if often[name] == 1 or is_upload(image) else image for image, name in names.items()})


def _distinct(labels: dict[str, str]) -> dict[str, str]:
    """``labels``, with a number at those that are there before: streamlit tells options by what it shows."""
    found: dict[str, str] = {}
    taken = set(labels.values())
    used: set[str] = set()
    for option, text in labels.items():
        label, number = text, 2
        while label in used or (label != text and label in taken):
            label, number = f"{text} ({number})", number + 1
        used.add(label)
        found[option] = label
    return found


def _names() -> dict[str, str]:
    """Upload -> what this session calls it; the same bytes may be called otherwise elsewhere."""
    return st.session_state.setdefault("uploads", {})


def _mine() -> list[str]:
    """Uploads of this session that are still here."""
    return [image for image in _names() if image in uploads()]


def _name(image: str) -> str:
    return _names().get(image) or uploads().get(image).name


def _take_upload(link: Link, name: str, label: str, *, several: bool = False) -> None:
    key = link.key(f"{name}.upload")

    def taken() -> None:
        file = st.session_state[key]
        if file is None:
            return
        problem = f"{key}.problem"
        st.session_state.pop(problem, None)
        try:
            image = uploads().add(file.getvalue(), file.name)
            _names()[image] = uploads().get(image).name
        except UserError as error:
            st.session_state[problem] = error
            return
        if several:
            before = [other for other in st.session_state.get(link.key(name), []) if other != image]
            st.session_state[link.key(name)] = [*before[: AT_MOST - 1], image]
        else:
            st.session_state[link.key(name)] = image
            st.session_state[link.key(f"{name}.folder")] = UPLOADED

    st.file_uploader(f"{label}: upload a picture", TYPES, key=key, on_change=taken, help="At most 10 MB and 40 Mpx.")
    problem = st.session_state.get(f"{key}.problem")
    if isinstance(problem, UserError) and st.session_state.get(key) is not None:
        mistake(problem)
