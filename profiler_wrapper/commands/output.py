"""What commands have in common: their parser, how and where to they write, what they overwrite, exit codes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from profiler_wrapper.errors import WrongUse

FINE, FAILED, WRONG_USE, REGRESSION = 0, 1, 2, 3
FORMATS = ("text", "json")
# What the ending of a file's name promises.
_HOLDS = {
    ".json": "JSON",
    ".csv": "CSV",
    ".html": "a page (see `report`)",
    ".htm": "a page (see `report`)",
    ".png": "a picture",
    ".gz": "compressed",
    ".pickle": "a memory snapshot",
}

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # is no generic type at run time
Subject = TypeVar("Subject")


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], *, examples: str
) -> argparse.ArgumentParser:
    """The parser of a command: its help is the docstring of `run`, with `examples`, a line each, below.

    `run` gives the exit code; None is fine.
    """
    text = run.__doc__ or ""
    lines = "".join(f"\n  profiler-wrapper {name} {line}".rstrip() for line in examples.splitlines())
    command = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=_unindented(text),
        epilog=f"{'example' if examples.count(chr(10)) < 1 else 'examples'}:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _unindented(docstring: str) -> str:
    return "\n".join(line.strip() for line in docstring.strip().splitlines())


def add_output(command: argparse.ArgumentParser, in_directory: str, *, formats: Iterable[str] = FORMATS) -> None:
    """How and where to a command writes; `in_directory`: what a directory gets."""
    command.add_argument("--format", choices=tuple(formats), default="text", help="of the output (default: text)")
    command.add_argument("-o", "--output", metavar="FILE_OR_DIR", help=f"write there; a directory gets {in_directory}")
    add_force(command)


def add_force(command: argparse.ArgumentParser) -> None:
    """That files may be overwritten."""
    command.add_argument("--force", action="store_true", help="overwrite files")


def is_directory(output: str) -> bool:
    """Whether `-o` names a directory: one that is there, or a name that ends as one."""
    return output.endswith(("/", os.sep)) or Path(output).is_dir()


def file_ending(output: str | None) -> str:
    """`"a/Page.HTML"` -> `".html"`; `""` of a directory, and where nothing was given."""
    return "" if output is None or is_directory(output) else Path(output).suffix.lower()


def refuse_ending(output: str | None, what: str, *, fine: Iterable[str]) -> None:
    """Where the name of a file promises something else than `what`, which may have the endings `fine`.

    Raises:
        WrongUse: it does.
    """
    ending = file_ending(output)
    if ending in _HOLDS and ending not in fine:
        raise WrongUse(f"-o {output}: {what} is to go there, and {ending} is {_HOLDS[ending]}. Name another file.")


def settle_format(options: argparse.Namespace, *, formats: Iterable[str] = FORMATS, others: Iterable[str] = ()) -> None:
    """`options.format` as the name of the file tells it: `.json` is JSON, `.csv` is CSV where the command writes it.

    `formats`: that the command writes. `others`: endings of what else it writes, which it sees to itself.

    Raises:
        WrongUse: the file would hold something else than its name promises.
    """
    told = file_ending(options.output).removeprefix(".")
    if told in formats and options.format == "text":
        options.format = told
    refuse_ending(options.output, options.format, fine=(f".{options.format}", *others))


def refuse_to_overwrite(paths: Iterable[Path], *, force: bool) -> None:
    """Before the work is done.

    Raises:
        OSError: one of them is there, and not `force`; or it is no file, but a device, say.
    """
    from profiler_wrapper.recording.atomic import check_replaceable

    for path in paths:
        check_replaceable(path)
        if path.exists() and not force:
            raise FileExistsError(f"File already exists, will not overwrite without --force: {path}")


def write(writers: Mapping[Path, Callable[[Subject, Path], object]], subject: Subject) -> None:
    """Write each file whole, or not at all, and print where it is."""
    from profiler_wrapper.recording.atomic import replacing

    for path, write_to in writers.items():
        with replacing(path) as beside:
            write_to(subject, beside)
        print(path)


def json_text(data: object) -> str:
    """As files have it, without the last line's end."""
    from profiler_wrapper.recording.atomic import json_bytes

    return json_bytes(data).decode().rstrip()
