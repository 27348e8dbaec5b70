"""`run`: a script as it is, profiled from outside."""

from __future__ import annotations

import argparse
import ast
import pkgutil
import re
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from profiler_wrapper.commands.common import Commands, add_command, is_python
from profiler_wrapper.errors import WrongUse


def add(commands: Commands) -> None:
    """The parser: the options of `ProfilerWrapper` by their names."""
    command = add_command(
        commands, "run", run,
        examples="train.py --epochs 3\n--steps 20-22 --output-dir runs train.py\n"
        "--schedule wait=5,warmup=1,active=3 -m package.train --lr 1e-4",
    )  # fmt: skip
    command.usage = "%(prog)s [OPTIONS] SCRIPT ..."
    command.allow_abbrev = False  # what follows the script is not ours, whatever it begins with
    command.add_argument(
        "program", nargs=argparse.PARSER, metavar="SCRIPT", help="the script, and after it whatever arguments it takes"
    )
    command.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    groups: dict[str, argparse.ArgumentParser | argparse._ArgumentGroup] = {"Args": command}
    for one in _parameters():
        if one.heading not in groups:
            groups[one.heading] = command.add_argument_group(one.heading.lower())
        names = ["-o"] if one.name == "output_dir" else []
        names.append(f"--{one.name.replace('_', '-')}")
        if one.kind in ("bool", "bool | None"):
            groups[one.heading].add_argument(*names, action=argparse.BooleanOptionalAction, help=one.help)
        else:
            action = "append" if "Sequence[" in one.kind else "store"
            number = int if one.kind == "int | None" else str
            metavar = "DIR" if "PathLike" in one.kind else "N" if number is int else "VALUE"
            groups[one.heading].add_argument(*names, action=action, type=number, metavar=metavar, help=one.help)


def run(options: argparse.Namespace) -> Callable[[], None]:
    """Run a script or a module under ProfilerWrapper, unchanged: `python train.py` becomes `... run train.py`.

    Its output, exit code and exceptions are its own; the table goes to stderr. Models, steps and optimizers are found
    while it runs: recording begins with the first call of a module in this process. Under torchrun or accelerate
    launch: torchrun --nproc-per-node 2 -m profiler_wrapper run train.py
    """
    from profiler_wrapper.run.script import check_options, run_script

    given = {one.name: value for one in _parameters() if (value := getattr(options, one.name)) is not None}
    for name in ("record_shapes", "trace"):
        if given.get(name) in ("true", "false"):
            given[name] = given[name] == "true"
    layers = given.get("layers", ())
    if len(layers) == 1:
        given["layers"] = int(layers[0]) if layers[0].isdecimal() else layers[0]
    program = options.program[1:] if options.program[0] == "--" else options.program
    if program and not options.module and is_python(program[0]):
        program = program[1:]  # who writes what used to be typed
        options.module = program[:1] == ["-m"]
        program = program[options.module :]
        if program and program[0].startswith("-"):
            raise WrongUse(f"{program[0]} is an option of Python: python {program[0]} -m profiler_wrapper run SCRIPT")
    if not program:
        raise WrongUse("No script was named. Name one, or a module after -m.")
    if given:
        check_options(given)
    return partial(run_script, program, is_module=options.module, given=given)


class _Parameter(NamedTuple):
    name: str
    kind: str  # its annotation
    heading: str  # above it in the docstring
    help: str


@cache
def _parameters() -> tuple[_Parameter, ...]:
    """Those of `ProfilerWrapper` that can be given as text, in the order of its docstring.

    Read from its source: to import it is to import torch.
    """
    tree = ast.parse(pkgutil.get_data("profiler_wrapper", "wrapper.py") or b"")
    (wrapper,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "ProfilerWrapper")
    (init,) = (one for one in wrapper.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    defaults = zip(arguments, [*init.args.defaults, *init.args.kw_defaults], strict=True)
    known = {argument.arg: (ast.unparse(argument.annotation or argument), default) for argument, default in defaults}
    found, heading = [], ""
    lines = r"^(?:(\w.*):$|    (\w+): (.*(?:\n        .*)*))"
    for title, name, text in re.findall(lines, ast.get_docstring(wrapper) or "", re.MULTILINE):
        heading = title or heading
        kind, default = known.get(name, ("object", None))
        if "object" not in kind and "Mapping" not in kind:
            found.append(_Parameter(name, kind, heading, _help(text, ast.literal_eval(default or "None"))))
    return tuple(found)


def _help(text: str, default: object) -> str:
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    words = " ".join(text.replace("`", "").replace("%", "%%").split()).rstrip(".")
    return words if shown in (None, ()) else f"{words} (default: {shown})"
