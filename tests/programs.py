"""Python programs of their own, most of them forks of a process that has imported what they need; what one warns of."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from profiler_wrapper.errors import ProfilerWrapperWarning

TESTS = Path(__file__).parent
LONGEST_S = 300
cpu_s = 0.0  # of the programs that this process has waited for

_SERVER = TESTS / "fork_server.py"
OWNER = "FORK_SERVER_OWNER"  # the process of pytest that workers belong to, by which they find one server


class Forked:
    """A running `python ARGUMENTS`, as `subprocess.Popen`, but forked from the server of `fork_server.py`.

    For programs that ask what a program computes, writes, prints and ends with. One that asks what importing does, or
    how an interpreter starts or is interrupted, needs `subprocess` and `sys.executable`.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables besides those of this process."""
        self.arguments = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self.stdout, self.stderr = "", ""
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  (closed when they are read)
        self._server = _connection()
        request = {
            "arguments": self.arguments,
            "directory": str(cwd or os.getcwd()),
            "environment": {**os.environ, **(environment or {})},
        }
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), *(file.fileno() for file in self._files)]
            text = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._server, [text], streams)
            while sent < len(text):  # sending nothing fails where the program, and so its server, has ended
                sent += self._server.send(text[sent:])
        self._answers = self._server.makefile()
        self.pid = int(self._answers.readline())

    def wait(self, timeout_s: float = LONGEST_S) -> int:
        """How it ended, as `subprocess.Popen.returncode`; then `stdout` and `stderr` are there.

        Raises:
            subprocess.TimeoutExpired: it went on for longer, and is killed.
        """
        self._server.settimeout(timeout_s)
        try:
            answer = self._answers.readline()
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            self._server.settimeout(None)
            self._answers = self._server.makefile()
            self._end(self._answers.readline())
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, *self._read()) from None
        self.stdout, self.stderr = self._read()
        return self._end(answer)

    def _end(self, answer: str) -> int:
        global cpu_s
        code, its_cpu_s = answer.split()
        self.returncode = int(code)
        cpu_s += float(its_cpu_s)
        return self.returncode

    def _read(self) -> tuple[str, str]:
        self._answers.close()
        self._server.close()
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return texts[0], texts[1]


def run_program(*arguments: object, timeout_s: float = LONGEST_S, **how: object) -> Forked:
    """Run `python ARGUMENTS` to its end, whatever that is. `how`: see `Forked`."""
    program = Forked(*arguments, **how)  # type: ignore[arg-type]
    program.wait(timeout_s)
    return program


def run_script(body: str, *arguments: object) -> str:
    """What a program prints, which has `tests` and us on its path, must end well and say nothing on stderr."""
    paths = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"
    done = run_program("-c", paths + textwrap.dedent(body), *arguments, timeout_s=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def server_folder(owner: str) -> Path:
    """Where the server of that process has its socket, its log, and a lock for who starts it."""
    return Path(tempfile.gettempdir(), f"fork_server_{os.getuid()}_{owner}")


def _connection() -> socket.socket:
    """To the one server of this run of pytest, which the first that asks starts."""
    owner = os.environ.setdefault(OWNER, str(os.getpid()))
    folder = server_folder(owner)
    folder.mkdir(exist_ok=True)
    address = folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connected = socket.socket(socket.AF_UNIX)
        if connected.connect_ex(str(address)) != 0:
            address.unlink(missing_ok=True)  # of a server that was killed, whose owner had this number
            _start_server(address, owner)
            connected.connect(str(address))
    return connected


def _start_server(address: Path, owner: str) -> None:
    with (address.parent / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, _SERVER, address, owner],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is not for it
        )
    while not address.exists():
        if server.poll() is not None:
            raise RuntimeError(f"the fork server did not start:\n{(address.parent / 'log').read_text()}")
        time.sleep(0.05)


def warned(action: Callable[[], object]) -> list[str]:
    """What `action` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, ProfilerWrapperWarning)]
