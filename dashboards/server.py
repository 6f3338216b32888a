"""The app's own process: streamlit's settings, the port, start and end."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

from dashboards.given import VARIABLE, Given
from ibot_eval.errors import ConfigError
from ibot_eval.interruption import Interrupted, terminated_as_exception

PAGE = Path(__file__).with_name("app.py")
FIRST_PORT, LAST_PORT = 8501, 8600
UPLOAD_MEGABYTES = 10
LOCAL = ("localhost", "127.0.0.1", "::1")
START_SECONDS = 60
"""How long streamlit may take to answer."""
END_SECONDS = 3
"""How long it may take to end before it is killed."""


def options(host: str, port: int) -> dict[str, str]:
    """Streamlit's settings as environment variables, which win over the user's own configuration files.

    Variables rather than flags: a version of streamlit that does not know one of them ignores it.
    """
    values = {
        "server.address": "127.0.0.1" if host == "localhost" else host,
        "server.port": port,
        # The browser is opened by us: with its own way streamlit first asks for an e-mail address.
        "server.headless": True,
        # Watching torch's modules for changes prints errors and takes seconds.
        "server.fileWatcherType": "none",
        "server.runOnSave": False,
        "server.maxUploadSize": UPLOAD_MEGABYTES,
        "server.enableStaticServing": False,
        "server.enableXsrfProtection": True,
        "server.enableCORS": True,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "full" if host in LOCAL else "type",
        "client.showErrorLinks": False,
        "logger.hideWelcomeMessage": True,
        "logger.level": "warning",
        # Bare strings in a module are documentation, not text for the page.
        "runner.magicEnabled": False,
        "global.developmentMode": False,
    }
    return {_variable(name): _written(value) for name, value in values.items()}


def _variable(option: str) -> str:
    # As streamlit does: server.maxUploadSize -> STREAMLIT_SERVER_MAX_UPLOAD_SIZE.
    words = "".join(f"_{letter}" if letter.isupper() else letter for letter in option.replace("CORS", "Cors"))
    return f"STREAMLIT_{words.replace('.', '_').upper()}"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def free_port(host: str, port: int | None) -> int:
    """``port`` if it can be listened on; any that is free for 0, the first free one from 8501 for None.

    Raises:
        ConfigError: the port is taken or not allowed, the host is not this machine's, or no port is free.
    """
    wanted = range(FIRST_PORT, LAST_PORT + 1) if port is None else (port,)
    reason = ""
    for number in wanted:
        try:
            return _bound(host, number)
        except socket.gaierror:
            raise ConfigError(
                f"--host {host!r} is no address of this machine", todo="use localhost or 0.0.0.0"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
    which = f"port {port}" if port is not None else f"any port from {FIRST_PORT} to {LAST_PORT}"
    raise ConfigError(
        f"cannot listen on {which} of {host}: {reason}", todo="choose another --port, or --port 0 for any"
    )


def _bound(host: str, port: int) -> int:
    address = "127.0.0.1" if host == "localhost" else host
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port whose last connections are still closing may be taken again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        return probe.getsockname()[1]


def url(host: str, port: int) -> str:
    """The address to open on this machine."""
    shown = "localhost" if host in (*LOCAL, "0.0.0.0", "::") else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"


def serve(given: Given, host: str, port: int | None, *, browser: bool) -> int:
    """Runs streamlit in a process of its own until Ctrl-C or SIGTERM, and returns the exit code.

    Raises:
        ConfigError: the port cannot be had, or streamlit does not start.
    """
    number = free_port(host, port)
    environment = os.environ | options(host, number) | {VARIABLE: given.as_json()}
    # -P: no file of the folder that the user happens to be in may take the place of a module. A session of its own:
    # Ctrl-C reaches this process alone, which then ends the other.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dashboards.server"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with terminated_as_exception():
            _await(process, host, number)
            print(_welcome(given, host, number), flush=True)
            if browser:
                webbrowser.open(url(host, number))
            code = process.wait()
            raise ConfigError(f"streamlit ended with exit code {code}; what it said stands above")
    except KeyboardInterrupt:
        print("ibot-eval app: ended", file=sys.stderr)
        return 0
    except Interrupted:
        return 143
    finally:
        _end(process)


def _await(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if (code := process.poll()) is not None:
            raise ConfigError(f"streamlit did not start (exit code {code}); what it said stands above")
        if _answers(host, port):
            return
        time.sleep(0.1)
    raise ConfigError(f"streamlit did not answer within {START_SECONDS} s")


def _answers(host: str, port: int) -> bool:
    asked = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)
    connection = http.client.HTTPConnection(asked, port, timeout=2)
    try:
        connection.request("GET", "/_stcore/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()


def _welcome(given: Given, host: str, port: int) -> str:
    lines = [
        f"ibot-eval app: {url(host, port)}",
        f"  checkpoints: {', '.join(given.ckpt)}",
        f"  images: {given.data or 'sample pictures of scikit-learn'}",
    ]
    if host not in LOCAL:
        lines.append(f"  everyone who can reach {host} can see the images and results: use it in networks you trust")
    return "\n".join([*lines, "  Ctrl-C ends it"])


def main() -> None:
    """In the process that :func:`serve` starts."""
    from streamlit.web import cli

    from ibot_eval.orphans import end_with

    parent = Given.from_environment().parent
    if parent is not None:
        end_with(parent)
    cli.main(["run", str(PAGE)])


if __name__ == "__main__":
    main()
