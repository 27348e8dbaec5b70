"""What the sources of the rules of advice say, without asking a rule."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from profiler_wrapper import advice


def finding_calls() -> Iterator[tuple[ModuleType, ast.Call]]:
    """Each call that makes a finding, and the module that it stands in."""
    for source in Path(advice.__path__[0]).glob("*.py"):
        module = importlib.import_module(f"{advice.__name__}.{source.stem}")
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "finding":
                yield module, call
