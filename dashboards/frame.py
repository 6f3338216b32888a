"""What is around every page: loading in sight, mistakes in plain words, text that is never taken for Markdown."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboards.link import Link
from ibot_eval.errors import UserError

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_LINKS = re.compile(r"(?i)(www|://|@)")
_SYMBOLS = re.compile(r"(?<![^\s\ufeff])([<>~-])(->|-|=|>)(?![^\s\ufeff])")
_ICONS = re.compile(r":(?=material_|streamlit:)")
WORD_JOINER = "\u2060"


def page(name: str) -> Callable[[], None]:
    """The function that draws the page ``name``; its module is imported when it is first opened."""

    def draw() -> None:
        link = Link(name)
        try:
            _load(f"dashboards.views.{name}").draw(link)
        except UserError as error:
            mistake(error)
        except MemoryError:
            st.error("There is not enough memory for this. Choose a smaller size or another image.")
        finally:
            link.publish()

    draw.__name__ = name
    return draw


def _load(module: str) -> Any:
    if "torch" in sys.modules and module in sys.modules:
        return sys.modules[module]
    # Importing torch and timm takes seconds, once; the page says so meanwhile.
    with st.spinner("Loading torch and timm: some seconds, once after the start …"):
        return importlib.import_module(module)


def mistake(error: UserError) -> None:
    """What went wrong and what to do, as the command line says it."""
    lines = [plain(error.what)]
    if error.where:
        lines.append(f"Where: {plain(error.where)}")
    if error.todo:
        lines.append(f"To do: {plain(error.todo)}")
    st.error("\n\n".join(lines))


def plain(text: str) -> str:
    """``text`` for places where streamlit reads Markdown, so that it is shown as it is.

    File names may hold anything: every ASCII punctuation mark is escaped, and line ends stay. What becomes a link, an
    arrow (``->``), a dash (``--``), a symbol (``>=``) or an icon (``:material_home:``) gets a WORD JOINER inside it
    even so, which takes no room: text that is copied from the page holds it.
    """
    whole = _SYMBOLS.sub(rf"\1{WORD_JOINER}\2", _ICONS.sub(f":{WORD_JOINER}", text))
    escaped = _PUNCTUATION.sub(r"\\\1", _LINKS.sub(rf"\1{WORD_JOINER}", whole))
    return re.sub(r"[ \t]*[\r\n]+[ \t]*", "  \n", escaped)
