"""`report`: the page of a trace or a run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from profiler_wrapper.commands import common
from profiler_wrapper.trace.run_directory import PAGE_FILE, RESULT_FILE, href


def add(commands: common.Commands) -> None:
    examples = "outputs/profile-20260101-120000 --rank 3\ntrace.json.gz -o page.html\ntrace.json.gz --share"
    command = common.add_command(commands, "report", report, examples=examples)
    common.add_source(command)
    command.add_argument(
        "--share", action="store_true", help="leave out paths, names of host, user and run, sources: shared_report.html"
    )
    common.add_output(command, "the page")


def report(options: argparse.Namespace) -> None:
    """Make the page: every view of a run or of any torch.profiler trace in one HTML file that needs no network.

    The page of a run goes to report.html in its directory, of one rank with --rank into the rank's, that of a trace
    beside it. It links to the trace. Prints where it is. With --share it has no path, no host, user or run name, no
    source and no link; names of layers, ops, kernels and named blocks stay.
    """
    from profiler_wrapper.reports.page import write_page
    from profiler_wrapper.sharing import LEFT_OUT, shareable
    from profiler_wrapper.trace.atomic import replacing

    common.refuse_ending(options.output, "the page", fine=(".html", ".htm"))
    given = Path(options.path)
    source = common.find_source(given, peaks=options.peaks, rank=options.rank, process=options.process)
    page = _page_path(given, source, options)
    common.refuse_to_overwrite([page], force=options.force)
    result = common.read_for_page(source, options)
    trace = None if options.share else common.trace_of(source, result)
    shown = shareable(result) if options.share else result
    with replacing(page) as beside:
        write_page(shown, beside, trace_href=None if trace is None else href(trace, page=page))
    left_out = {"left_out": LEFT_OUT} if options.share else {}
    if options.format == "json":
        print(common.json_text({"page": str(page), "trace": trace and str(trace), **left_out}))
    else:
        print(page, *left_out.values(), sep="\n")


def _page_path(given: Path, source: Path, options: argparse.Namespace) -> Path:
    """Where the page goes: as asked for; else beside what it is of, or where nothing can be written there, to here."""
    directory, name = source.parent, PAGE_FILE
    if options.share:
        name = f"shared_{PAGE_FILE}"
    elif not given.is_dir() and source.name != RESULT_FILE:
        name = f"{common.trace_stem(source)}_{PAGE_FILE}"
    if given.is_dir() and options.rank is None and directory.resolve() != given.resolve():
        directory = directory.parent  # of all ranks
    if options.output is not None:
        return Path(options.output, name) if common.is_directory(options.output) else Path(options.output)
    # Root could write also where nobody is meant to.
    if os.access(directory, os.W_OK) and directory.stat().st_mode & 0o222:
        return directory / name
    here = Path(name if name != PAGE_FILE else f"{directory.resolve().name}_{PAGE_FILE}")
    print(f"nothing can be written to {directory}, so the page goes to {here.resolve()}", file=sys.stderr)
    return here
