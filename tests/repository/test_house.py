"""The package keeps to its limits, and imports point one way."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import house


def test_the_package_grows_only_where_that_is_meant() -> None:
    rooms = house.sizes()
    assert rooms.keys() == house.ROOMS.keys()
    lines = sum(lines for _, lines, _ in rooms.values())
    assert lines <= house.MOST_LINES, "take something away, or move the limit in tests/house.py"


def test_a_file_is_no_longer_than_one_idea() -> None:
    assert house.too_long() == []


def test_modules_that_need_one_another_are_known() -> None:
    found = house.circles(house.needed_modules(house.files()))
    assert found == house.KNOWN_CIRCLES, "cut a new circle; take one that is cut from the list"


def test_a_circle_is_all_that_need_one_another() -> None:
    needs = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"f", "a"}, "f": {"e"}, "g": set()}
    assert house.circles(needs) == {frozenset("bcd"), frozenset("ef")}


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("from profiler_wrapper.a import b", {"a.b"}),
        ("from profiler_wrapper.a.b import name", {"a.b"}),
        ("from . import b", {"a.b"}),
        ("import profiler_wrapper.a.b as b, numpy", {"a.b"}),
        ("def f():\n    from profiler_wrapper.a import b", {"a.b"}),
        ("if TYPE_CHECKING:\n    from profiler_wrapper.a.b import Name", {"a.b"}),
        ("from profiler_wrapper import a", {"a"}),
        ("from profiler_wrapper.a import c", set()),
    ],
)
def test_what_a_module_needs_wherever_it_says_so(source: str, needs: set[str]) -> None:
    assert house.needed_modules({"a/c.py": source, "a/b.py": "", "a/__init__.py": ""})["a.c"] == needs - {"a.c"}


def test_words_of_our_own_stay_away() -> None:
    assert house.own_words() == {}


def test_imports_point_one_way() -> None:
    assert [line for path, text in house.files().items() for line in house.wrong_imports(path, text)] == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("tables/a.py", "from profiler_wrapper.trace.recording import Spans", []),
        ("tables/a.py", "from profiler_wrapper.reports import table", ["tables/a.py: imports reports"]),
        ("trace/a.py", "def f():\n    from ..capture.session import S", ["trace/a.py: imports capture.session"]),
        ("trace/a.py", "from . import columns", []),
        ("capture/a.py", "import profiler_wrapper.tables.model as m", ["capture/a.py: imports tables.model"]),
        ("reports/a.py", "from profiler_wrapper import wrapper", ["reports/a.py: imports wrapper"]),
        ("reports/a.py", "from profiler_wrapper import units", []),
        ("reports/a.py", "import profiler_wrapper", ["reports/a.py: imports profiler_wrapper"]),
        ("units.py", "from profiler_wrapper.errors import WrongUse", []),
        ("errors.py", "from profiler_wrapper.trace import run_directory", ["errors.py: imports trace"]),
        ("wrapper.py", "from profiler_wrapper.reports import table", []),
    ],
)
def test_the_check_of_imports(path: str, source: str, wrong: list[str]) -> None:
    assert house.wrong_imports(path, source) == wrong


def test_a_test_is_found_from_its_module() -> None:
    """`tests/<folder>/test_<module>*.py`; `tests/repository` has no module."""
    tests = Path(__file__).parents[1]
    for path in tests.rglob("test_*.py"):
        folder, name = path.parent.relative_to(tests), path.stem.removeprefix("test_")
        modules = [module.stem for module in (house.ROOT / folder).glob("*.py")]
        is_found = any(name == module or name.startswith(f"{module}_") for module in modules)
        assert is_found or folder.parts[:1] == ("repository",), f"{path}: {folder} has no module of that name"


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
