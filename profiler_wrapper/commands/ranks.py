"""`ranks`: all ranks of a job beside one another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.terminal import WIDTH_OF_FILES, terminal_width
from profiler_wrapper.trace.spans import ranges

if TYPE_CHECKING:
    from profiler_wrapper.ranks.report import RanksReport

    Subject = tuple[Any, RanksReport]  # the database of the spans, and what is said of them

Lanes = tuple[int, ...] | str | None  # what --lanes says: ranks, "all", or nothing
_TRACE = "timeline_trace.json.gz"


def add(commands: common.Commands) -> None:
    examples = (
        "outputs/profile-20260101-120000\n"
        "outputs/profile-20260101-120000 --ranks 0-7 --format json\n"
        "--spans job.parquet --columns took=duration_ms,worker=rank\n"
        "outputs/profile-20260101-120000 --lanes 40-47 -o timeline.png\n"
        "traces/ --scheduler tcp://10.0.0.1:8786 -o report/"
    )
    command = common.add_command(commands, "ranks", ranks, examples=examples)
    command.epilog = f"{command.epilog or ''}\n\n{_names_help()}"
    command.add_argument(
        "path", nargs="?", metavar="RUN", help="the directory of a run, a directory of traces, or a table of spans"
    )
    command.add_argument(
        "--spans",
        metavar="FILE",
        help="a table of spans of another tool: .parquet, .csv or .jsonl, or a directory of such",
    )
    command.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="which of its columns is which of ours: took=duration_ms,worker=rank",
    )
    command.add_argument("--ranks", metavar="LIST", help="only these: 0-7 or 0,3,8-11")
    command.add_argument(
        "--lanes",
        metavar="LIST",
        help="ranks that the timeline and its trace show, as for --ranks, or all (default: all, or the 32 of more that "
        "tell most; in the trace all); the others are analysed too",
    )
    command.add_argument(
        "--use", choices=("timers", "traces"), help="where a run has both (default: what tells of more ranks)"
    )
    command.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask cluster that reduces the traces")
    common.add_output(
        command, "the text, the JSON, the page, the timeline (PNG, and a trace for Perfetto) and the heat map"
    )


def _names_help() -> str:
    from profiler_wrapper.trace.spans import KNOWN_NAMES

    lines = [f"  {kind:<14} {names}" for kind, names in KNOWN_NAMES.items()]
    head = (
        "The kind of a timer's span follows from words in its name (start(name, kind=...) says it otherwise);\n"
        "a name without one counts as other, and is listed by itself:"
    )
    return "\n".join([head, *lines])


def ranks(options: argparse.Namespace) -> None:
    """Say which rank, stage or part of the step slows a job down, who waits for whom, and what it costs.

    Reads what the ranks of a run wrote: logs of timers, or traces, which are first reduced to small tables beside
    them, by all cores. Any other table of spans will do: its columns are rank, step, name, start and duration, by
    these or similar names. What is missing, a rank without a file or steps that not all have, is said.
    """
    from profiler_wrapper.ranks.database import parse_mapping
    from profiler_wrapper.trace.spans import parse_ranks

    if options.path is None and options.spans is None:
        raise WrongUse("say which run: its directory, or a table of spans by --spans FILE")
    if options.path is not None and options.spans is not None:
        raise WrongUse(f"say either RUN or --spans: {options.path} and {options.spans} are two sources of spans")
    common.settle_format(options, others=[".png", ".html"])
    if options.lanes is not None and options.output is None:
        raise WrongUse("--lanes is of the timeline: say where it goes by -o timeline.png, report.html or DIR/")
    columns = parse_mapping(options.columns)
    chosen = None if options.ranks is None else parse_ranks(options.ranks)
    if options.lanes is not None and options.lanes != "all":
        options.lanes = parse_ranks(options.lanes, option="--lanes ")
    writers = common.output_files(options, _files(options))
    from profiler_wrapper.ranks.load import Choice, open_ranks

    path = Path(options.path if options.path is not None else options.spans)
    with common.reading_bar("reducing traces", unit="trace") as bar:
        choice = Choice(
            spans=None if options.spans is None else Path(options.spans),
            columns=columns,
            scheduler=options.scheduler,
            ranks=chosen,
            use=options.use,
            output=Path(options.output) if options.output is not None and common.is_directory(options.output) else None,
            done=bar,
        )
        with open_ranks(path, choice) as (loaded, report):
            if writers:
                common.write(writers, (loaded.database, report))
            else:
                print(_text(report, options.format, width=terminal_width()))


def _text(report: RanksReport, form: str, *, width: int) -> str:
    from profiler_wrapper.ranks.text import ranks_text

    return common.json_text(report.to_dict()) if form == "json" else ranks_text(report, width=width)


def _files(options: argparse.Namespace) -> dict[str, common.Writer[Subject]]:
    """What is written, by name."""
    from profiler_wrapper.ranks.figures import draw_heat_map, draw_timeline, write_ranks_page
    from profiler_wrapper.ranks.timeline import write_ranks_trace

    def lanes_of(write_to: Callable[..., object], **more: Any) -> common.Writer[Subject]:
        def write(subject: Subject, path: Path) -> None:
            database, report = subject
            write_to(report, database, path, ranks=_chosen_lanes(report, options.lanes), **more)

        return write

    trace_href = _TRACE if options.output is not None and common.is_directory(options.output) else None
    return {
        "ranks.txt": lambda subject, path: common.write_text(path, _text(subject[1], "text", width=WIDTH_OF_FILES)),
        "ranks.json": lambda subject, path: common.write_text(path, _text(subject[1], "json", width=WIDTH_OF_FILES)),
        "report.html": lanes_of(write_ranks_page, trace_href=trace_href),
        "timeline.png": lanes_of(draw_timeline),
        "heat_map.png": lambda subject, path: draw_heat_map(subject[1], path),
        _TRACE: lanes_of(write_ranks_trace),
    }


def _chosen_lanes(report: RanksReport, lanes: Lanes) -> list[int] | None:
    """The ranks that `--lanes` names; None: those that tell most.

    Raises:
        WrongUse: none of them is there.
    """
    if lanes is None:
        return None
    there = report.own.ranks.tolist()
    found = [rank for rank in there if lanes == "all" or rank in lanes]
    if not found:
        raise WrongUse(f"--lanes: none of these ranks is there; there are {ranges(there)}")
    return found
