"""The rooms keep to their limits, and imports point one way."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import house


def test_every_room_keeps_to_its_limit() -> None:
    rooms = house.sizes()
    assert rooms.keys() == house.ROOMS.keys()
    grown = {
        room: (modules, lines)
        for room, (modules, lines, _) in rooms.items()
        if modules > house.ROOMS[room].modules or lines > house.ROOMS[room].lines
    }
    assert grown == {}, "merge something, or raise the limit in tests/house.py and say why in the commit"


def test_no_file_or_folder_is_out_of_bounds() -> None:
    assert house.odd_sizes() == []


def test_no_module_needs_itself() -> None:
    assert house.circles() == []


def test_words_of_our_own_stay_away() -> None:
    assert house.own_words() == {}


def test_imports_point_one_way() -> None:
    assert [line for path, text in house.files().items() for line in house.wrong_imports(path, text)] == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("analysis/a.py", "from profiler_wrapper.trace.recording import Spans", []),
        ("analysis/a.py", "from profiler_wrapper.reports import tables", ["analysis/a.py: imports reports"]),
        ("trace/a.py", "def f():\n    from ..capture.session import S", ["trace/a.py: imports capture.session"]),
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
def test_the_check_of_imports(path: str, source: str, wrong: list[str]) -> None:
    assert house.wrong_imports(path, source) == wrong


def test_the_check_of_words_and_lines() -> None:
    assert list(house.own_words_in("def f(toldParts): return x.untold_bytes + not_told")) == ["told", "told"]
    assert house.line_count("# one\nx = 1  # two\n\n") == 2


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py")), ids=lambda path: path.stem
)
def test_benchmarks_import_what_there_is(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("profiler_wrapper"):
            module = importlib.import_module(str(node.module))
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            modules = {one.name for one in pkgutil.iter_modules(getattr(module, "__path__", ()))}
            assert not set(missing) - modules
