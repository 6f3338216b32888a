"""What a checkpoint holds and how it was read: what ``ibot-eval inspect`` says."""

from __future__ import annotations

import json
import shlex

import streamlit as st

from dashboards import networks
from dashboards.link import Link
from dashboards.taking import command, file_name
from ibot_eval.commands.inspect import described, rows
from ibot_eval.settings import CheckpointSettings
from ibot_eval.visual import command_lines


def draw(link: Link) -> None:
    st.title("Checkpoint")
    with st.sidebar:
        network = networks.choose(link)
    report = described(network.loaded)
    for note in report["notes"]:
        st.text(f"note: {note}")
    st.dataframe(
        [{"what": title, "found": value} for title, value in rows(report) if title != "note"],
        width="stretch",
        height="content",
        hide_index=True,
    )
    st.download_button(
        "Download JSON",
        json.dumps(described(network.loaded), indent=2, ensure_ascii=False),
        f"{file_name('checkpoint', network.loaded.report.architecture)}.json",
        "application/json",
        key=link.key("report"),
        on_click="ignore",
        icon=":material/download:",
    )
    command(inspect_line(network.settings))


def inspect_line(settings: CheckpointSettings) -> str:
    """``ibot-eval inspect`` with the flags that ``settings`` were made from."""
    words = ["ibot-eval", "inspect"]
    for name, value in command_lines.changed(settings).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)
