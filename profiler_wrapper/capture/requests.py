"""Requests: calls of `generate` and of pipelines, from outside of the model. Each is a step where nothing trains.

`Module.__call__` tells nothing of them, so they are replaced on their classes while somebody records. Of a class that
was defined after that the first request is found when it calls a model.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn

from profiler_wrapper.capture.kv_cache import RequestCaches
from profiler_wrapper.capture.torch_state import is_tracing, keep_dynamo_off, with_subclasses

# Modules that define such a class, the class, and its method.
_KNOWN = (
    ("transformers.generation.utils", "GenerationMixin", "generate"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "__call__"),
)
# What makes `generate` propose several tokens and have the model verify them at once.
_PROPOSE = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


@dataclass(slots=True)
class Request:
    """An outermost call that is running."""

    name: str  # "LlamaForCausalLM.generate"
    may_train: bool = False  # of a model in training mode: a rollout, if an optimizer comes
    verifies: bool = False  # tokens are proposed and verified
    found: bool = False  # while it ran, so nobody says when it ends
    depth: int = 1  # of such calls within one another
    called: set[str] = field(default_factory=set)  # labels of the roots
    beams: int = 1
    caches: RequestCaches = field(default_factory=RequestCaches)

    def phase(self, root: str, phase: str) -> str:
        """Of a call of this root that by itself looks like `phase`."""
        if phase == "forward":
            return phase
        if root not in self.called:
            self.called.add(root)
            return "prefill"
        if phase == "prefill" and self.verifies:  # several tokens
            return "verify" if self.depth == 1 else "decode"
        return phase


class Requests:
    """Hears of requests while installed.

    Args:
        model: whose requests count: what the user gave; None: everybody's.
        is_part: whether a module lies in what the user gave.

    Attributes:
        on_begin, on_end: called around each outermost request, on its thread.

    No method raises for a failure of what is profiled.
    """

    def __init__(self, model: object | None, *, is_part: Callable[[nn.Module], bool]) -> None:
        self._own = None if model is None or isinstance(model, nn.Module) else type(model)
        self._everybodys, self._is_part = model is None, is_part
        self.on_begin: Callable[[Request], None] = lambda request: None
        self.on_end: Callable[[Request], None] = lambda request: None
        self._replaced: list[tuple[type, str, Any, Any]] = []  # class, method, the original, ours
        self._codes: set[CodeType | None] = set()
        self._looked: set[tuple[str, int]] = set()  # root, and how many modules of Python there were
        self.here = _Here()
        self._installed = False

    def install(self) -> None:
        """From now on; what has been defined since is heard too when this is called again."""
        self._installed = True
        for cls, name in self._classes():
            original = vars(cls).get(name)
            if not callable(original) or any(original is ours for *_, ours in self._replaced):
                continue
            ours = self._around(original, name)
            try:
                setattr(cls, name, ours)
            except (AttributeError, TypeError):  # a class that cannot be changed
                continue
            self._replaced.append((cls, name, original, ours))
            self._codes.add(getattr(inspect.unwrap(original), "__code__", None))

    def remove(self) -> None:
        """No longer. What somebody has replaced since stays, with ours below it, which does nothing."""
        self._installed = False
        for cls, name, original, ours in self._replaced:
            if vars(cls).get(name) is ours:
                setattr(cls, name, original)
        self._replaced.clear()
        self.here.request = None

    def look(self, root: str) -> None:
        """This root is called from outside: is that within a request that nobody has told of, or after one?

        Classes are looked for where the root is new, or something has been imported since.
        """
        request = self.here.request
        if not self._installed or not (request is None or request.found):
            return
        known = len(self._replaced)
        if request is None and (root, len(sys.modules)) not in self._looked:
            self._looked.add((root, len(sys.modules)))
            self.install()
        if request is not None or len(self._replaced) > known:
            owner = self._outermost()
            if owner is None and request is not None:
                self._end(request)
            elif owner is not None and request is None:
                self._begin(owner, {}, found=True)

    def _classes(self) -> Iterator[tuple[type, str]]:
        for module, class_name, method in _KNOWN:
            known = getattr(sys.modules.get(module), class_name, None)
            below = with_subclasses(known) if known is not None else ()
            yield from ((cls, method) for cls in below if method in vars(cls))
        if self._own is not None and isinstance(getattr(self._own, "components", None), (property, Mapping)):
            yield from ((cls, "__call__") for cls in self._own.__mro__ if "__call__" in vars(cls))

    def _around(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts = args and self._installed and not is_tracing()
            request = self._begin(args[0], kwargs) if counts else None
            if request is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._end(request)

        keep_dynamo_off(call, and_below=False)
        return call

    def _begin(self, owner: object, kwargs: Mapping[str, Any], *, found: bool = False) -> Request | None:
        """The request that runs now; None where it is none of ours."""
        request = self.here.request
        if request is not None and request.found:
            self._end(request)
            request = None
        if request is not None:
            request.depth += 1
            return request
        if not self._counts(owner):
            return None
        is_module = isinstance(owner, nn.Module)
        config = kwargs.get("generation_config") or getattr(owner, "generation_config", None)
        self.here.request = request = Request(
            f"{type(owner).__name__}.generate" if is_module else type(owner).__name__,
            may_train=is_module and owner.training,  # type: ignore[attr-defined]
            verifies=any(kwargs.get(name) or getattr(config, name, None) for name in _PROPOSE),
            found=found,
            beams=kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1,
        )
        self.on_begin(request)
        return request

    def _end(self, request: Request) -> None:
        request.depth -= 1
        if request.depth == 0 and self.here.request is request:
            self.here.request = None
            self.on_end(request)

    def _counts(self, owner: object) -> bool:
        if self._everybodys or type(owner) is self._own:
            return True
        if isinstance(owner, nn.Module):
            return self._is_part(owner)
        return any(isinstance(part, nn.Module) and self._is_part(part) for part in vars(owner).values())

    def _outermost(self) -> object | None:
        """Whose request it is in which this is called."""
        owner: object | None = None
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code in self._codes:
                owner = frame.f_locals.get("self")
            frame = frame.f_back
        return owner


for _ours in (Requests._begin, Requests._end):  # a compiled function may call `generate`
    keep_dynamo_off(_ours, and_below=True)


class _Here(threading.local):
    request: Request | None = None  # that runs on this thread
