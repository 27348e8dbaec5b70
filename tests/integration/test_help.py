"""`--help`: quick, with an example for each command, and the options that all have in common."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from profiler_wrapper.__main__ import _parser
from profiler_wrapper.commands import COMMANDS

SLOW = {"torch", "numpy", "matplotlib", "plotly", "pandas", "jinja2", "tqdm"}
NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


def parser_of(name: str) -> argparse.ArgumentParser:
    (action,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    found: argparse.ArgumentParser = action.choices[name]
    return found


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys\n"
        "from profiler_wrapper.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(*sorted({SLOW} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
    for name in NAMES:
        assert f"    {name} " in done.stdout
    assert "Exit codes: 0 fine, 1 failed, 2 wrong use, 3" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_an_example_that_it_understands(name: str) -> None:
    parser = parser_of(name)
    head, *examples = str(parser.epilog).split("\n\n")[0].splitlines()
    assert head in ("example:", "examples:")
    assert examples
    for line in examples:
        program, command, *arguments = line.split()
        assert (program, command) == ("profiler-wrapper", name)
        parser.parse_args(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_says_how_and_where_to(name: str) -> None:
    text = parser_of(name).format_help()
    for option in ("--format", "-o ", "--output"):
        assert option in text
    assert "--force" in text or name == "demo"  # a demo always makes a new directory
    assert parser_of(name).description
