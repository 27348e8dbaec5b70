"""The reference: its parts that follow from the code are up to date, and what it lists is all there is."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import profiler_wrapper
from profiler_wrapper import compat

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_reference = _script()


@pytest.mark.parametrize("page", make_reference.PAGES)
def test_the_parts_made_from_code_are_up_to_date(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert make_reference.renewed(text, make_reference.PAGES[page]) == text, "run python docs/make_reference.py"


def test_a_part_without_its_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page needs <!-- made: commands -->"):
        make_reference.renewed("# A page", ["commands"])


def test_every_command_and_option_is_on_the_page() -> None:
    text = make_reference.commands()
    for part in (
        "## guard",
        "`--update`",
        "| `--seconds S` | 15 |",
        "`RUN [RUN ...]`",
        "| `--format {text,json}` | `text` |",
    ):
        assert part in text
    assert "(default: 15)" not in text


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    missing = [name for name in profiler_wrapper.__all__ if f".{name}\n" not in text and f"`{name}` |" not in text]
    assert set(missing) == {"RanksReport"} and "### RanksReport" in text
    assert [name for name in compat.__all__ if f".{name}\n" not in text and name != "MyTimer"] == []


def test_every_option_is_on_its_page_with_its_default() -> None:
    text = (REFERENCE / "options.md").read_text(encoding="utf-8").partition("## In the environment")[0]
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| `")]
    said = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    parameters = inspect.signature(profiler_wrapper.ProfilerWrapper).parameters
    wanted = {
        name: f"`{json.dumps(one.default) if isinstance(one.default, str) else one.default}`"
        for name, one in parameters.items()
    }
    del wanted["of_torch"]
    assert {name: said.get(name) for name in wanted} == wanted


def test_every_variable_that_is_read_is_on_its_page() -> None:
    text = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    assert {"RANK", "PROFILER_WRAPPER_RUN", "COLUMNS", "MPI_LOCALRANKID"} <= variables()
    assert {name for name in variables() if f"`{name}`" not in text} == set()


@cache
def variables() -> set[str]:
    """Names of environment variables in the package: what `environ` or `environment` is asked for, and constants."""
    found = set()
    for nodes in make_reference.package().values():
        for node in nodes:
            asked: list[ast.AST] = []
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "getenv")
            ):
                asked = list(node.args[:1]) if "environ" in ast.unparse(node.func) or node.func.attr == "getenv" else []
            elif isinstance(node, ast.Subscript) and "environ" in ast.unparse(node.value):
                asked = [node.slice]
            elif isinstance(node, ast.Assign) and re.search(
                "VARIABLE|SWITCH|_LAUNCHERS|_WORKERS$|_ENVIRONMENT", ast.unparse(node.targets[0])
            ):
                asked = [node.value]
            constants = (one for part in asked for one in ast.walk(part) if isinstance(one, ast.Constant))
            found |= {one.value for one in constants if re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", str(one.value))}
    return found


# Files whose notes belong to what they print or draw, and are no warnings.
DRAWN = ("ranks/text.py", "reports/", "monitor/reports.py")


def told() -> list[str]:
    """Texts of warnings and errors, but those of WrongUse, whose list is made from the code."""
    errors = [name for name in make_reference.ERRORS if name != "WrongUse"]
    found = [text for _, text in make_reference.messages([*make_reference.CALLS, *errors, "note", "_note"])]
    for path, nodes in make_reference.package().items():
        for node in () if path.startswith(DRAWN) else nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "append" and ast.unparse(node.func.value).endswith(("warnings", "notes")):
                found += [make_reference._text(one) for one in node.args]
    return [text for text in found if len(text.replace("…", " ").split()) > 2]


def test_every_warning_has_its_cure() -> None:
    page = plain((REFERENCE / "warnings.md").read_text(encoding="utf-8"))
    texts = told()
    assert len(texts) > 130 and "the recording of … is lost: …" in texts
    missing = [text for text in texts if plain(max(text.split("…"), key=len)) not in page]
    assert missing == [], "say in docs/reference/warnings.md what it comes from, and what to do"


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").replace("\\|", "|").split())


def test_every_text_on_the_page_is_said_somewhere() -> None:
    said = set()
    for nodes in make_reference.package().values():
        for node in nodes:
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                said.add(plain(make_reference._text(node)))
    everything = "\n".join(said)
    rows = re.findall(r"^\| (`.*?`) \| ", (REFERENCE / "warnings.md").read_text(encoding="utf-8"), re.MULTILINE)
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) > 150
    pieces = {text: [plain(part) for part in re.split("…|: |, |; ", text)] for text in texts}  # some are put together
    assert [text for text, parts in pieces.items() if not any(is_said(part, everything) for part in parts)] == []


def is_said(part: str, everything: str) -> bool:
    return len(part) >= 8 and part in everything
