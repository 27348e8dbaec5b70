"""`compare`: two results, or what they can be loaded from, side by side; and what `guard` compares."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.comparison.baseline import Baseline, baseline_from_dict, baseline_of
from profiler_wrapper.comparison.compare import compare as compare_analyses
from profiler_wrapper.comparison.compare import peak_bytes
from profiler_wrapper.comparison.guard import GuardReport
from profiler_wrapper.comparison.guard import guard as guard_baselines
from profiler_wrapper.comparison.model import Comparison
from profiler_wrapper.comparison.page import write_compare_page
from profiler_wrapper.comparison.text import compare_csv, compare_text
from profiler_wrapper.comparison.verdict import traits
from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.result import load
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.run_directory import read_json
from profiler_wrapper.units import unicode_terminal

Source = Analysis | str | os.PathLike[str]
BASELINE_VERSION = 3
_LARGEST_BASELINE = 64 << 20  # bytes: a larger file is a trace, and is not read to see whether it is a baseline
# What a guard looks at: the lists of a result, and the fields of their rows.
_GUARDED: Mapping[str, str] = {
    "layers": "layer class_name kind block parent depth order phase time_us self_time_us self_events "
    "self_flops_per_step self_retained_bytes step_times_us",
    "attention": "layer phase backend time_us",
    "classes": "class phase count time_us",
    "steps": "step time_us",
    "flops": "layer phase class dtype flops_per_step repeated_flops_per_step",
    "operators": "op class phase calls layers time_us self_time_us",
    "synchronisations": "kind op layer phase count",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileComparison(Comparison):
    """Two results side by side. `print(comparison)` shows the verdict and what changed most."""

    def __str__(self) -> str:
        return self.table()

    def table(self, *, rows: int = 20, width: int = 100) -> str:
        """The verdict, the totals, what changed, and own times per step: at most `rows` of them by `width`."""
        return compare_text(self, rows=rows, width=width, unicode=unicode_terminal())

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """A line per layer and phase, with both sides. Returns `path`.

        Raises:
            OSError: it cannot be written.
        """
        with replacing(Path(path)) as beside:
            beside.write_text(compare_csv(self), encoding="utf-8")
        return Path(path)

    def write_page(self, path: str | os.PathLike[str]) -> Path:
        """One page with both sides, which opens from disk and loads nothing. Returns `path`.

        Raises:
            OSError: it cannot be written.
        """
        with replacing(Path(path)) as beside:
            write_compare_page(self, beside)
        return Path(path)


def compare(a: Source, b: Source, *, name_a: str = "", name_b: str = "") -> ProfileComparison:
    """What is otherwise in `b` than in `a`: time, memory, FLOPs and calls of every layer, phase and class.

    A difference in time counts where it is beyond the noise that the steps show; see `Comparison.decision`.

    Args:
        a, b: results, or what `load` reads: traces, directories of runs, result.json.
        name_a, name_b: what they are called; else their paths.

    Raises:
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    one, other = _loaded(a), _loaded(b)
    found = compare_analyses(one, other, name_a=name_a or _name_of(a, "a"), name_b=name_b or _name_of(b, "b"))
    return ProfileComparison(**{field.name: getattr(found, field.name) for field in fields(Comparison)})


def _loaded(source: Source) -> Analysis:
    return source if isinstance(source, Analysis) else load(source)


def _name_of(source: Source | Baseline, default: str = "given") -> str:
    """What a side is called: its path, else the trace that its run names."""
    if isinstance(source, Baseline):
        return ", ".join(source.sources) or default
    if not isinstance(source, Analysis):
        return os.fspath(source)
    trace = source.run.get("trace")
    return trace if isinstance(trace, str) and trace else default


def guard(
    baseline: Source | Baseline,
    runs: Source | Baseline | Sequence[Source],
    *,
    baseline_name: str = "",
    run_name: str = "",
) -> GuardReport:
    """Whether `runs` are worse than `baseline`, as the command `guard` says it.

    Args:
        baseline: the file that `baseline` is kept in, else a result, a trace or the directory of a run.
        runs: a result, a trace or a directory of a run; several are judged together: a regression is in all of them.
        baseline_name, run_name: what they are called; else their paths.

    Raises:
        WrongUse: they are of different models, or the file is no baseline.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    base = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
    if isinstance(runs, Baseline):
        current, names = runs, list(runs.sources)
    else:
        several = [runs] if isinstance(runs, (Analysis, str, os.PathLike)) else list(runs)
        current, names = make_baseline(several), [_name_of(run) for run in several]
    return guard_baselines(
        base,
        current,
        baseline_name=baseline_name or _name_of(baseline),
        run_name=run_name or ", ".join(names) or "given",
    )


def make_baseline(runs: Sequence[Source], *, read: Callable[[str | os.PathLike[str]], Analysis] = load) -> Baseline:
    """What to compare later runs with, from runs of one thing: with several, what varies among them is let pass.

    Raises:
        WrongUse: there is none, or they are of different models.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    analyses = [run if isinstance(run, Analysis) else read(run) for run in runs]
    sources = [Path(run).name for run in runs if not isinstance(run, Analysis)]
    return baseline_of(analyses, sources=sources)


def read_baseline(source: Source) -> Baseline:
    """A baseline from its file, else of a result, a trace or the directory of a run.

    Raises:
        WrongUse: the file is of another version.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    data = None if isinstance(source, Analysis) else _baseline_data(Path(source))
    if data is None:
        return make_baseline([source])
    version = data["guard_baseline_version"]
    if version not in (2, BASELINE_VERSION):
        raise WrongUse(f"guard_baseline_version is {version!r}, expected {BASELINE_VERSION}: make the baseline anew")
    try:
        if version == 2:
            return baseline_from_dict(data)
        return baseline_of([from_dict(result) for result in data["results"]], sources=data["sources"])
    except (BrokenTrace, KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"not a baseline that guard wrote: {error}") from error


def _baseline_data(path: Path) -> dict[str, Any] | None:
    if not path.is_file() or path.stat().st_size > _LARGEST_BASELINE:
        return None
    try:
        data = read_json(path)
    except BrokenTrace:
        return None
    return data if "guard_baseline_version" in data else None


def write_baseline(baseline: Baseline, path: Path) -> None:
    """The file to commit: the results of the runs, with what a guard looks at; a row on each line, for diffs.

    Raises:
        WrongUse: it is of a file of an earlier version, which held no results.
        OSError: it cannot be written.
    """
    if not baseline.results:
        raise WrongUse("a baseline is written from runs: give those")
    results = ",\n".join(_guarded_result(one) for one in baseline.results)
    head = f'"guard_baseline_version": {BASELINE_VERSION},\n"sources": {json.dumps(baseline.sources)}'
    with replacing(path) as beside:
        beside.write_text(f'{{{head},\n"results": [\n{results}\n]}}\n', encoding="utf-8")


def _guarded_result(analysis: Analysis) -> str:
    """Of a `result.json` what a guard looks at, without what is not known."""
    whole = to_dict(analysis)
    short = {key: whole[key] for key in ("schema_version", "time_basis", "complete", "time")}
    short |= {
        "summary": {"comparable": traits(analysis)},
        "run": {"graph_breaks": whole["run"].get("graph_breaks")},
        "memory": {"peak": {"allocated_bytes": peak_bytes(analysis)}},
    }
    for name, names in _GUARDED.items():
        short[name] = [{key: row[key] for key in names.split() if row[key] is not None} for row in whole[name]]

    def lines(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(map(lines, value)) + "\n ]"
        return json.dumps(value, separators=(",", ":"))

    return "{" + ",\n ".join(f"{json.dumps(key)}: {lines(value)}" for key, value in short.items()) + "}"
