"""What must be as it was, and what a test raises or reads to see that."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from models import Case

CPU = [torch.profiler.ProfilerActivity.CPU]


class Boom(Exception):
    pass


def fails(*args: Any, **options: Any) -> Any:
    raise RuntimeError("ours")


def ours_in_the_way() -> dict[str, Any]:
    """Everything of the process that a profiler could leave changed."""
    autograd_profile = torch.autograd.profiler.profile
    return {
        "module call": nn.Module.__call__,
        "global hooks": {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(nn.modules.module).items()
            if name.startswith("_global_")
        },
        "optimizer hooks": [
            list(optimizer_module._global_optimizer_pre_hooks),
            list(optimizer_module._global_optimizer_post_hooks),
        ],
        "named blocks": (torch.profiler.record_function.__enter__, torch.profiler.record_function.__exit__),
        "profiler": (autograd_profile._prepare_trace, autograd_profile._start_trace, autograd_profile.__exit__),
        "collections of garbage": list(gc.callbacks),
        "starts of threads": threading.Thread.start,
        "profiling": torch._C._autograd._profiler_enabled(),
        "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        (
            name,
            sorted(vars(module)),
            *(len(getattr(module, hooks)) for hooks in vars(module) if hooks.endswith("_hooks")),
        )
        for name, module in model.named_modules()
    ]


@contextmanager
def nothing_left(case: Case) -> Iterator[None]:
    before, hooks = ours_in_the_way(), hooks_of(case.model)
    yield
    assert ours_in_the_way() == before
    assert hooks_of(case.model) == hooks


def names_in(profile: torch.profiler.profile, tmp_path: Path) -> list[str]:
    profile.export_chrome_trace(str(tmp_path / "theirs.json"))
    return [event["name"] for event in json.loads((tmp_path / "theirs.json").read_text())["traceEvents"]]
