"""The reference: its parts that follow from the code are up to date, and what it lists is all there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
    for part in ("## guard", "`--update`", "| `--seconds S` | 15 |", "`RUN [RUN ...]`", "| `--format {text,json}` | `text` |"):
        assert part in text
    assert "(default: 15)" not in text
