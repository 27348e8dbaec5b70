"""A function run on several gloo processes at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

# What ranks need, imported once for all of them: it takes seconds, and a fork none.
IMPORTED = (
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch._inductor.codecache"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("profiler_wrapper.wrapper", "profiler_wrapper.timer.layer_spans", "pytest", "variants"),
)


def forked_afresh() -> ForkServerContext:
    """Starts processes by forks of one that has imported `IMPORTED` and done nothing: as good as new, and quicker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


def run_in_processes(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """`function(*args)` on each rank of a gloo group; what each returned, by rank.

    The function must be importable, and what it takes and returns picklable.

    Raises:
        ProcessRaisedException: a rank raised; the message has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        method = forked_afresh().get_start_method()
        start_processes(_rank, (world_size, folder, dict(os.environ), function, args), world_size, start_method=method)
        return [pickle.loads(_answer(folder, rank).read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.clear()  # a fork has that of when the first rank of all was started
    os.environ.update(environment)
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
