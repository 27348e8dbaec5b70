"""Who reduces gradients behind a backward, so that it ends when the last of the ranks has come there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from profiler_wrapper.capture.wrappers import holders


def reduced_in(model: nn.Module) -> str | None:
    """The ranks that DDP reduces the gradients of this call over, as `"0-2,5"`; None: it does not."""
    for holder in holders(model):
        if isinstance(holder, nn.parallel.DistributedDataParallel) and holder.require_backward_grad_sync:
            return _text_of(torch.distributed.get_process_group_ranks(holder.process_group))
    return None


def _text_of(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2,5"`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
