"""`report`: the page of a trace or a run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.trace.run_directory import PAGE_FILE, RESULT_FILE, href


def add(commands: common.Commands) -> None:
    run = "outputs/profile-20260101-120000"
    examples = f"{run} --rank 3\n{run} --open\ntrace.json.gz -o page.html\ntrace.json.gz --share"
    command = common.add_command(commands, "report", report, examples=examples)
    common.add_source(command)
    command.add_argument(
        "--share", action="store_true", help="leave out paths, names of host, user and run, sources: shared_report.html"
    )
    command.add_argument("--open", action="store_true", help="show the page in the browser, until Ctrl-C")
    command.add_argument("--port", type=int, metavar="N", help="of 127.0.0.1, for --open (default: a free one)")
    common.add_output(command, "the page")


def report(options: argparse.Namespace) -> None:
    """Make the page: every view of a run or of any torch.profiler trace in one HTML file that needs no network.

    The page of a run goes to report.html in its directory, of one rank with --rank into the rank's, that of a trace
    beside it. It links to the trace. Prints where it is. With --share it has no path, no host, user or run name, no
    source and no link; names of layers, ops, kernels and named blocks stay.

    With --open the page, or the one that is there already, is served on 127.0.0.1 with its trace, which it can then
    hand to Perfetto, and opened in the browser. Only who has the address that is printed can read it. Ctrl-C ends it.
    """
    common.refuse_ending(options.output, "the page", fine=(".html", ".htm"))
    if options.port is not None and not (options.open and 0 < options.port < 1 << 16):
        raise WrongUse(f"--port {options.port}: give a number from 1 to 65535, beside --open.")
    if not options.open:
        _say(options, *_make(options))
        return
    from profiler_wrapper.commands.page_server import PageServer

    with PageServer(options.port) as server:  # before the work is done
        page, trace = _make(options)
        address = server.add(page, trace)
        _say(options, page, trace, address)
        server.show(address)


def _make(options: argparse.Namespace) -> tuple[Path, Path | None]:
    """The page, and the trace that it links to."""
    from profiler_wrapper.reports.page import write_page
    from profiler_wrapper.sharing import shareable
    from profiler_wrapper.trace.atomic import replacing

    given = Path(options.path)
    source = common.find_source(given, peaks=options.peaks, rank=options.rank, process=options.process)
    page = _page_path(given, source, options)
    is_there = options.open and page.is_file() and not options.force
    if is_there:
        print(f"{page} is there already, and is shown as it is; --force makes it anew", file=sys.stderr)
    else:
        common.refuse_to_overwrite([page], force=options.force)
    if is_there and source.name != RESULT_FILE:  # a trace, which takes its time to read
        return page, None if options.share else source
    read = common.read_result if is_there else common.read_for_page
    result = read(source, peaks=options.peaks, process=options.process)
    trace = None if options.share else common.trace_of(source, result)
    if not is_there:
        shown = shareable(result) if options.share else result
        with replacing(page) as beside:
            write_page(shown, beside, trace_href=None if trace is None else href(trace, page=page))
    return page, trace


def _say(options: argparse.Namespace, page: Path, trace: Path | None, address: str = "") -> None:
    """Where they are, and what a page to share has not."""
    from profiler_wrapper.sharing import LEFT_OUT

    more = {"left_out": LEFT_OUT} if options.share else {}
    if options.format == "json":
        more |= {"address": address} if address else {}
        print(common.json_text({"page": str(page), "trace": trace and str(trace), **more}), flush=True)
    else:
        print(page, *more.values(), *([f"{address} (Ctrl-C ends it)"] if address else []), sep="\n", flush=True)


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
