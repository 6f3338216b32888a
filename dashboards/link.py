"""The state of a page stands in its address, so that a link reopens the same view.

A setting is taken from the address when a page opens, from what was last chosen in this session otherwise (another page
was looked at in between), and else is the default. What an address holds is never trusted: a value that is not among
those on offer is replaced by the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T", str, int, float)

_KEPT = "kept"


class Link:
    """Widgets of one page that keep their state in its address. One per run of the page."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._values: dict[str, str] = {}
        self._kept: dict[str, str] = st.session_state.setdefault(_KEPT, {})

    def key(self, name: str) -> str:
        """The key of a widget in streamlit's session state."""
        return f"{self.page}.{name}"

    def wanted(self, name: str) -> str | None:
        """What the address, or else this session, holds for ``name``."""
        found = st.query_params.get(name)
        return self._kept.get(name) if found is None else found

    def keep(self, name: str, value: object) -> None:
        """Makes ``value`` part of the address and of this session."""
        self._values[name] = self._kept[name] = str(value)

    def forget(self, name: str) -> None:
        """Drops what the session holds for ``name``, so that the widget shows its default."""
        self._kept.pop(name, None)
        st.session_state.pop(self.key(name), None)

    def publish(self) -> None:
        """Writes the address. Called once, when the page is drawn."""
        if st.query_params.to_dict() != self._values:
            st.query_params.from_dict(self._values)

    def _prepare(self, name: str, fits: Callable[[Any], bool], read: Callable[[str], Any], default: object) -> None:
        key = self.key(name)
        if key not in st.session_state:
            text = self.wanted(name)
            try:
                value = default if text is None else read(text)
            except (ValueError, KeyError):
                value = default
            st.session_state[key] = value
        if not fits(st.session_state[key]):
            # Another checkpoint may have fewer blocks, another folder other images.
            st.session_state[key] = default

    def choice(
        self,
        label: str,
        name: str,
        options: Sequence[T],
        default: T | None = None,
        *,
        format: Callable[[Any], str] = str,
        help: str | None = None,
        slider: bool = False,
    ) -> T:
        """One of ``options``, from a list or a slider. Options are shown as they are, not as Markdown."""
        first = options[0] if default is None else default
        by_text = {str(option): option for option in options}
        self._prepare(name, lambda value: str(value) in by_text, by_text.__getitem__, first)
        key = self.key(name)
        if len(options) == 1:
            value = options[0]
        elif slider:
            value = st.select_slider(label, options, key=key, format_func=format, help=help)
        else:
            value = st.selectbox(label, options, key=key, format_func=format, help=help)
        self.keep(name, value)
        return value  # type: ignore[return-value]

    def number(
        self, label: str, name: str, low: int, high: int, default: int, *, step: int = 1, help: str | None = None
    ) -> int:
        """A whole number from a slider; no slider where there is one value only."""
        self._prepare(name, lambda value: low <= value <= high and (value - low) % step == 0, int, default)
        value = low if low == high else int(st.slider(label, low, high, step=step, key=self.key(name), help=help))
        self.keep(name, value)
        return value

    def span(self, label: str, name: str, default: tuple[int, int] = (0, 100)) -> tuple[int, int]:
        """Two ends from 0 to 100 %, at least 5 apart."""

        def read(text: str) -> tuple[int, int]:
            low, high = map(int, text.split("-"))
            return low, high

        self._prepare(name, lambda ends: 0 <= ends[0] <= ends[1] <= 100, read, default)
        # The session's value makes it a slider with two ends, which its annotations cannot know.
        ends: Any = st.slider(label, 0, 100, step=5, key=self.key(name), format="%d %%")
        low, high = ends
        if high - low < 5:
            low, high = max(0, min(low, 95)), max(0, min(low, 95)) + 5
        self.keep(name, f"{low}-{high}")
        return low, high

    def switch(self, label: str, name: str, default: bool = False, *, help: str | None = None) -> bool:
        """Yes or no."""
        self._prepare(name, lambda value: isinstance(value, bool), {"True": True, "False": False}.__getitem__, default)
        value = st.toggle(label, key=self.key(name), help=help)
        self.keep(name, value)
        return value
