"""A function run on several gloo processes at once."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_in_processes(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """`function(*args)` on each rank of a gloo group; what each returned, by rank.

    The function must be importable, and what it takes and returns picklable.

    Raises:
        ProcessRaisedException: a rank raised; the message has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)
        return [pickle.loads(_answer(folder, rank).read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = function(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    _answer(folder, rank).write_bytes(pickle.dumps(result))


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pickle"
