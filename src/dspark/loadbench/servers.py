"""Servers of our own as child processes: started on a free port, paused while another is measured, ended for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from dspark.errors import ConfigError
from dspark.loadbench.client import Way

START_SECONDS = 300.0  # for a server to load its model
STOP_SECONDS = 20.0
LOG_TAIL = 600  # characters of a dead server's log in the error


@dataclass
class Served:
    """A way with the process behind it; None: somebody else's server."""

    way: Way
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def pause(self) -> None:
        """Take the CPU away from it; POSIX only, elsewhere an idle server is trusted to be idle."""
        self._signal("SIGSTOP")

    def resume(self) -> None:
        self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        number = getattr(signal, name, None)
        if self.process is not None and number is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def started(name: str, options: Sequence[str]) -> Iterator[Served]:
    """``dspark serve`` with ``options`` under a free port, ready; ended when the block ends.

    Raises :class:`ConfigError` with the end of its log if it dies or is not ready in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "dspark", "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.NamedTemporaryFile(prefix=f"dspark-{name}-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    served = Served(Way(name=name, url=f"http://127.0.0.1:{port}", model=""), process, Path(log.name))
    try:
        wait_ready(served)
        served.way = Way(name=name, url=served.way.url, model=model_name(served.way.url))
        yield served
    finally:
        stop(served)
        Path(log.name).unlink(missing_ok=True)


def wait_ready(served: Served, *, seconds: float = START_SECONDS) -> None:
    """Return once /health answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if served.process is not None and served.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{served.way.url}/health", timeout=2.0).status_code == 200:
                return
        time.sleep(0.2)
    tail = served.log.read_text(errors="replace")[-LOG_TAIL:] if served.log else ""
    raise ConfigError(f"server {served.way.name} at {served.way.url} is not ready: {tail.strip() or 'no answer'}")


def model_name(url: str, *, api_key: str | None = None) -> str:
    """What a server calls its model. Raises :class:`ConfigError` unless it serves exactly one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10.0)
        response.raise_for_status()
        names = [row["id"] for row in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not say which model it serves ({error}); is it an OpenAI server?") from None
    if len(names) != 1:
        raise ConfigError(f"{url} serves {', '.join(names) or 'no model'}; name one: --peer NAME=URL#MODEL")
    return str(names[0])


def stop(served: Served) -> None:
    """End a server's process group: asked first, then killed."""
    process = served.process
    if process is None or process.poll() is not None:
        return
    served.resume()
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
