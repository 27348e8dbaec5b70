"""`guard`: whether a run is worse than a baseline, for continuous integration."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.terminal import terminal_width


def add(commands: common.Commands) -> None:
    examples = (
        "--update baseline.json outputs/run1 outputs/run2 outputs/run3\nbaseline.json outputs/run\n"
        "--update --force baseline.json outputs/run4"
    )
    command = common.add_command(commands, "guard", guard, examples=examples)
    command.add_argument(
        "baseline", metavar="BASELINE", help="the file that --update wrote; or a run: its directory, result or trace"
    )
    command.add_argument(
        "runs", metavar="RUN", nargs="+", help="what is to be judged; of several, what is worse in all of them counts"
    )
    command.add_argument(
        "--update",
        action="store_true",
        help="write BASELINE from the RUNs instead: what varies among them passes; an earlier one only with --force",
    )
    common.add_output(command, "guard.txt, guard.json or guard.md", formats=(*common.FORMATS, "markdown"))


def guard(options: argparse.Namespace) -> int:
    """Say whether RUN is worse than BASELINE. Exit code 3: it is.

    First what is exact: FLOPs, kernels (on a CPU ops), waits for the device, graph breaks, memory, attention's
    backend, layer by layer. FLOPs are the model's; what checkpointing computes again counts too, the scores that a
    fused attention makes again do not. Then time, beyond the larger of 10 % and three times its spread, between runs
    on the same machine and versions, of ten timed steps or more (three are the least) without shapes:
    ProfilerWrapper(model, steps="5-14"). Memory and time are judged between runs that both recorded memory, as by
    default, or time alone between runs that both did not. What cannot be judged is said, and why. Better is no reason
    to fail.
    """
    from profiler_wrapper.comparison.baseline import make_baseline, read_baseline
    from profiler_wrapper.comparison.guard import guard as judge

    if options.update:
        if options.output is not None:
            raise WrongUse("--update writes BASELINE: leave out -o")
        return _update(options)
    name = {"json": "guard.json", "markdown": "guard.md"}.get(options.format, "guard.txt")
    output = common.output_file(options, name)
    base = read_baseline(options.baseline)
    current = make_baseline(options.runs, read=lambda path: common.read_result(Path(path)))
    report = judge(base, current, baseline_name=options.baseline, run_name=", ".join(options.runs))
    if not report.judged:
        reasons = {check.reason for check in report.checks if check.reason}
        raise WrongUse(f"nothing of {options.baseline} and {report.run} can be compared: {'; '.join(sorted(reasons))}")
    ending = "" if output is None else output.suffix
    if options.format == "json" or ending == ".json":
        text = common.json_text(report.to_dict())
    elif options.format == "markdown" or ending == ".md":
        text = report.markdown()
    else:
        text = report.table(width=terminal_width())
    common.print_or_write(text, output)
    return common.REGRESSION if report.regressed else common.FINE


def _update(options: argparse.Namespace) -> int:
    from profiler_wrapper.comparison.baseline import make_baseline, write_baseline

    path = Path(options.baseline)
    if common.is_directory(options.baseline):
        raise WrongUse(f"{path} is a directory: name the file that the baseline goes to")
    common.refuse_to_overwrite([path], force=options.force)
    made = make_baseline(options.runs, read=lambda run: common.read_result(Path(run)))
    write_baseline(made, path)
    print(common.json_text({"baseline": str(path)}) if options.format == "json" else path)
    return common.FINE
