"""A program that the fork server runs ends as the same program of an interpreter of its own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import programs
from programs import OWNER, Forked, run_program, server_folder

BODIES = {
    "prints": "import sys; print(sys.argv, __file__ if '__file__' in dir() else ''); print(2, file=sys.stderr)",
    "directory": "import os, sys; print(os.getcwd(), sys.path[0], os.environ['GIVEN'])",
    "raises": "def f():\n    raise KeyError('own')\nf()",
    "exits": "import atexit, sys; atexit.register(print, 'at the end'); sys.exit(3)",
    "exits with a text": "import sys; sys.exit('what went wrong')",
    "waits for threads": "import threading, time; threading.Timer(0.1, print, ['late']).start()",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "is killed": "import os; print('lost'); os.kill(os.getpid(), 9)",
    "main": "import sys; x = 1; print(sys.modules['__main__'].x, sys.stdin.read())",
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_fork_is_as_an_interpreter_of_its_own(what: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BODIES[what])
    arguments = {"-c": ["-c", BODIES[what]], "-m": ["-m", "own"], "script": [str(tmp_path / "own.py")]}[how] + [
        "a",
        "b c",
    ]
    environment = {"GIVEN": "value"}
    real = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    forked = run_program(*arguments, cwd=tmp_path, environment=environment)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_a_fork_that_goes_on_too_long_is_killed() -> None:
    program = Forked("-c", "import time; print('begun', flush=True); time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired) as told:
        program.wait(0.3)
    assert program.returncode == -9 and told.value.cmd[0] == "-c"


def test_the_cpu_time_of_a_fork_is_known() -> None:
    before = programs.cpu_s
    run_program("-c", "import time\nwhile time.process_time() < 0.2: pass")
    assert programs.cpu_s - before >= 0.2


def test_a_fork_may_end_before_it_is_asked_anything_more(monkeypatch: pytest.MonkeyPatch) -> None:
    send_fds = socket.send_fds

    def send_and_wait_for_the_end(server: socket.socket, *request: Any) -> int:
        sent = send_fds(server, *request)
        hung_up = select.poll()
        hung_up.register(server, 0)
        assert hung_up.poll(60_000)
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_wait_for_the_end)
    assert run_program("-c", "print('at once')").stdout == "at once\n"


def test_a_fork_has_what_is_imported_and_nothing_of_ours() -> None:
    told = run_program("-c", "import sys; print('torch' in sys.modules, 'profiler_wrapper' in sys.modules)")
    assert told.stdout == "True False\n"


@pytest.mark.full
def test_a_server_ends_with_its_owner_and_one_that_was_killed_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as owner:
        monkeypatch.setenv(OWNER, str(owner.pid))
        folder = server_folder(str(owner.pid))
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / "socket"))
        try:
            assert run_program("-c", "print('served')").stdout == "served\n"
        finally:
            owner.kill()
    while folder.exists():
        time.sleep(0.1)
