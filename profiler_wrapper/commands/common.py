"""What commands have in common: their parser, how and where they write, what they overwrite, exit codes."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from profiler_wrapper.errors import WrongUse

if TYPE_CHECKING:
    from profiler_wrapper.result import ProfileResult
    from profiler_wrapper.trace.events import Progress


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
Ended: TypeAlias = int | Callable[[], None] | None  # the exit code, None is fine; or a program of somebody else, to run
Subject = TypeVar("Subject")
Writer: TypeAlias = Callable[[Subject, Path], object]


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], Ended], *, examples: str
) -> argparse.ArgumentParser:
    """The parser of a command: its help is the docstring of `run`, with `examples`, a line each, below.

    `run` gives how it ended.
    """
    text = run.__doc__ or ""
    lines = "".join(f"\n  profiler-wrapper {name} {line}".rstrip() for line in examples.splitlines())
    command = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=inspect.cleandoc(text),
        epilog=f"{'example' if examples.count(chr(10)) < 1 else 'examples'}:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def add_output(command: argparse.ArgumentParser, in_directory: str, *, formats: Iterable[str] = FORMATS) -> None:
    """How and where to a command writes; `in_directory`: what a directory gets."""
    command.add_argument("--format", choices=tuple(formats), default="text", help="of the output (default: text)")
    command.add_argument("-o", "--output", metavar="FILE_OR_DIR", help=f"write there; a directory gets {in_directory}")
    command.add_argument("--force", action="store_true", help="overwrite files")


def is_python(word: str) -> bool:
    """Whether it names an interpreter: `python`, `.venv/bin/python3.11`."""
    return re.fullmatch(r"(?:.*[\\/])?python[\d.]*(?:\.exe)?", word) is not None


def is_directory(output: str) -> bool:
    """Whether `-o` names a directory: one that is there, or a name that ends as one."""
    return output.endswith(("/", os.sep)) or Path(output).is_dir()


def file_ending(output: str | None) -> str:
    """`"a/Page.HTML"` -> `".html"`; `""` of a directory, and where nothing was given."""
    return "" if output is None or is_directory(output) else Path(output).suffix.lower()


def refuse_ending(output: str | None, what: str, *, fine: Iterable[str]) -> None:
    """Raises WrongUse where a file's name promises something else than `what`, which may have the endings `fine`."""
    ending = file_ending(output)
    if ending in _HOLDS and ending not in fine:
        raise WrongUse(f"-o {output}: {what} is to go there, and {ending} is {_HOLDS[ending]}. Name another file.")


def settle_format(options: argparse.Namespace, *, formats: Iterable[str] = FORMATS, others: Iterable[str] = ()) -> None:
    """`options.format` as the name of the file tells it: `.json` is JSON, `.csv` is CSV where the command writes it.

    `formats`: that the command writes. `others`: endings of what else it writes, which it sees to itself.

    Raises:
        WrongUse: the file would hold something else than its name promises.
    """
    ending = file_ending(options.output).removeprefix(".")
    if ending in formats and options.format == "text":
        options.format = ending
    refuse_ending(options.output, options.format, fine=(f".{options.format}", *others))


def refuse_to_overwrite(paths: Iterable[Path], *, force: bool) -> None:
    """Before the work is done.

    Raises:
        OSError: one of them is there, and not `force`; or it is no file, but a device, say.
    """
    from profiler_wrapper.trace.atomic import check_replaceable

    for path in paths:
        check_replaceable(path)
        if path.exists() and not force:
            raise FileExistsError(f"File already exists, will not overwrite without --force: {path}")


def output_files(options: argparse.Namespace, files: Mapping[str, Writer[Subject]]) -> dict[Path, Writer[Subject]]:
    """What is written where: none without `-o`; into a directory all of `files`; else the one that FILE's name means.

    Args:
        files: by their names in a directory; the first with an ending is what a FILE with that ending gets.

    Raises:
        OSError: as `refuse_to_overwrite`.
    """
    if options.output is None:
        return {}
    output = Path(options.output)
    if is_directory(options.output):
        found = {output / name: write_to for name, write_to in files.items()}
    else:
        ending = ".html" if output.suffix.lower() == ".htm" else output.suffix.lower()
        if ending not in (".json", ".html", ".csv", ".png"):
            ending = ".json" if options.format == "json" else ".txt"
        found = {output: next(write_to for name, write_to in files.items() if name.endswith(ending))}
    refuse_to_overwrite(found, force=options.force)
    return found


def output_file(options: argparse.Namespace, name: str) -> Path | None:
    """The one file that is written, in a directory by that name; None without `-o`. Raises OSError."""
    if options.output is None:
        return None
    path = Path(options.output, name) if is_directory(options.output) else Path(options.output)
    refuse_to_overwrite([path], force=options.force)
    return path


def write(writers: Mapping[Path, Writer[Subject]], subject: Subject) -> None:
    """Write each file whole, or not at all, and print where it is."""
    from profiler_wrapper.trace.atomic import replacing

    for path, write_to in writers.items():
        with replacing(path) as beside:
            write_to(subject, beside)
        print(path)


def print_or_write(text: str, output: Path | None) -> None:
    """To stdout, without `output`."""
    if output is None:
        print(text)
    else:
        write({output: lambda text, path: write_text(path, text)}, text)


def write_text(path: Path, text: str) -> None:
    """One file with that text and a line's end; what UTF-8 does not have is written as an escape."""
    path.write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))


def json_text(data: object) -> str:
    """As files have it, without the last line's end."""
    from profiler_wrapper.trace.atomic import json_bytes

    return json_bytes(data).decode().rstrip()


# --------------------------------------------------------------------------------------------------
# Reading what a command is about: its path and peaks among the arguments, and a bar while a large trace is read.

DELAY_S = 1.0  # what takes no longer needs no bar
_TRACE_SUFFIXES = (".gz", ".json", ".trace", ".pt")


def add_source(command: argparse.ArgumentParser) -> None:
    """The trace or run that the command is about, which rank of it, and what the device can do."""
    command.add_argument("path", metavar="TRACE_OR_RUNDIR", help="a trace (.json, .json.gz), or the directory of a run")
    command.add_argument("--rank", type=int, metavar="R", help="of a run with several ranks (default: the first)")
    command.add_argument("--process", metavar="PID", help="of a trace of several ranks: its pid, or part of it (TP01)")
    command.add_argument(
        "--peaks",
        metavar="VALUE",
        help="of the device: dense TFLOP/s (989), bfloat16=989,bandwidth=3350 (GB/s), or a file of `peaks --measure`",
    )


def read_result(
    path: Path, *, peaks: str | None = None, rank: int | None = None, process: str | None = None
) -> ProfileResult:
    """As `load`, with a bar on a terminal while it takes long."""
    from profiler_wrapper.result import load

    with reading_bar(f"reading {path.name}") as progress:
        return load(path, peaks=peaks, rank=rank, process=process, progress=progress)


def read_for_page(path: Path, *, peaks: str | None = None, process: str | None = None) -> ProfileResult:
    """As `read_result` of a file that `find_source` found, with single events."""
    from profiler_wrapper.result import load_for_page

    with reading_bar(f"reading {path.name}") as progress:
        return load_for_page(path, peaks=peaks, process=process, progress=progress)


def find_source(path: Path, *, peaks: str | None = None, rank: int | None = None, process: str | None = None) -> Path:
    """The file that `read_result` reads for `path`."""
    from profiler_wrapper.tables.work.peaks import VARIABLE
    from profiler_wrapper.trace.rank_files import find_result

    return find_result(path, rank=rank, with_trace=bool(peaks or process or os.environ.get(VARIABLE)))


def trace_of(source: Path, result: ProfileResult) -> Path | None:
    """The trace of a result, which was read from it or from what was written beside it; None where it is gone."""
    from profiler_wrapper.trace.run_directory import RESULT_FILE
    from profiler_wrapper.trace.run_file import trace_beside

    return trace_beside(source.parent, result.run) if source.name == RESULT_FILE else source


def trace_stem(path: Path) -> str:
    """`"runs/h100.pt.trace.json.gz"` -> `"h100"`."""
    trace = path.resolve()
    while trace.suffix in _TRACE_SUFFIXES:
        trace = trace.with_suffix("")
    return trace.name


@contextmanager
def reading_bar(what: str, *, unit: str = "B") -> Iterator[Progress | None]:
    """A bar on stderr for `load(progress=...)`, from the second second on; None where stderr is no terminal.

    It says that the analysis goes on after one file has been read. `unit`: of what is counted.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    size: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B", "unit_divisor": 1024}
    with tqdm(leave=False, file=sys.stderr, delay=DELAY_S, mininterval=0, miniters=0, **size) as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.desc = total, f"{'analysing' if done >= total else what}: "
            bar.update(done - bar.n)

        yield show
