"""`--help`: quick, with an example for each command, and the options that all have in common."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys

import pytest

from profiler_wrapper import ProfilerWrapper
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


def test_run_has_every_option_of_the_wrapper() -> None:
    """But those whose values are objects of the script; and what follows the script is the script's."""
    parameters = inspect.signature(ProfilerWrapper).parameters
    wanted = {f"--{name.replace('_', '-')}" for name in parameters} - {
        "--model", "--optimizer", "--device-mesh", "--coordinates", "--of-torch",
    }  # fmt: skip
    parser = parser_of("run")
    options = {name for action in parser._actions for name in action.option_strings}
    assert options - wanted == {"-h", "--help", "-m", "--module", "-o"} | {
        f"--no-{name.replace('_', '-')}"
        for name, one in parameters.items()
        if one.annotation in ("bool", "bool | None")
    }
    assert wanted <= options
    rest = ["train.py", "--steps", "3", "--", "--tra", "-m", "-o", "--ver"]
    given = _parser().parse_args(["run", "--track", "a", "--track=b", "--no-background", "--rank", "2", *rest])
    assert (given.program, given.steps, given.track, given.background, given.rank) == (rest, None, ["a", "b"], False, 2)
    assert given.module is False and given.is_st is None


def test_help_begins_with_the_eight_that_people_use() -> None:
    """And ends with those of the tools that it replaces, under their heading."""
    text = parser_of("run").format_help()
    options = re.findall(r"^  (?:-\w \w+, )?--([a-z-]+)", text, re.MULTILINE)
    eight = ["steps", "output-dir", "run-name", "ranks", "layers", "track", "files", "with-stack"]
    assert options[:8] == eight and "\nless often:\n  --schedule" in text
    *_, last = text.split("\nof the tools that it replaces:\n")
    replaced = re.findall(r"^  --([a-z-]+)", last.partition("\n\n")[0], re.MULTILINE)
    assert replaced == options[-len(replaced) :] and {"is-st", "log-dir", "enable-record-cuda-mm"} < set(replaced)
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(ProfilerWrapper) or "", re.MULTILINE)
    assert documented[:9] == ["model", *(name.replace("-", "_") for name in eight)]
    assert {*documented} == {*inspect.signature(ProfilerWrapper).parameters, "WrongUse"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "run"])  # whose output is the script's
def test_every_command_says_how_and_where_to(name: str) -> None:
    text = parser_of(name).format_help()
    for option in ("--format", "-o ", "--output"):
        assert option in text
    assert "--force" in text or name == "demo"  # a demo always makes a new directory
    assert parser_of(name).description


@pytest.mark.parametrize(
    ("given", "program", "is_module"),
    [
        ("python x.py --lr 1", ["x.py", "--lr", "1"], False),
        ("/opt/env/bin/python3.11 -m pkg.train -m", ["pkg.train", "-m"], True),
        ("pythonic.py python", ["pythonic.py", "python"], False),
        ("-m python x.py", ["python", "x.py"], True),
    ],
)
def test_run_takes_what_used_to_be_typed(given: str, program: list[str], is_module: bool) -> None:
    options = _parser().parse_args(["run", *given.split()])
    ended = options.run(options)
    assert (ended.args, ended.keywords["is_module"]) == ((program,), is_module)
