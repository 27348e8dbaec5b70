"""How many tokens each expert got, where one module holds the weights of all and one kernel multiplies them.

Such a module is given which experts each token goes to, or how many tokens each gets. That tensor is held, not
copied, so nothing is launched while steps run, and read as soon as the profiler has stopped. Only while shapes are
recorded: no memory is reported of those steps, unless they are the only ones.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.session import Session
from profiler_wrapper.capture.torch_state import capturing, in_backward
from profiler_wrapper.errors import in_a_line

_MOST_HELD_BYTES = 64 << 20
_MOST_HELD_NUMBERS = 1 << 19  # tokens of one expert in one call, which run.json holds


class RoutedTokens:
    """The tokens that experts got, call by call, in the last session with shapes."""

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None
        self._held: dict[object, list[tuple[torch.Tensor, int, int | None]]] = {}  # (routing, experts, version)
        self._bytes = self._numbers = 0
        self._tokens: dict[object, list[list[int]] | str] = {}

    def hold(self, target: object, experts: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a call that is about to begin, the tensor that says which tokens go where."""
        session = Session.with_shapes
        if session is None or in_backward():
            return
        if self._session is None or self._session() is not session:
            self._session, self._tokens = weakref.ref(session), {}
            session.when_stopped.append(self._read)
        if target in self._tokens:
            return
        routing = next((one for one in (*args, *kwargs.values()) if _is_routing(one, experts)), None)
        if routing is None:
            self._leave(target, "the module of the experts is given no tensor that tells them")
        elif routing.is_cuda and capturing():
            self._leave(target, "a graph was captured")
        elif self._bytes + routing.nbytes > _MOST_HELD_BYTES or self._numbers + experts > _MOST_HELD_NUMBERS:
            self._leave(target, "there were too many calls, or too many tokens, to hold")
        else:
            self._bytes += routing.nbytes
            self._numbers += experts
            version = None if routing.is_inference() else routing._version
            self._held.setdefault(target, []).append((routing, experts, version))

    def _leave(self, target: object, reason: str) -> None:
        self._tokens[target] = reason
        self._held.pop(target, None)

    def _read(self) -> None:
        held, self._held, self._bytes, self._numbers = self._held, {}, 0, 0
        for target, calls in held.items():
            try:
                changed = any(version not in (None, one._version) for one, _, version in calls)
                tokens = [_tokens_of(one, experts) for one, experts, _ in calls]
                self._tokens[target] = "the tensor that tells them was changed afterwards" if changed else tokens
            except Exception as error:
                self._tokens[target] = f"it could not be read: {in_a_line(error)}"

    def of(self, target: object) -> dict[str, Any]:
        """What is known, as an entry of `describe`: tokens by call and expert, or why they are not known."""
        tokens = self._tokens.get(target)
        if tokens is None:
            return {}
        return {"tokens_unknown": tokens} if isinstance(tokens, str) else {"expert_tokens": tokens}


def experts_in(module: nn.Module) -> int:
    """How many experts one module holds the weights of; 0 for one expert, or none."""
    named = (getattr(module, name, None) for name in ("num_experts", "num_local_experts"))
    stacked = (one.shape[0] for one in module._parameters.values() if one is not None and one.dim() == 3)
    return next((one for one in (*named, *stacked) if type(one) is int and one > 1), 0)


def _is_routing(given: object, experts: int) -> bool:
    """Of two dimensions: (tokens, chosen), the numbers of experts; of one: the tokens of each."""
    if type(given) is not torch.Tensor or given.dtype not in (torch.int64, torch.int32):
        return False
    return given.dim() == 2 or (given.dim() == 1 and len(given) == experts)


def _tokens_of(routing: torch.Tensor, experts: int) -> list[int]:
    numbers = routing.detach().cpu().flatten()
    if routing.dim() == 2:  # a number beyond the last is that of an expert on another rank
        numbers = torch.bincount(numbers[(numbers >= 0) & (numbers < experts)], minlength=experts)
    return [int(number) for number in numbers.tolist()]
