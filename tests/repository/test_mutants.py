"""Mutants: the draw, marks of equivalent changes, which tests are asked, what is compared with the scores."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import mutant_plugin
import mutants
from mutant_changes import MARK, Module, Mutant, draw
from mutant_reach import Case, Numbers, Reach, compile_to, import_mode, read_modules
from mutants import Runner, Score, lower, read_scores, write_scores

Key = tuple[str, str, str]

TEXT = dedent(
    '''
    LIMIT = 5

    class Row:
        depth: int = 0

        def is_deep(self, other):
            """Deeper than the limit."""
            return self.depth > LIMIT and other

    def least(rows, start=1):
        if not rows:
            return None
        return min(rows) + start

    table = {"a": lambda x: x + 2}
    '''
)


def module(text: str, path: str = "room/a.py") -> Module:
    return Module(path, dedent(text))


def keys(drawn: list[Mutant]) -> list[Key]:
    return [(mutant.function, mutant.line, mutant.change) for mutant in drawn]


def changes(text: str) -> dict[str, bool]:
    """Each change of a text and whether a mark says that it is none."""
    return {mutant.change: mutant.same for mutant in module(text).mutants}


# The draw.


def test_a_seed_draws_the_same_wherever_the_file_lies() -> None:
    here = draw([module(TEXT), module("def other():\n    return 7\n", "room/b.py")], seed=3, count=5)
    there = draw([module("def other():\n    return 7\n", "a.py"), module(TEXT, "room/deep/z.py")], seed=3, count=5)
    assert keys(here) == keys(there)
    assert len({line for _, line, _ in keys(here)}) == 5
    assert keys(here) != keys(draw([module(TEXT)], seed=4, count=5))


def test_comments_and_empty_lines_change_no_draw() -> None:
    commented = TEXT.replace("return None", "return None  # there are none").replace(
        "LIMIT = 5", "# why\n\nLIMIT = 5  # 5"
    )
    assert keys(draw([module(commented)], seed=0, count=6)) == keys(draw([module(TEXT)], seed=0, count=6))


def test_a_new_line_takes_one_place_at_most() -> None:
    more = TEXT + "\ndef more(x):\n    return x - 40\n"
    for seed in range(20):
        before, after = keys(draw([module(TEXT)], seed=seed, count=4)), keys(draw([module(more)], seed=seed, count=4))
        assert len(set(before) - set(after)) <= 1


def test_lines_that_read_the_same_are_drawn_apart() -> None:
    twice = module("def f(x):\n    if x:\n        return 1\n    return 1\n")
    assert len(draw([twice], seed=0, count=9)) == 3
    assert {mutant.place.lineno for mutant in draw([twice], seed=0, count=9)} == {2, 3, 4}


def test_a_mutant_changes_its_expression_alone() -> None:
    found = {mutant.change: mutant.source(TEXT) for mutant in module(TEXT).mutants}
    assert found["min -> max"] == TEXT.replace("min(rows)", "(max)(rows)")
    assert found["early return dropped"] == TEXT.replace("not rows", "(False)")
    assert found["and -> or"] == TEXT.replace("self.depth > LIMIT and other", "(self.depth > LIMIT or other)")
    assert found["5 -> 6"] == TEXT.replace("LIMIT = 5", "LIMIT = (6)")


def test_columns_are_bytes_and_expressions_may_take_lines() -> None:
    text = 'a = ("µ×", 7)\nb = (1\n     + 2)\n'
    found = {mutant.change: mutant.source(text) for mutant in module(text).mutants}
    assert found["7 -> 8"] == 'a = ("µ×", (8))\nb = (1\n     + 2)\n'
    assert found["+ -> -"] == 'a = ("µ×", 7)\nb = ((1 - 2))\n'


# Marks.


def test_a_mark_is_of_all_changes_of_its_line() -> None:
    assert changes("a = x > 1  # same: nobody asks\n") == {"> -> >=": True, "1 -> 2": True, "1 -> 0": True}


def test_a_mark_that_names_changes_is_of_these() -> None:
    found = {"> -> >=": True, "1 -> 2": False, "1 -> 0": True}
    assert changes("a = x > 1  # same (1 -> 0, > -> >=): nobody asks\n") == found
    assert changes("# same (1 -> 0, > -> >=): nobody asks\na = x > 1\n") == found
    assert changes("a = x > 1  # at most; same (1 -> 0, > -> >=): nobody asks\n") == found
    assert changes("a = x > 1  # type: ignore[x]  # same (1 -> 0, > -> >=): nobody asks\n") == found


@pytest.mark.parametrize(
    "text",
    [
        "a = x + 1\nb = 2  # same: not of the line above\n",
        "a = f('# same: a text') + 1\n",
        "a = x + 1  # the same: it is said elsewhere\n",
        "a = x + 1  # same:\n",
        "a = (x  # same: of this line\n     + 1)\n",
    ],
)
def test_what_is_no_mark(text: str) -> None:
    assert not changes(text)["1 -> 0"]


def test_marks_of_changes_that_are_not_there() -> None:
    assert module("a = x + 1  # same (1 -> 0): why\n").empty_marks() == []
    assert module("a = x + 1  # same (1 -> 5): why\n").empty_marks() == ["room/a.py:1: 1 -> 5"]
    assert module("\na = x  # same: why\n").empty_marks() == ["room/a.py:2: no change"]


def test_each_mark_of_the_package_is_of_a_change_of_its_line() -> None:
    marked = [one for one in read_modules(mutants.REPOSITORY) if MARK.search(one.text)]
    assert marked
    assert [wrong for one in marked for wrong in one.empty_marks()] == []


# Which tests are asked.


def numbered(text: str) -> tuple[Numbers, dict[str, Mutant]]:
    numbers = Numbers()
    numbers.add("room/a.py", ast.parse(text))
    return numbers, {mutant.change: mutant for mutant in module(text).mutants}


def functions(numbers: Numbers, text: str, found: set[int]) -> set[str]:
    lines = {number: lineno for (_, lineno), number in numbers.functions.items()}
    return {text.split("\n")[lines[number] - 1].strip() for number in found}


def test_what_runs_in_a_function_is_asked_for_itself() -> None:
    numbers, by_change = numbered(TEXT)
    for change in ("> -> >=", "and -> or", "min -> max", "2 -> 3"):
        (number,) = numbers.of(by_change[change])
        assert number == numbers.expressions["room/a.py", by_change[change].place]


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ("5 -> 6", {"def is_deep(self, other):"}),  # LIMIT
        ("0 -> 1", {"def is_deep(self, other):"}),  # Row.depth
    ],
)
def test_what_runs_at_import_is_asked_where_it_is_used(change: str, asked: set[str]) -> None:
    numbers, by_change = numbered(TEXT)
    assert functions(numbers, TEXT, numbers.of(by_change[change])) == asked


def test_a_default_is_asked_where_its_function_is() -> None:
    text = "def f(x=1):\n    return x\n\ndef g():\n    return f()\n\ndef h():\n    return 0\n"
    numbers, by_change = numbered(text)
    assert functions(numbers, text, numbers.of(by_change["1 -> 2"])) == {"def f(x=1):", "def g():"}


def test_what_is_made_of_a_constant_is_asked_too() -> None:
    text = "_A = 7\nB = _A * 3\n\ndef f():\n    return B\n\ndef g():\n    return 0\n"
    numbers, by_change = numbered(text)
    assert functions(numbers, text, numbers.of(by_change["7 -> 8"])) == {"def f():"}


def test_code_that_counts_does_the_same_and_says_what_it_evaluated() -> None:
    text = "def f(x):\n    '''Text.'''\n    return x > 3 and x + 1\n\ndef g(x):\n    return x\n"
    numbers, by_change = numbered(text)
    tree = numbers.counting("room/a.py", ast.parse(text))
    del tree.body[0]  # the import of what counts
    seen: set[int] = set()
    space: dict[str, Any] = {"_reached_": lambda number, _: seen.add(number)}
    exec(compile(tree, "a.py", "exec"), space)
    assert space["f"].__doc__ == "Text."
    assert space["f"](2) is False
    reached = {change for change, mutant in by_change.items() if numbers.of(mutant) <= seen}
    assert reached == {"> -> >=", "and -> or", "3 -> 4", "3 -> 2"}
    assert space["f"](4) == 5
    assert {number for mutant in by_change.values() for number in numbers.of(mutant)} <= seen
    assert functions(numbers, text, seen & set(numbers.functions.values())) == {"def f(x):"}


def test_byte_code_is_imported_in_place_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "some_module.py"
    path.write_text("a = 1\n")
    compile_to(path, "a = 2\n")
    spec = importlib.util.spec_from_file_location("some_module", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.a == 2


def line(name: str, cpu_s: float, numbers: Numbers, reached: set[int], **more: Any) -> dict[str, Any]:
    """What the plugin writes of a test."""
    bits = bytes(number in reached for number in range(numbers.count))
    reached_bits = base64.b64encode(zlib.compress(bits)).decode()
    return {"test": name, "cpu_s": cpu_s, "fixtures": {}, "skipped": False, "reached": reached_bits, **more}


def test_tests_that_reach_a_mutant_are_asked_the_cheapest_first() -> None:
    numbers, by_change = numbered(TEXT)
    mutant = by_change["min -> max"]
    reached = numbers.of(mutant)
    reach = Reach(
        numbers,
        [
            line("dear", 1.0, numbers, reached),
            line("cheap", 0.1, numbers, reached),
            line("elsewhere", 0.1, numbers, numbers.of(by_change["> -> >="])),
            line("skipped", 0.1, numbers, reached, skipped=True),
            line("broken", 0.2, numbers, reached),
            line("too dear", 9.0, numbers, reached),
            line("of a fixture", 0.1, numbers, reached, fixtures={"its fixture": 1.5}),
            line("of it, too", 0.2, numbers, reached, fixtures={"its fixture": 1.5}),
            line("no more time", 0.4, numbers, reached, fixtures={"another": 1.4}),
        ],
    )
    found = [test.name for test in reach.tests_of(mutant, broken={"broken"})]
    assert found == ["cheap", "dear", "of a fixture", "of it, too"]


TESTS = """
import functools, pytest
from mutant_plugin import REACHED, cache_that_tells

def reach(number):
    REACHED.add(1 << 8 * number)

reach(0)

@pytest.fixture(scope="module")
def shared():
    reach(1)

@cache_that_tells
@functools.cache
def once(name):
    reach(2)

def test_first(shared):
    once("x")
    reach(3)

def test_second(shared):
    once("x")
    once("x")

def test_third():
    reach(4)
    assert False

@pytest.mark.skip
def test_fourth(shared):
    pass
"""


def test_what_tests_share_counts_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((mutant_plugin.FOLDER, str(tmp_path)), (mutant_plugin.SIZE, "5"), (mutant_plugin.BITS, "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mutant_plugin, "REACHED", mutant_plugin.Reached(), raising=False)
    (tmp_path / "left_out.json").write_text('["test_shared.py::test_of_no_interest"]')
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_shared.py").write_text(TESTS + "def test_of_no_interest(): reach(0)")
    options = ["-q", "-p", "no:xdist", "-p", "no:timeout", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    pytest.main([*options, str(tmp_path)], plugins=[mutant_plugin.Plugin()])
    (written,) = tmp_path.glob("tests-*.jsonl")
    numbers = Numbers(count=5)
    lines = [json.loads(text) for text in written.read_text().splitlines()]
    reach = Reach(numbers, lines)
    found = {
        name.partition("::")[2]: [n for n in range(5) if zlib.decompress(base64.b64decode(one["reached"]))[n]]
        for one in lines
        if not one["skipped"] and (name := one["test"])
    }
    assert found == {"test_first": [0, 1, 2, 3], "test_second": [0, 1, 2], "test_third": [0, 4]}
    assert [len(test.fixtures) for test in reach.tests] == [1, 1, 0]


# How a mutant is judged.

QUICK, LIVE, LATER = Case("quick", 0.1, {}), Case("live", 3.0, {}), Case("later", 4.0, {})


class Scripted(Runner):
    """A runner whose runs end as listed, one after the other."""

    def __init__(self, *endings: tuple[set[str], int]) -> None:
        self.endings = list(endings)
        self.asked: list[list[str]] = []
        self.broken, self._sound = set(), set()

    def _outcomes(self, waiting: deque[Any]) -> Iterator[tuple[Any, set[str], int]]:
        while waiting:
            run = waiting.popleft()
            self.asked.append([test.name for test in run.tests])
            yield run, *self.endings.pop(0)


class Asking(Reach):
    def __init__(self) -> None:
        pass

    def tests_of(self, mutant: Mutant, *, broken: set[str]) -> list[Case]:
        return [test for test in (QUICK, LIVE, LATER) if test.name not in broken]


@pytest.mark.parametrize(
    ("endings", "killer", "asked"),
    [
        ([(set(), 0)], "", [["quick", "live", "later"]]),
        # What fails has to pass without the mutant; where a process ends, its status is not 0.
        ([({"quick"}, 256), (set(), 0)], "quick", [["quick", "live", "later"], ["quick"]]),
        ([(set(), 24)], "time", [["quick", "live", "later"]]),
        # A test that fails late is asked again; if it passes, the others are.
        ([({"live"}, 256), ({"live"}, 256), (set(), 0)], "live", [["quick", "live", "later"], ["live"], ["live"]]),
        ([({"live"}, 256), (set(), 0), (set(), 0)], "", [["quick", "live", "later"], ["live"], ["later"]]),
        # A test that fails without the mutant says nothing.
        (
            [({"quick"}, 256), ({"quick"}, 256), (set(), 0)],
            "",
            [["quick", "live", "later"], ["quick"], ["live", "later"]],
        ),
    ],
)
def test_what_kills_a_mutant(endings: list[tuple[set[str], int]], killer: str, asked: list[list[str]]) -> None:
    (mutant, *_) = module(TEXT).mutants
    runner = Scripted(*endings)
    assert runner.judge([mutant], Asking()) == {mutant: killer}
    assert runner.asked == asked


def test_a_mutant_that_no_test_evaluates_survives() -> None:
    numbers, by_change = numbered(TEXT)
    mutant = by_change["min -> max"]
    assert Scripted().judge([mutant], Reach(numbers, [])) == {mutant: ""}


# The scores.


def test_the_share_is_of_those_that_can_be_killed() -> None:
    assert Score(killed=150, survived=30, equivalent=20).share == 83.3
    assert Score(killed=0, survived=0, equivalent=3).share == 0


@pytest.mark.parametrize(
    ("killed", "found"),
    [(149, ["trace: 82.8 % of the mutants are killed, 83.3 % were"]), (150, []), (151, [])],
)
def test_a_lower_share_is_told(tmp_path: Path, killed: int, found: list[str]) -> None:
    path = tmp_path / "scores.json"
    write_scores(path, {"trace": Score(150, 30, 20), "run": Score(9, 1, 0)}, seed=0, count=200)
    before = read_scores(path, seed=0, count=200)
    assert lower({"trace": Score(killed, 180 - killed, 20)}, before) == found


def test_scores_of_other_rooms_and_draws_stay(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    assert read_scores(path, seed=0, count=200) == {}
    write_scores(path, {"trace": Score(1, 1, 0), "run": Score(9, 1, 0)}, seed=0, count=200)
    write_scores(path, {"trace": Score(3, 1, 0)}, seed=0, count=40)
    write_scores(path, {"trace": Score(2, 0, 0)}, seed=0, count=200)
    shares = {room: score["share"] for room, score in read_scores(path, seed=0, count=200).items()}
    assert shares == {"trace": 100.0, "run": 90.0}
    assert read_scores(path, seed=0, count=40)["trace"]["share"] == 75.0
    assert lower({"monitor": Score(0, 9, 0)}, read_scores(path, seed=0, count=200)) == []  # not known before


def test_every_room_has_a_name() -> None:
    assert mutants.room_name("") == "top"
    assert mutants.room_name("analysis") == "analysis"


def test_tests_are_imported_as_their_checkout_imports_them(tmp_path: Path) -> None:
    assert import_mode(Path(__file__).parents[2]) == ["--import-mode=importlib"], "several files have one name"
    assert import_mode(tmp_path) == []
