"""Scripts of this repository use the package of the checkout that they stand in."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import checkout
from programs import run_program

SCRIPTS = [
    path.relative_to(checkout.ROOT)
    for folder in ("tests", "docs", "benchmarks")
    for path in sorted((checkout.ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and "/run_scripts/" not in str(path)
]


def imported(path: Path) -> list[str]:
    """The modules that a file imports, wherever, in the order of its lines; but for those of types alone."""
    lines = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n)*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.findall(r"^ *(?:import|from) ([\w.]+)", lines, re.MULTILINE)


@pytest.mark.parametrize("script", [path for path in SCRIPTS if not path.name.startswith("test_")], ids=str)
def test_a_script_looks_for_the_package_beside_it_first(script: Path) -> None:
    names = imported(checkout.ROOT / script)
    package = next((at for at, name in enumerate(names) if name.split(".")[0] == "profiler_wrapper"), None)
    looks = {"checkout", "measuring"}  # the second does the same for the benchmarks
    if script.name == "analysis_speed.py":  # which measures what importing takes, in children that it tells where
        looks = {"__future__"}
    assert package is None or looks & set(names[:package])


@pytest.mark.parametrize("names_another", [False, True])
def test_a_second_checkout_is_the_one_that_is_imported(tmp_path: Path, names_another: bool) -> None:
    """But for what PYTHONPATH names."""
    second, third = tmp_path / "second", tmp_path / "third"
    for folder in (second, third):
        (folder / "profiler_wrapper").mkdir(parents=True)
        (folder / "profiler_wrapper" / "__init__.py").touch()
    (second / "tests").mkdir()
    shutil.copy(checkout.__file__, second / "tests")
    (second / "tests" / "script.py").write_text("import checkout, profiler_wrapper\nprint(profiler_wrapper.__file__)\n")
    places = os.pathsep.join([str(third)] * names_another)
    done = run_program(second / "tests" / "script.py", environment={"PYTHONPATH": places})
    expected = (third if names_another else second) / "profiler_wrapper" / "__init__.py"
    assert (done.stdout.strip(), done.stderr) == (str(expected), "")
