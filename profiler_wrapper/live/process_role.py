"""Whether this process is a rank of a job, or works for one: loads its data, say."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_RANK_VARIABLES = ("RANK", "SLURM_PROCID")
_forked = False  # since this module was imported
_group_of_parent = False  # a process group that the fork brought along


def is_worker(*, told: bool = False, environment: Mapping[str, str] = os.environ) -> bool:
    """It was started by multiprocessing or forked, and neither was given a rank of its own nor joined a group.

    Args:
        told: in this process the user said which rank it is.
    """
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        return True
    if told or (not _forked and multiprocessing.parent_process() is None):
        return False
    return not has_process_group() and not _was_given_a_rank(environment)


def has_process_group() -> bool:
    """This process, and not the one that it was forked from, has joined a process group."""
    distributed = torch.distributed
    return not _group_of_parent and distributed.is_available() and distributed.is_initialized()


def _was_given_a_rank(environment: Mapping[str, str]) -> bool:
    """Its rank in the environment is not what it was started with: whoever launched it put it there."""
    try:
        inherited = _inherited()
    except OSError:
        return False
    return any(
        name in environment and f"{name}={environment[name]}".encode("utf-8", "surrogateescape") not in inherited
        for name in _RANK_VARIABLES
    )


def _inherited() -> list[bytes]:
    """The environment that this program was started with. Raises OSError where the system does not tell."""
    return Path("/proc/self/environ").read_bytes().split(b"\0")


def _after_fork() -> None:
    global _forked, _group_of_parent
    _forked = True
    distributed = torch.distributed
    _group_of_parent = distributed.is_available() and distributed.is_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
