"""Imports point one way: a room sees the rooms that ALLOWED names, the top level, `commands` and `integrations` all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "profiler_wrapper"
PACKAGE = "profiler_wrapper"

# What each part may import of the package besides itself and SHARED.
ALLOWED = {
    "trace": set(),
    "capture": {"trace"},
    "analysis": {"trace"},
    "reports": {"analysis", "trace"},
    "comparison": {"analysis", "reports", "result", "trace"},
    "ranks": {"analysis", "reports", "trace"},
    "snapshot": {"reports", "trace"},
    "timer": {"capture", "trace"},
    "config_flops": set(),
    "monitor": {"analysis", "capture", "config_flops", "reports", "timer", "trace"},
    "run": {"__version__", "analysis", "capture", "reports", "result", "trace"},
}
SHARED = {"errors", "child", "units"}  # import nothing of the package but one another
SEES_ALL = {"commands", "integrations"}


def imported(source: str, package: str) -> Iterator[str]:
    """The modules of ours that a file imports, as dotted names below `profiler_wrapper`; `package` is the file's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            else:
                base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == PACKAGE else [base]
        else:
            continue
        for name in names:
            if name == PACKAGE or name.startswith(f"{PACKAGE}."):
                yield name.removeprefix(PACKAGE).removeprefix(".")


def part(module: str) -> str:
    """`"analysis.model"` -> `"analysis"`; the package itself is `""`."""
    return module.split(".")[0]


def offences(relative: Path, source: str) -> list[str]:
    """The imports of one file that point the wrong way."""
    package = ".".join([PACKAGE, *relative.parent.parts])
    own = part(".".join(relative.with_suffix("").parts))
    if own in SHARED:
        allowed: set[str] = SHARED
    elif own in ALLOWED:
        allowed = ALLOWED[own] | SHARED | {own}
    else:  # a module at the top, or a package that sees all
        return []
    wrong = {module for module in imported(source, package) if part(module) not in allowed}
    return [f"{relative}: imports {module or PACKAGE}" for module in sorted(wrong)]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    assert offences(path.relative_to(ROOT), path.read_text(encoding="utf-8")) == []


def test_every_package_has_a_direction() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= ALLOWED.keys() | SEES_ALL


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("analysis/a.py", "from profiler_wrapper.trace.recording import Spans", []),
        ("analysis/a.py", "from profiler_wrapper.reports import tables", ["analysis/a.py: imports reports"]),
        (
            "trace/a.py",
            "def f():\n    from ..capture.session import S",
            ["trace/a.py: imports capture.session"],
        ),
        ("trace/a.py", "from . import columns", []),
        ("capture/a.py", "import profiler_wrapper.analysis.model as m", ["capture/a.py: imports analysis.model"]),
        ("reports/a.py", "from profiler_wrapper import wrapper", ["reports/a.py: imports wrapper"]),
        ("reports/a.py", "from profiler_wrapper import units", []),
        ("reports/a.py", "import profiler_wrapper", ["reports/a.py: imports profiler_wrapper"]),
        ("units.py", "from profiler_wrapper.errors import WrongUse", []),
        ("errors.py", "from profiler_wrapper.trace import run_directory", ["errors.py: imports trace"]),
        ("wrapper.py", "from profiler_wrapper.reports import tables", []),
    ],
)
def test_the_check_itself(file: str, source: str, wrong: list[str]) -> None:
    assert offences(Path(file), source) == wrong
