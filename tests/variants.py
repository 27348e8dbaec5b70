"""Ways to wrap a case's model: `VARIANTS["fsdp2"](case)` returns what is then trained."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from models import Case


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of this process alone, unless there is one already."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def blocks_of(case: Case) -> nn.ModuleList:
    """The repeated layers of the case's model, in order."""
    return case.model.get_submodule(case.blocks)  # type: ignore[return-value]


def plain(case: Case) -> nn.Module:
    """The model as it is."""
    return case.model


def ddp(case: Case) -> nn.Module:
    """DistributedDataParallel; needs a process group."""
    return nn.parallel.DistributedDataParallel(case.model)


def fsdp2(case: Case) -> nn.Module:
    """`fully_shard` on each block, then on the root; needs a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in blocks_of(case):
        fully_shard(block, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    return case.model


def compiled_blocks(case: Case, *, backend: str = "inductor") -> nn.Module:
    """Each block replaced by `torch.compile(block)`."""
    blocks = blocks_of(case)
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return case.model


def compiled_in_place(case: Case, *, backend: str = "inductor") -> nn.Module:
    """`block.compile()` on each block."""
    for block in blocks_of(case):
        block.compile(backend=backend)
    return case.model


def compiled_whole(case: Case, *, backend: str = "inductor") -> nn.Module:
    """`torch.compile(model)`."""
    return torch.compile(case.model, backend=backend)  # type: ignore[return-value]


def checkpoint_wrapped(case: Case, *, reentrant: bool = False) -> nn.Module:
    """Each block inside torch's CheckpointWrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    blocks = blocks_of(case)
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)
    return case.model


def gradient_checkpointing(case: Case, *, reentrant: bool = False) -> nn.Module:
    """Hugging Face's own switch; diffusers' for its models, which is never reentrant."""
    model: Any = case.model
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    else:
        model.enable_gradient_checkpointing()
    return case.model


def gradient_checkpointing_reentrant(case: Case) -> nn.Module:
    """Hugging Face's own switch, reentrant."""
    return gradient_checkpointing(case, reentrant=True)


def lora(case: Case) -> nn.Module:
    """PEFT LoRA on the attention's projections, whatever the model calls them."""
    import peft

    names = {name.rsplit(".", 1)[-1] for name, module in case.model.named_modules() if _is_projection(module)}
    targets = sorted(names & {"q_proj", "v_proj", "c_attn", "query", "value", "to_q", "to_v"})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(case.model, peft.LoraConfig(r=4, target_modules=targets))


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


VARIANTS: dict[str, Callable[[Case], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "compiled_blocks": compiled_blocks,
    "compiled_in_place": compiled_in_place,
    "checkpoint_wrapped": checkpoint_wrapped,
    "gradient_checkpointing": gradient_checkpointing,
    "gradient_checkpointing_reentrant": gradient_checkpointing_reentrant,
    "lora": lora,
}
NEEDS_PROCESS_GROUP = frozenset({"ddp", "fsdp2"})
