"""Numbers of a step that may still be on the device: copied without waiting, and read when they are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from profiler_wrapper.live.device_events import Accelerator
from profiler_wrapper.notices import Notices


class Copy:
    """A number that is on its way to the host."""

    __slots__ = ("_host",)

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    def value(self) -> float:
        """Once it is there."""
        return float(self._host.item())


Number: TypeAlias = "float | Copy | None"
_MOST_BITS = 256  # of a whole number: more than that counts nothing


def value_of(number: Number) -> float | None:
    """The number, once its copy is there."""
    return number.value() if isinstance(number, Copy) else number


class Intake:
    """Takes what users give: numbers, and tensors of one number wherever they are."""

    def __init__(self, accelerator: Accelerator | None, notices: Notices) -> None:
        self._accelerator, self._notices = accelerator, notices

    def number(self, name: str, given: Any) -> Number:
        """`None` where it is no number, with one warning."""
        if isinstance(given, (list, tuple)) and len(given) == 1:  # as `get_last_lr()` gives it
            given = given[0]
        if isinstance(given, int) and given.bit_length() > _MOST_BITS:
            return self._refused(name, "it is too large")
        if given is None or isinstance(given, (float, int)):
            return given
        if isinstance(given, torch.Tensor):
            return self._of_tensor(name, given)
        try:
            return float(given)
        except (TypeError, ValueError):
            return self._refused(name, f"it is a {type(given).__name__}, no number")

    def whole(self, name: str, given: Any) -> int | None:
        """A number of a step or an epoch, which has to be known at once."""
        number = self.number(name, given)
        if isinstance(number, Copy):
            self._refused(name, "it is on the device, and reading it would wait: give a number")
            return None
        return None if number is None or not math.isfinite(number) else int(number)

    def count(self, name: str, given: Any) -> Number:
        """A number of things, which is not below 0."""
        number = self.number(name, given)
        if number is None or isinstance(number, Copy) or 0 <= number < float("inf"):
            return number
        return self._refused(name, f"{number} is no number of {name}")

    def real_tokens(self, mask: Any) -> list[Number]:
        """How many entries of an attention mask, or of each of several, are not 0."""
        masks = mask if isinstance(mask, (list, tuple)) else [mask]
        return [self.number("attention_mask", _nonzero(one)) for one in masks]

    def _of_tensor(self, name: str, tensor: torch.Tensor) -> Number:
        tensor = tensor.detach()
        placements = getattr(tensor, "placements", None)
        if placements is not None:  # a DTensor
            if any(not placement.is_replicate() for placement in placements):
                return self._refused(name, "it is spread over several ranks: give its .full_tensor()")
            tensor = tensor.to_local()  # type: ignore[attr-defined]
        if tensor.numel() != 1 or tensor.is_meta:
            return self._refused(name, f"it is a tensor of shape {tuple(tensor.shape)}, no number")
        if tensor.is_complex():
            return self._refused(name, "it is complex, no number")
        if tensor.device.type == "cpu":
            return float(tensor.item())
        if self._accelerator is None:
            return self._refused(name, f"it is on {tensor.device}, and the monitor was told of a CPU")
        return Copy(self._accelerator.copy(tensor.reshape(())))

    def _refused(self, name: str, why: str) -> Number:
        self._notices.once(f"number {name}", f"the monitor leaves out {name}: {why}")
        return None


def shapes_of_masks(mask: Any) -> tuple[tuple[int, int], ...] | None:
    """(sequences, places of each) of a mask, or of each of several; None where one has another shape."""
    masks: Sequence[Any] = mask if isinstance(mask, (list, tuple)) else [mask]
    return shapes_of([getattr(one, "shape", ()) for one in masks])


def shapes_of(shapes: Any) -> tuple[tuple[int, int], ...] | None:
    """As plain numbers; None where they are no pairs of numbers, or there are none."""
    try:
        found = tuple((int(sequences), int(length)) for sequences, length in shapes)
    except (TypeError, ValueError):
        return None
    return found or None


def _nonzero(mask: Any) -> Any:
    return torch.count_nonzero(mask) if isinstance(mask, torch.Tensor) else sum(bool(x) for row in mask for x in row)
