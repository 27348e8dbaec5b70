"""The command line: `python -m profiler_wrapper`, also installed as `profiler-wrapper`.

Exit codes: 0 fine, 1 failed, 2 wrong use, 3 a guard's regression. A file is overwritten only with --force.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from profiler_wrapper import __version__
from profiler_wrapper.commands import COMMANDS
from profiler_wrapper.commands.common import FAILED, FINE, WRONG_USE, Ended, is_python
from profiler_wrapper.errors import ProfilerWrapperError, WrongUse
from profiler_wrapper.trace.atomic import check_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line on stderr."""
    options = argparse.Namespace()
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        parser = _parser()
        _expect_command(given)
        options = parser.parse_args(given)
        if "run" not in options:
            parser.print_help()
            return WRONG_USE
        for text in _texts(vars(options).values()):
            check_path(text)
        if arguments is None and "program" not in options and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names that are no text, or none that can be shown here
        code: Ended = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except WrongUse as error:
        return _fail(_with_options(str(error), vars(options)), WRONG_USE)
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ProfilerWrapperError as error:
        return _fail(error, FAILED)
    except OSError as error:
        return _fail(error if error.filename is None else f"{error.filename}: {error.strerror}", FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", FAILED)
    if callable(code):
        code()  # a program of somebody else: what it raises is none of our errors
        return FINE
    return FINE if code is None else code


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _texts(value)


def _expect_command(given: Sequence[str]) -> None:
    """Raise WrongUse where a script, a trace or the directory of a run stands in a command's place."""
    first = given[0] if given else "--help"
    is_script = first == "-m" or first.endswith(".py") or is_python(first)
    is_file = not first.startswith("-") and (os.sep in first or "." in first or os.path.exists(first))
    if (is_script or is_file) and all(command.__name__.rpartition(".")[2] != first for command in COMMANDS):
        use = "profile a script: profiler-wrapper run" if is_script else "analyse it: profiler-wrapper analyze"
        raise WrongUse(f"{first} is no command. To {use} {' '.join(given)}")


def _with_options(text: str, options: Iterable[str]) -> str:
    """What was said of parameters, of the command's options: `steps='3-1'` is `--steps 3-1`."""
    names = "|".join(options) or "-"
    pattern = rf"\b({names})=(?:'([^']*)'| ?(?=[\w.-]))"
    return re.sub(pattern, lambda found: f"--{found[1].replace('_', '-')} {found[2] or ''}", text)


def _fail(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profiler-wrapper",
        description="Time, memory and FLOPs of every layer of a Transformer.",
        epilog="Exit codes: 0 fine, 1 failed, 2 wrong use, 3 a regression that `guard` found.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
