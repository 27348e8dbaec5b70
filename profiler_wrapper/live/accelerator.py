"""The accelerator of this process as the monitor sees it: events, memory, copies. Nothing here ever waits for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from profiler_wrapper.errors import WrongUse


class Event(Protocol):
    """A point in the work that a device was given."""

    def record(self) -> None:
        """Put it behind what the device was given so far."""

    def query(self) -> bool:
        """The device has come to it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until a later one; both have been reached."""


class Accelerator(Protocol):
    """What the monitor needs of a device."""

    def ready(self) -> bool:
        """It is in use by this process, and may be given something now."""

    def event(self) -> Event:
        """A new one that keeps the time."""

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes allocated now, and the most so far."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host that is right as soon as an event recorded after this is reached."""


class TorchAccelerator:
    """The current accelerator, by torch.

    Args:
        device_type: "cuda", "xpu", "mps", ...
    """

    def __init__(self, device_type: str) -> None:
        self._module: Any = getattr(torch, device_type)
        self._initialised: Any = getattr(self._module, "is_initialized", lambda: True)
        self._capturing: Any = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._event: Any = getattr(self._module, "Event", None) or _event_of(device_type)
        self._pins = True
        self._statistics: Any = getattr(self._module, "memory_stats_as_nested_dict", None)

    def ready(self) -> bool:
        return bool(self._initialised()) and not self._capturing()

    def event(self) -> Event:
        event: Event = self._event(enable_timing=True)
        return event

    def memory(self) -> tuple[int | None, int | None]:
        if self._statistics is not None:  # a fifth of what the flat statistics cost
            allocated = self._statistics().get("allocated_bytes", {}).get("all", {})
            return allocated.get("current"), allocated.get("peak")
        current, peak = (_called(self._module, name) for name in ("memory_allocated", "max_memory_allocated"))
        if current is None:  # MPS
            current = _called(self._module, "current_allocated_memory")
        return current, peak

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins)
        except (RuntimeError, NotImplementedError):  # a device that shares its memory with the host
            self._pins = False
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor, non_blocking=True)


def find_accelerator(device: str | torch.device | None = None) -> TorchAccelerator | None:
    """The accelerator that training runs on; None for a CPU. Starts no device.

    Args:
        device: what the user says; None: what torch finds.

    Raises:
        WrongUse: torch knows no such device.
    """
    if device is not None:
        try:
            device_type = torch.device(device).type
        except Exception as error:
            raise WrongUse(f"device={device!r} is none that torch knows. Give 'cpu' or 'cuda', or nothing.") from error
    else:
        accelerators = getattr(torch, "accelerator", None)
        if accelerators is None or not accelerators.is_available():
            return None
        device_type = accelerators.current_accelerator().type
    return None if device_type in ("cpu", "meta") else TorchAccelerator(device_type)


def _event_of(device_type: str) -> Any:
    def event(*, enable_timing: bool) -> Any:
        return torch.Event(device=device_type, enable_timing=enable_timing)

    return event


def _called(module: Any, name: str) -> int | None:
    function = getattr(module, name, None)
    return None if function is None else int(function())
