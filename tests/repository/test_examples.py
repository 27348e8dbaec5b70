"""The examples as a newcomer meets them: in order, each with its command, each on the page, and each runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from programs import run_program

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALLER = {"01_train_llama": "--layers 2 --hidden 64", "12_layer_loop": "--layers 4"}
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def test_they_are_numbered_without_a_gap() -> None:
    assert [example.name[:3] for example in EXAMPLES] == [f"{number:02d}_" for number in range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_says_how_it_is_run_and_where_it_writes(example: Path) -> None:
    told = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    first, *rest = told.split("\n\n")
    assert "\n" not in first  # a line that says what it shows
    assert f"python examples/{example.name}" in rest[0]
    assert "--output-dir" in rest[0]
    assert "Look at" in told


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_has_its_section_with_command_and_output(example: Path) -> None:
    section = re.search(rf"^## {example.name[:2]} .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert f"python examples/{example.name}" in section[0]
    assert "```text\n" in section[0]


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_runs(example: Path, tmp_path: Path) -> None:
    done = run_program(example, *SMALLER.get(example.stem, "").split(), "--output-dir", tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((tmp_path / "out").rglob("*"))


def test_what_is_named_anywhere_is_there() -> None:
    assert SMALLER.keys() <= {example.stem for example in EXAMPLES}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    for page in pages:
        for name in re.findall(r"\bexamples/(\w+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / "examples" / name).is_file(), f"{page.name} names examples/{name}"


@pytest.mark.parametrize("picture", re.findall(r"\]\(images/([\w.]+)\)", PAGE))
def test_its_pictures_are_there_and_small(picture: str) -> None:
    assert (ROOT / "outputs" / "gallery" / picture).stat().st_size < 150_000
