"""Who reduces gradients behind a backward, so that it ends when the last of the ranks has come there."""

from __future__ import annotations

import torch
from torch import nn

from profiler_wrapper.capture.wrappers import holders
from profiler_wrapper.recording.rank_numbers import rank_list_text


def reduced_in(model: nn.Module) -> str | None:
    """The ranks that DDP reduces the gradients of this call over, as `"0-2,5"`; None: it does not."""
    for holder in holders(model):
        if isinstance(holder, nn.parallel.DistributedDataParallel) and holder.require_backward_grad_sync:
            try:
                return rank_list_text(torch.distributed.get_process_group_ranks(holder.process_group))
            except (KeyError, ValueError):  # the group was destroyed, which a call of the model may outlive
                return None
    return None
