"""What a message shows of a user's value: a line at most, however much the value holds."""

from __future__ import annotations

import ast
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import pytest

import profiler_wrapper as pw
from profiler_wrapper.errors import in_a_line, listed, shown


def nested() -> Any:
    """A list of 10 lists, of 10 lists ... : 10**12 texts, each list there once."""
    value: Any = ["x"] * 10
    for _ in range(12):
        value = [value] * 10
    return value


class Plain(list[Any]):
    pass


class Raises:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [
        nested(),
        Plain(nested()),
        tuple(nested()),
        {"a": nested()},
        OrderedDict(a=nested()),
        UserDict(a=nested()),
        "x" * 10**7,
        b"x" * 10**7,
        "a\nb" * 10**5,
        10**4000,
        list(range(10**6)),
        Raises(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_in_a_line(value: object) -> None:
    assert 0 < len(shown(value)) <= 100
    assert "\n" not in shown(value)


@pytest.mark.parametrize("value", ["20-x", 3, None, 0.5, ["a", "b"], {"dp": 1}, ("a",), b"x", True])
def test_what_is_short_is_shown_as_it_is(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("option", ["perf_log_interval", "perf_log_dir", "enable_perf_monitor", "convention"])
def test_a_yaml_that_names_itself_again_and_again_is_refused_at_once(option: str, tmp_path: Path) -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{two}: &{two} [{','.join(['*' + one] * 9)}]" for one, two in zip("abcdefgh", "bcdefghi", strict=True)]
    path = tmp_path / "monitor.yaml"
    path.write_text("\n".join([*lines, f"{option}: *i"]) + "\n")
    with pytest.raises(pw.WrongUse) as refused:
        pw.MonitorConfig.from_yaml(path)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("option", ["steps", "layers", "files", "track", "ranks", "coordinates", "schedule", "prefix"])
def test_no_option_of_the_profiler_writes_out_what_it_was_given(option: str) -> None:
    with pytest.raises(pw.WrongUse) as refused:
        pw.ProfilerWrapper(None, **{option: nested()})
    assert len(str(refused.value)) < 600


def test_of_a_list_at_most_16_are_shown_each_at_most_a_line() -> None:
    assert listed(["a", "b"]) == "'a', 'b'"
    text = listed(["x" * 1000] * 20)
    assert text.endswith(" and 4 more") and len(text) < 16 * 103


def test_of_what_a_library_says_the_beginning_is_shown_on_a_line() -> None:
    assert in_a_line(ValueError("one\n  two")) == "ValueError: one two"
    assert len(in_a_line(ValueError("x" * 10_000))) == 300


def test_no_error_formats_a_value_as_it_is() -> None:
    """In an f-string of a `raise` neither `{value!r}` nor `repr`: `shown` is the one way."""
    package = Path(pw.__file__).parent
    found = [
        f"{path.relative_to(package)}:{part.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if (isinstance(part, ast.FormattedValue) and part.conversion == ord("r"))
        or (isinstance(part, ast.Name) and part.id == "repr")
    ]
    assert found == []


def test_only_one_place_says_of_what_type_an_error_is_and_what_it_says() -> None:
    package = Path(pw.__file__).parent
    sources = {path.name: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    assert [name for name, text in sources.items() if "__name__}: {error}" in text] == ["errors.py"]
