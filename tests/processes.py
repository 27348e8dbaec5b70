"""A function run on several gloo processes at once: forks of one that has imported what the function needs."""

from __future__ import annotations

import ctypes
import os
import pickle
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from programs import Forked

_LONGEST_S = 3600  # a benchmark's
_PR_SET_PDEATHSIG = 1


class RankFailed(Exception):
    """A rank raised, or was killed; the message has its traceback."""


def run_in_processes(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """`function(*args)` on each rank of a gloo group; what each returned, by rank.

    The function must be importable, and what it takes and returns picklable.

    Raises:
        RankFailed: a rank raised. The others were ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = sys.modules["__main__"].__file__ if function.__module__ == "__main__" else None
        with open(_told(folder), "wb") as file:
            pickle.dump((world_size, sys.path, program), file)
            pickle.dump((function, args), file)
        first = Forked(__file__, folder)
        try:
            first.wait(_LONGEST_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(first.pid, signal.SIGKILL)  # its ranks end with it
            raise
        sys.stdout.write(first.stdout)
        if first.returncode != 0:
            raise RankFailed(first.stderr)
        return [pickle.loads(_answer(folder, rank).read_bytes()) for rank in range(world_size)]


@contextmanager
def started_as_ranks(*arguments: object, world_size: int, **how: Any) -> Iterator[list[Forked]]:
    """`python ARGUMENTS` on each rank of a job, in the environment of a worker of torchrun. `how`: see `Forked`."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"job{store.port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        **how.pop("environment", {}),
    }
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    ranks = [Forked(*arguments, environment={**common, **place}, **how) for place in places]
    try:
        yield ranks
    finally:
        for rank in ranks:
            if rank.returncode is None:
                os.kill(rank.pid, signal.SIGKILL)


def main(folder: str) -> None:
    """Start the ranks, and end them all as soon as one has failed. In a rank: train, and return."""
    with open(_told(folder), "rb") as file:
        world_size, paths, program = pickle.load(file)
        sys.path[:] = paths
        if program is not None:
            sys.modules["__main__"] = _imported(program)
        function, args = pickle.load(file)
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        child = os.fork()
        if not child:
            _run_rank(rank, world_size, folder, function, args)
            return  # the process ends as one that was started for it
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")


def _imported(program: str) -> ModuleType:
    """A program as a module, which its functions are pickled as parts of."""
    found = ModuleType("__main__")
    vars(found).update(runpy.run_path(program, run_name="__not_main__"))
    return found


def _run_rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the one that started it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = function(*args)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # before others fail for want of this one
    dist.destroy_process_group()
    _answer(folder, rank).write_bytes(pickle.dumps(result))


def _told(folder: str) -> str:
    return os.path.join(folder, "told.pickle")


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pickle"


if __name__ == "__main__":
    main(sys.argv[1])
