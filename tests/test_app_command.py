"""The command of the app: what it refuses, what it hands over, how the server starts and ends."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dashboards import command, server
from dashboards.command import App, check_installed
from dashboards.given import VARIABLE, Given
from ibot_eval import cli
from ibot_eval.errors import CheckpointError, ConfigError, DataError, MissingExtra, RecordError, UserError
from tests.conftest import Run


def parsed(*arguments: str) -> App:
    return cli.parse(App, list(arguments), "app")


def test_checkpoints_may_be_named_several_times() -> None:
    app = parsed("--ckpt", "a.pth", "--ckpt", "b.pth", "--data", "photos", "--no-browser", "--port", "0")
    assert app.ckpt == ("a.pth", "b.pth")
    assert (app.data, app.browser, app.port, app.host) == (Path("photos"), False, 0, "localhost")
    assert parsed().ckpt == ()


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(ckpt=("a b.pth", "demo"), data='odd "name"\n', runs="läufe", heads=6, trust_pickle=True, parent=7)
    monkeypatch.setenv(VARIABLE, given.as_json())
    assert Given.from_environment() == given
    monkeypatch.delenv(VARIABLE)
    assert Given.from_environment() == Given(ckpt=("demo",))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (Given(ckpt=("nowhere.pth",)), CheckpointError, "nowhere.pth"),
        (Given(ckpt=("demo", "demo")), ConfigError, "demo twice"),
        (Given(data="nowhere"), DataError, "'nowhere'"),
        (Given(data="file"), DataError, "'file'"),
        (Given(runs="nowhere"), RecordError, "'nowhere'"),
        (Given(patterns="nowhere"), DataError, "ibot-eval patterns"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(
    given: Given, kind: type[UserError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(kind, match=message):
        given.check()
    Given(ckpt=("demo", "timm:vit_tiny_patch16_224"), data=".", runs=".", patterns="file").check()


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name.startswith("streamlit") else found(name)
    )
    with pytest.raises(MissingExtra, match=r"streamlit and streamlit-image-coordinates.*\n.*ibot-eval\[app\]"):
        check_installed()
    assert cli.main(["app", "--no-browser"]) == 2
    assert "pip install 'ibot-eval[app]'" in capsys.readouterr().err
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name.endswith("coordinates") else found(name)
    )
    with pytest.raises(MissingExtra, match="needs streamlit-image-coordinates, which is not"):
        check_installed()


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_ports_that_do_not_exist_are_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["app", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_a_taken_port_is_refused_or_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {taken} of localhost"):
            server.free_port("localhost", taken)
        monkeypatch.setattr(server, "FIRST_PORT", taken)
        monkeypatch.setattr(server, "LAST_PORT", taken)
        with pytest.raises(ConfigError, match=f"from {taken} to {taken}"):
            server.free_port("localhost", None)
    assert server.free_port("localhost", None) == taken
    assert server.free_port("127.0.0.1", 0) > 0
    with pytest.raises(ConfigError, match="no address of this machine"):
        server.free_port("no.such.host.invalid", 0)


def test_local_unless_told_otherwise() -> None:
    assert server.options("localhost", 1)["STREAMLIT_SERVER_ADDRESS"] == "127.0.0.1"
    assert server.options("localhost", 1)["STREAMLIT_CLIENT_SHOW_ERROR_DETAILS"] == "full"
    abroad = server.options("0.0.0.0", 1)
    assert abroad["STREAMLIT_SERVER_ADDRESS"] == "0.0.0.0"
    assert abroad["STREAMLIT_CLIENT_SHOW_ERROR_DETAILS"] == "type"
    assert server.url("localhost", 8501) == server.url("0.0.0.0", 8501) == "http://localhost:8501"
    assert server.url("fe80::1", 80) == "http://[fe80::1]:80"


def test_streamlit_knows_the_settings() -> None:
    config = pytest.importorskip("streamlit.config")
    known = {option.env_var: option for option in config._config_options_template.values()}
    given = server.options("localhost", 8600)
    assert given.keys() <= known.keys()
    assert given["STREAMLIT_SERVER_FILE_WATCHER_TYPE"] == "none"
    assert given["STREAMLIT_BROWSER_GATHER_USAGE_STATS"] == "false"
    assert given["STREAMLIT_SERVER_MAX_UPLOAD_SIZE"] == "10"


def _start(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """The command as a shell starts it, and the port it listens on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ibot_eval", "app", "--no-browser", "--port", "0", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs ignore SIGINT, and so would this process where the tests are one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://localhost:(\d+)", line)
    assert address, line + (process.stdout.read() if process.poll() is not None else "")
    return process, int(address[1])


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/_stcore/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_server_ends_with_the_command(number: signal.Signals, code: int, tmp_path: Path) -> None:
    pytest.importorskip("streamlit")
    pytest.importorskip("streamlit_image_coordinates")
    process, port = _start(tmp_path)
    try:
        assert _answers(port)
        process.send_signal(number)
        assert process.wait(20) == code
        for _ in range(100):
            if not _answers(port):
                break
            time.sleep(0.1)
        assert not _answers(port)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()


def test_a_wrong_path_ends_the_command_before_the_server_starts(ibot_eval: Run) -> None:
    done = ibot_eval("app", "--data", "nowhere", "--no-browser")
    assert done.returncode == 2
    assert "there is no folder 'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr
