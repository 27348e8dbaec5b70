"""Models whose memory for backward is easily misjudged: `CASES["name"]()` gives one to measure.

Real models where one has the peculiarity; the modules written here say by hand what they keep (`keeps`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import models
import variants
from models import Batch, Case
from module_stack import layer_names
from small_models import Checkpointed

ROWS = 96  # of the batch of a written model
WIDTH = 32
FLOAT, INTEGER = 4, 8  # bytes


@dataclass(frozen=True)
class RetainedCase:
    """A model and how it is run."""

    case: Case
    names: dict[int, str]  # as `layer_names` gives them; of a wrapped model
    autocast: torch.dtype | None = None
    keeps: dict[str, int] = field(default_factory=dict)  # layer -> bytes, derived by hand


# --- written models -------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """Gate and product are functions, no modules."""

    inner = 3 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, self.inner, bias=False)
        self.up = nn.Linear(WIDTH, self.inner, bias=False)
        self.down = nn.Linear(self.inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Kept: the gate (by silu), silu's result and up (by the product), the product (by down).
        return self.down(F.silu(self.gate(x)) * self.up(x))

    keeps = ROWS * inner * 4 * FLOAT


class FunctionalDropout(nn.Module):
    """Keeps the masks of two dropouts and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.3, training=True) + x, 0.2, training=True)

    keeps = 2 * ROWS * WIDTH * FLOAT  # on a CPU a mask is a factor for each number


class Buckets(nn.Module):
    """Looks up integers that it makes itself: they are all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.detach() * 4).long().clamp(0, 15)  # a whole row of ids for each row of x
        return x + self.table(ids).mean(1)

    keeps = ROWS * WIDTH * INTEGER


class TupleLeaf(nn.Module):
    """A leaf whose outputs come in a tuple within a tuple, beside None and a number; keeps two of them."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return (torch.exp(x), (torch.tanh(x), None), x * 2, 3)

    keeps = 2 * ROWS * WIDTH * FLOAT


class RecurrentLeaf(nn.Module):
    """A GRU, which returns its output and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, state = self.cell(x.view(-1, 8, WIDTH))
        return output.reshape(x.shape) + state.sum()


class Chain(nn.Module):
    """A Linear, then what is measured, which so gets an input that needs a gradient, twice if `again`."""

    def __init__(self, measured: nn.Module, *, again: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.measured = measured
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.measured(self.first(x))
        if self.again:
            result = self.measured(result)
        while isinstance(result, tuple):
            result = result[0] + result[1][0] + result[2]
        return result.sum()


def _written(measured: nn.Module, *, again: bool = False) -> RetainedCase:
    model = Chain(measured, again=again)

    def batch(seed: int) -> Batch:
        return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}

    case = Case(type(measured).__name__, model, batch, lambda model, batch: model(**batch), "")
    keeps = {"measured": measured.keeps} if hasattr(measured, "keeps") else {}
    return RetainedCase(case, layer_names(model), keeps=keeps)


# --- real models ----------------------------------------------------------------------------------


def _real(name: str, *, autocast: torch.dtype | None = None, **size: Any) -> RetainedCase:
    case = models.build(name, **size)
    return RetainedCase(case, layer_names(case.model), autocast)


def _attention_dropout(name: str, **size: Any) -> RetainedCase:
    """Hugging Face applies `F.dropout` to the probabilities."""
    found = _real(name, **size)
    for module in found.case.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return found


def _frozen(name: str, backbone: str, **size: Any) -> RetainedCase:
    found = _real(name, **size)
    found.case.model.get_submodule(backbone).requires_grad_(False)
    return found


def _lora(name: str) -> RetainedCase:
    case = models.build(name)
    return RetainedCase(replace(case, model=variants.lora(case)), layer_names(case.model))


def _shared_block(name: str) -> RetainedCase:
    """The last block is the first one again."""
    case = models.build(name, layers=3)
    blocks = variants.blocks_of(case)
    blocks[2] = blocks[0]
    return RetainedCase(case, layer_names(case.model))


def _hugging_face_checkpointing(name: str, *, reentrant: bool, **size: Any) -> RetainedCase:
    found = _real(name, **size)
    variants.gradient_checkpointing(found.case, reentrant=reentrant)
    return found


def _checkpoint_wrapper(name: str, *, reentrant: bool) -> RetainedCase:
    found = _real(name)
    variants.checkpoint_wrapped(found.case, reentrant=reentrant)
    wrappers: Any = variants.blocks_of(found.case)
    found.names.update({id(wrapper): found.names[id(wrapper._checkpoint_wrapped_module)] for wrapper in wrappers})
    return found


def _checkpoint_call(*, reentrant: bool) -> RetainedCase:
    """`torch.utils.checkpoint.checkpoint` in a forward."""
    model = Checkpointed(reentrant=reentrant)
    case = Case("Checkpointed", model, lambda seed: {"x": torch.ones(ROWS, 4, requires_grad=True)}, _sum, "layers")
    return RetainedCase(case, layer_names(model))


def _sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"]).sum()


_LONG: dict[str, Any] = {"tokens": 512, "batch": 1, "heads": 2, "attention": "eager"}
_EXPLICIT: dict[str, Any] = {"tokens": 256, "attention": "eager"}
_NAMES = ("llama", "gpt2", "bert", "vit", "mixtral", "qwen2")

_KINDS = {"reentrant": True, "non-reentrant": False}

CASES: dict[str, Callable[[], RetainedCase]] = {
    **{name: partial(_real, name) for name in _NAMES},
    **{f"{name}, bf16": partial(_real, name, autocast=torch.bfloat16) for name in _NAMES},
    "llama, explicit attention, 512 tokens": partial(_real, "llama", layers=1, **_LONG),
    "gpt2, explicit attention, 512 tokens": partial(_real, "gpt2", layers=1, **_LONG),
    "llama, explicit attention, bf16": partial(_real, "llama", autocast=torch.bfloat16, **_EXPLICIT),
    "SwiGLU of functions": lambda: _written(SwiGLU()),
    "dropout as a function": lambda: _written(FunctionalDropout(), again=True),
    "llama, dropout in explicit attention": partial(_attention_dropout, "llama", **_EXPLICIT),
    "llama, dropout in fused attention": partial(_attention_dropout, "llama", tokens=256),
    "integers made inside": lambda: _written(Buckets()),
    "a leaf that returns tuples": lambda: _written(TupleLeaf()),
    "a leaf that returns tuples, twice": lambda: _written(RecurrentLeaf(), again=True),
    "llama, a block called twice": partial(_shared_block, "llama"),
    "bert, frozen backbone": partial(_frozen, "bert", "bert", batch=64),
    "vit, frozen backbone": partial(_frozen, "vit", "vit", batch=16),
    "llama, frozen backbone": partial(_frozen, "llama", "model"),
    "llama, LoRA": partial(_lora, "llama"),
    **{
        f"{name}, Hugging Face checkpointing, {kind}": partial(_hugging_face_checkpointing, name, reentrant=reentrant)
        for name in ("llama", "gpt2", "bert", "vit")
        for kind, reentrant in _KINDS.items()
    },
    **{
        f"{name}, CheckpointWrapper, {kind}": partial(_checkpoint_wrapper, name, reentrant=reentrant)
        for name in ("llama", "gpt2")
        for kind, reentrant in _KINDS.items()
    },
    **{
        f"checkpoint() in a forward, {kind}": partial(_checkpoint_call, reentrant=reentrant)
        for kind, reentrant in _KINDS.items()
    },
}
