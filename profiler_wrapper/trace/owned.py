"""What run.json says of the tensors that the model and its optimizers own, and of compiled graphs.

`held`:

    [{"time_ns": unix time, "tensors": {device: [[address, bytes, category, name], ...]}}, ...]

in order of time: one entry when the recording begins, one before each step of an optimizer (gradients) and
one after it (state, if that is other than before), one when it ends. A category is params, grads, os_params
or os_state. `address` is where the storage begins, `bytes` how long it is; storages that several tensors
share are listed once. What is not listed at one moment may be held all the same: only the first and the last
entry list everything, and the first knows no optimizer that has made no step yet. What the list does not
know it leaves out; it is empty where nothing is known.

Of compiled code, per Inductor graph, by its cache key, which modules each kernel works for:

    {"kernels": [[name, is_extern, phase, [number of a module, ...]], ...],     in the order of the calls
     "inside": [[root, path, [full name of each module, by number]], ...]}      the layers that it may run in

A module without a kernel ran as well, but nothing of it is left. Instead of all that, why a graph's kernels are
not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ALL_GRAPHS = "*"  # stands for the key of any graph that is not listed


class HeldTensor(NamedTuple):
    """A storage that the model or an optimizer holds."""

    address: _Number
    size_bytes: _Number
    category: str  # params, grads, os_params, os_state
    name: str  # full name of the parameter or buffer; "exp_avg of <name>" for state; "master of <name>"


@dataclass(frozen=True, slots=True)
class Holding:
    """What was held at one moment."""

    time_ns: _Number  # unix time
    tensors: Mapping[str, tuple[HeldTensor, ...]]  # by device: "cpu", "cuda:0"


def holdings_to_list(holdings: Sequence[Holding]) -> list[dict[str, Any]]:
    """As run.json has it."""
    found: list[dict[str, Any]] = msgspec.to_builtins(list(holdings))
    return found


def read_holdings(held: object) -> tuple[Holding, ...]:
    """What a run says of it; empty where it says nothing.

    Raises:
        ValueError: it is not what was written.
    """
    try:
        return msgspec.convert(() if held is None else held, tuple[Holding, ...])
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"held: {error}") from error
