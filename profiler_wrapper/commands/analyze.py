"""`analyze`: the layer table of a trace or a run, and all numbers for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.terminal import styled_terminal, terminal_width, unicode_terminal

if TYPE_CHECKING:
    from profiler_wrapper.result import ProfileResult


_EXAMPLES = """\
outputs/profile-20260101-120000
trace.json.gz --format json --select summary,layers --top 10
trace.json.gz -o layers.csv"""
_FORMATS = ("text", "json", "csv")
_LINES = 24  # of the printed table beside its layers, at most


def add(commands: common.Commands) -> None:
    command = common.add_command(commands, "analyze", analyze, examples=_EXAMPLES)
    common.add_source(command)
    command.add_argument("--top", type=int, metavar="N", help="at most N rows of each table or list, the longest first")
    command.add_argument(
        "--select",
        metavar="KEYS",
        help="of the JSON, only these: summary,time,layers.layer,layers.self_time_us; of CSV, the list: operators",
    )
    command.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of each list of the JSON or CSV, only rows that say so: phase=optimizer, layer=model.layers.3",
    )
    command.add_argument("--schema", action=_PrintSchema, nargs=0, help="print the JSON Schema of the JSON and exit")
    common.add_output(command, "the tables, result.json, the page and plots", formats=_FORMATS)


class _PrintSchema(argparse.Action):
    """As --help: prints, and no trace need be given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from profiler_wrapper.reports.result_json import schema_text

        print(schema_text().rstrip())
        parser.exit()


def analyze(options: argparse.Namespace) -> None:
    """Print or write the layer table of any torch.profiler trace, or of a run's directory.

    With --format json, or -o FILE.json, all numbers; with --format csv, or -o FILE.csv, one list of them. Into a
    directory go all reports, or with --format csv every list.
    """
    if options.top is not None and options.top < 1:
        raise WrongUse(f"--top {options.top}: give a number of rows, from 1.")
    common.settle_format(options, formats=_FORMATS)
    if options.format == "text" and (options.select is not None or options.where):
        raise WrongUse("--select and --where are of JSON and CSV: add --format json or --format csv.")
    if options.output is None:
        print(_text(_read(options), options, terminal=True).rstrip("\n"))
    elif common.is_directory(options.output):
        _write_directory(options)
    else:
        output = Path(options.output)
        common.refuse_to_overwrite([output], force=options.force)
        common.write({output: lambda result, path: _write_file(result, path, options)}, _read(options))


def _read(options: argparse.Namespace) -> ProfileResult:
    return common.read_result(Path(options.path), peaks=options.peaks, rank=options.rank, process=options.process)


def _keys(options: argparse.Namespace) -> list[str]:
    return [key.strip() for key in (options.select or "").split(",") if key.strip()]


def _text(result: ProfileResult, options: argparse.Namespace, *, terminal: bool = False) -> str:
    """In the format that is asked for; the table for the terminal, if it is printed there."""
    if options.format == "csv":
        return _csv(result, options)
    if options.format == "json":
        return _json(result, options)
    from profiler_wrapper.reports.table import NARROWEST, console_table

    rows = 25 if options.top is None else options.top + _LINES
    table = partial(console_table, result, rows=rows, layer_rows=options.top)
    if not terminal:
        return table()
    return table(width=max(NARROWEST, terminal_width()), unicode=unicode_terminal(), styled=styled_terminal())


def _json(result: ProfileResult, options: argparse.Namespace) -> str:
    """Of parts without spaces: who asks for little wants to read little. Of `summary` the short form."""
    from profiler_wrapper.reports.result_json import selected, short_summary, with_path

    data, keys = result.to_dict(), _keys(options)
    if not keys and options.top is None and not options.where:
        return json.dumps(data, indent=2)
    for finding in data["summary"]["findings"]:
        finding["next"] = finding.get("next") and with_path(finding["next"], options.path)
    if "summary" in keys:
        data["summary"] = short_summary(data, options.path, top=options.top, ranks=_ranks_of(options))
    part = selected(data, select=keys, where=options.where, top=options.top)
    return json.dumps(part, separators=(",", ":"))


def _ranks_of(options: argparse.Namespace) -> str | None:
    """The directory of the run, if several ranks have written into it."""
    if not Path(options.path).is_dir():
        return None
    from profiler_wrapper.ranks.load import run_of

    run = run_of(Path(options.path))
    return None if run is None else str(run)


def _csv(result: ProfileResult, options: argparse.Namespace) -> str:
    from profiler_wrapper.reports.result_json import LISTS, csv_text

    keys = _keys(options) or ["layers"]
    if unknown := sorted(set(keys) - set(LISTS)):
        raise WrongUse(f"--select {unknown[0]}: a result has no such list of rows. It has: {', '.join(LISTS)}.")
    if len(keys) > 1:
        raise WrongUse(f"--select {options.select}: CSV holds one list. Select one, or write all into a directory.")
    return csv_text(result, keys[0], where=options.where, top=options.top)


def _write_file(result: ProfileResult, path: Path, options: argparse.Namespace) -> None:
    if options.format == "text" and options.top is None:
        from profiler_wrapper.reports.write import REPORTS

        REPORTS["log"].files[0].write(result, path)
    else:
        common.write_text(path, _text(result, options).removesuffix("\n"))


def _write_directory(options: argparse.Namespace) -> None:
    """Every report, or every list as CSV. What a result has nothing to say of is left out."""
    directory = Path(options.output)
    if options.format == "csv":
        from profiler_wrapper.reports.result_json import LISTS, write_csv_files

        common.refuse_to_overwrite((directory / f"{name}.csv" for name in LISTS), force=options.force)
        print(*write_csv_files(_read(options), directory), sep="\n")
        return
    from profiler_wrapper.reports.page import write_page
    from profiler_wrapper.reports.write import REPORTS
    from profiler_wrapper.trace.run_directory import PAGE_FILE, href

    source = common.find_source(Path(options.path), peaks=options.peaks, rank=options.rank, process=options.process)
    prefix = common.trace_stem(Path(options.path))
    files = {
        directory / file.name.replace("<prefix>", prefix).replace("<r>", "0"): (report, file)
        for report in REPORTS.values()
        for file in report.files
    }
    common.refuse_to_overwrite(files, force=options.force)
    result = common.read_for_page(source, peaks=options.peaks, process=options.process)
    reports: Mapping[Path, Callable[[ProfileResult, Path], object]] = {
        path: file.write for path, (report, file) in files.items() if report.applies(result)
    }
    page, trace = directory / PAGE_FILE, common.trace_of(source, result)
    trace_href = None if trace is None else href(trace, page=page)
    common.write({**reports, page: partial(write_page, trace_href=trace_href)}, result)
