"""Runs Python programs as forks of one process that has imported what they need: `python fork_server.py ADDRESS OWNER`.

Importing torch and Transformers takes a program seconds of CPU, a fork milliseconds. The server has done nothing but
import; what it forks runs like `python ARGUMENTS`: its own arguments, directory, environment, streams, `__main__` and
exit. It ends when the process OWNER has ended, and takes the folder of its address away. `programs.py` is the client.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import threading
from types import ModuleType
from typing import Any

IMPORTED = (
    *("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.utils.checkpoint"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "transformers.generation"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "msgspec", "tqdm", "tabulate", "jinja2"),
)
_LONGEST_REQUEST = 1 << 20
_OWNER_IS_ASKED_AFTER_S = 2


def serve(address: str, owner: int) -> None:
    """Answer requests until the owner has ended."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        listening.settimeout(_OWNER_IS_ASKED_AFTER_S)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for programs
        for name in IMPORTED:
            importlib.import_module(name)
        if session := sys.modules.get("profiler_wrapper.capture.session"):
            session.core_waits_ns = dict  # type: ignore[attr-defined]  # as in `conftest.py`
        gc.collect()
        gc.freeze()
        while _is_there(owner):
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            if not os.fork():
                listening.close()
                connection.settimeout(None)
                _answer(connection)
            connection.close()
    shutil.rmtree(os.path.dirname(address))


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _answer(connection: socket.socket) -> None:
    """Run the program that is asked for in a child, say its process, how it ended, its CPU seconds. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(_LONGEST_REQUEST)
    program = os.fork()
    if not program:
        connection.close()
        _become(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    connection.sendall(b"%d\n" % program)
    _, status, used = os.wait4(program, 0)
    connection.sendall(b"%d %f\n" % (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be `python ARGUMENTS` in this process, to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    code: object = 0
    try:
        _run(*request["arguments"])
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _run(what: str, *arguments: str) -> None:
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    first = {"-c": "", "-m": os.getcwd()}.get(what, os.path.dirname(os.path.abspath(what)))
    sys.path[:1] = [first, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    if what == "-m":
        sys.argv = [*arguments]
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # what an interpreter calls
    elif what == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv = [what, *arguments]
        main.__file__ = path = os.path.abspath(what)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, vars(main))


def _end(code: object) -> None:
    """As an interpreter ends, but that it does not take apart thousands of modules, which takes it half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    if code is None:
        code = 0
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
