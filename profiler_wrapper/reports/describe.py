"""The words that all reports share: on what machine, how many steps, which time."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from profiler_wrapper.advice.facts import duration
from profiler_wrapper.errors import first_few
from profiler_wrapper.place.names import GENERATING_PHASES, LAUNCHED_BEFORE
from profiler_wrapper.reports.text import AT_LEAST, cells, clean, shorten
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.tables.statistics import number_ranges
from profiler_wrapper.tables.work.roofline import peak_of
from profiler_wrapper.trace.run_file import KVCacheLayers
from profiler_wrapper.units import TIME_NAMES, file_size

_LONGEST_NAME = 36
_NEARLY_ALL = 0.9  # of the time of what has no layer: it is then called by it
_FEW_FLOPS = 0.01  # types of number with a smaller share of the FLOPs are not named
_SOURCE_WIDTH = 20
_OUTSIDE_STEPS = 0.01  # a larger share of the time is said to be in no step


def machine(analysis: Analysis) -> str:
    """Return the name of what was measured: the device, or on a CPU-only trace the CPU."""
    key, otherwise = ("device", "an unnamed device") if analysis.time_basis == "device" else ("cpu_name", "CPU")
    name = analysis.run.get(key)
    return name if isinstance(name, str) and name else otherwise


def step_numbers(analysis: Analysis) -> list[int]:
    """Return the numbers of the timed steps, ascending."""
    return sorted(row.step for row in analysis.steps if row.step is not None)


def step_count(analysis: Analysis) -> int:
    """Return by what sums over the timed trace are divided to give one step.

    1 where no step has a number, where much time is in no step, and where tokens are steps, which are
    not alike: one prefill, many decodes.
    """
    return max(1, len(step_numbers(analysis))) if has_like_steps(analysis) else 1


def has_like_steps(analysis: Analysis) -> bool:
    """Return whether a mean over the steps says something of each of them."""
    return bool(step_numbers(analysis)) and not generates(analysis) and not outside_steps_ns(analysis)


def work_scale(analysis: Analysis) -> int | None:
    """Return the factor by which FLOPs and bytes per step stand beside the times.

    None where they cannot: steps are not alike, or do not hold all that was launched.
    """
    steps = step_numbers(analysis)
    outside = sum(row.time_ns for row in analysis.steps if row.step is None)
    before = sum(row.time_ns for row in analysis.unattributed if row.reason == LAUNCHED_BEFORE)
    if steps and (generates(analysis) or outside - before > _OUTSIDE_STEPS * analysis.time.total_ns):
        return None
    return max(1, len(steps)) // step_count(analysis)


def outside_steps_ns(analysis: Analysis) -> int:
    """Return time that belongs to no step, where there are steps; 0 where it is a trifle."""
    outside = sum(row.time_ns for row in analysis.steps if row.step is None)
    much = step_numbers(analysis) and outside > _OUTSIDE_STEPS * analysis.time.total_ns
    return outside if much else 0


def generates(analysis: Analysis) -> bool:
    """Return whether tokens are steps, which are not alike: neither requests, nor steps of a server that decodes."""
    phases = [{*GENERATING_PHASES} & {*row.phases_ns} for row in analysis.steps if row.step is not None]
    same_kind = bool(phases) and bool(phases[0]) and all(phase == phases[0] for phase in phases)
    return not same_kind and any(row.phase in GENERATING_PHASES for row in analysis.layers)


def steps_in_words(analysis: Analysis) -> str:
    """Return `"3 steps (5..7)"`; without steps, `"all of the trace"`."""
    numbers = step_numbers(analysis)
    if not numbers:
        return "all of the trace"
    ranges = number_ranges(numbers)
    return f"1 step ({ranges})" if len(numbers) == 1 else f"{len(numbers)} steps ({shorten(ranges, 24)})"


def full_steps_in_words(analysis: Analysis) -> str:
    """Return `"0,1"` or `"0..11"`: the steps with shapes; `""` where there are none, or the run does not say."""
    numbers = analysis.run.get("full_steps") or ()
    return number_ranges(sorted(number for number in numbers if isinstance(number, int)))


def per_step(analysis: Analysis) -> str:
    """Return `"per step"`, or `"in all"` where `step_count` is 1 whatever the steps."""
    return "per step" if has_like_steps(analysis) else "in all"


def coverage_percent(analysis: Analysis) -> str:
    """Return the attributed share, rounded as the shares of a table are, but 100.0 means all of it."""
    coverage = analysis.time.coverage
    return f"{100 * coverage if coverage >= 1 else min(100 * coverage, 99.9):.1f}"


def step_time_in_words(analysis: Analysis) -> str:
    """Return `"step takes 35.183 ms (35.100-36.020)"`: mean, least and most, end to end; `""` where not known.

    A result that does not hold that time may have the one on the CPU, which then has its own name.
    """
    times, name = analysis.step_times_ns, "step takes"
    if not times and analysis.utilization is not None and analysis.utilization.step_time_ns is not None:
        times = (analysis.utilization.step_time_ns,)
    if not times:
        times = tuple(row.span_ns for row in analysis.steps if row.step is not None and row.span_ns is not None)
        name = "step's CPU span"
    if not times:
        return ""
    mean, least, most = fmean(times), min(times), max(times)
    size = 1e9 if mean >= SECONDS_NS else 1e6
    return f"{name} {time_text(mean)}" + (f" ({least / size:.3f}-{most / size:.3f})" if least != most else "")


SECONDS_NS = 1e10  # what takes as long is written in seconds


def time_text(time_ns: float) -> str:
    """Return `"35.183 ms"`, `"43.350 s"`."""
    return f"{time_ns / 1e9:.3f} s" if time_ns >= SECONDS_NS else f"{time_ns / 1e6:.3f} ms"


_ALWAYS = {"train", "optimizer", "other"}  # parts of any training


def parts_in_words(analysis: Analysis) -> str:
    """Return `"a request: prefill 3.210 ms, 7 tokens 8.400 ms, other 0.520 ms"`: means; `""` if it says nothing new."""
    rows = [row for row in analysis.parts if row.step is not None]
    steps = len({row.step for row in rows})
    names = list(dict.fromkeys(row.part for row in rows))
    if not has_like_steps(analysis) or len(names) < 2 or (len({*names} - _ALWAYS) < 2 and "rollout" not in names):
        return ""
    said = []
    for name in names:
        of_name = [row for row in rows if row.part == name]
        count, time_ns = (sum(getattr(row, key) for row in of_name) / steps for key in ("count", "time_ns"))
        what = clean(name)
        if count > 1:
            what = f"{count:g} {what}s" if what == "token" else f"{count:g} x {what}"
        said.append(f"{what} {time_text(time_ns)}")
    unit = "a request" if analysis.run.get("step_source") == "requests" else "a step"
    return f"{unit}: {', '.join(said)}"


def left_out_in_words(analysis: Analysis) -> str:
    """Return `"left out: steps with an evaluation (3, 0.52 s)"`; `""` where nothing is but the warm-up."""
    rows = [one for one in analysis.run.get("left_out") or () if not str(one.get("what")).endswith("of warm-up")]
    said = [f"{clean(one['what'])} ({one['count']}, {duration(1e3 * one['time_us'])})" for one in rows]
    return f"left out: {', '.join(said)}" if said else ""


def kv_cache_lines(analysis: Analysis) -> list[str]:
    """Return a line a model: `"KV cache: 8.0 KiB at 16 tokens of 2 sequences, 512 B a token of each; ..."`."""
    caches, lines = analysis.run.get("kv_cache") or (), []
    for cache in caches:
        model = f" of {clean(cache['root'])}" if len(caches) > 1 else ""
        if cache["bytes"] is None:
            lines.append(f"KV cache{model}: not known, because {clean(cache['problem'] or '')}")
            continue
        rows, beams, longer = cache["layers"], cache["beams"], cache["contexts"][-1:]
        batch = (cache["sequences"] or 1) / beams
        of = f" of {batch:g} sequence{'s' * (batch > 1)}" if batch > 1 or beams > 1 else ""
        of += f" of {beams} beams" if beams > 1 else ""
        at = "" if cache["tokens"] is None else f" at {cache['tokens']} tokens{of}"
        each, of_each = cache["bytes_per_token"], " of each" * bool(of)
        said = [f"{file_size(cache['bytes'])}{at}", "" if each is None else f"{file_size(each)} a token{of_each}"]
        said += [_layers_in_words(row, rows) for row in rows if row["attention"] != "self" or row["kind"] != "full"]
        more = [f"; {file_size(one['bytes'])} at {one['tokens']} tokens" for one in longer if one["bytes"] is not None]
        lines.append(f"KV cache{model}: {', '.join(filter(None, said))}{''.join(more)}")
    return lines


def _layers_in_words(row: KVCacheLayers, rows: Sequence[KVCacheLayers]) -> str:
    if row["attention"] == "cross":
        return f"{file_size(row['bytes'] * row['count'])} of it of cross-attention"
    own = sum(one["count"] for one in rows if one["attention"] == "self")
    room, window = row["capacity"], row["window"]
    keeps = f", room for {room} tokens" if room is not None else f", window of {window}" if window is not None else ""
    return f"{row['count']} of {own} layers {clean(row['kind'])}{keeps}"


def rank_in_words(analysis: Analysis) -> str:
    """Return `"rank 3"`, or `""` where the run does not say."""
    rank = analysis.run.get("rank")
    return f"rank {rank}" if isinstance(rank, int) and not isinstance(rank, bool) else ""


def root_names(analysis: Analysis) -> str:
    """Name the models: `"LlamaForCausalLM"`, `"vae, unet"`; of many the largest: `"unet and 3 more"`."""
    rows = sorted((row for row in analysis.layers if row.depth == 0 and row.layer), key=lambda row: row.order)
    roots = list(dict.fromkeys(row.layer for row in rows))
    names = ", ".join(roots)
    if len(roots) == 1 or len(names) <= _LONGEST_NAME:
        return names
    return first_few(sorted(roots, key=lambda root: -sum(row.time_ns for row in rows if row.layer == root)), 1)


def model_in_words(analysis: Analysis) -> str:
    """Return the model, where it ran and its rank: `"LlamaForCausalLM on NVIDIA H200, rank 0"`."""
    model = shorten(clean(root_names(analysis), unicode=True) or "no layers", 60)
    where = shorten(clean(machine(analysis), unicode=True), 60)
    return ", ".join(filter(None, (f"{model} on {where}", rank_in_words(analysis))))


def use_line(analysis: Analysis, width: int) -> str:
    """Return `"MFU 17.3 % (causal 16.5 %) of 989.4 TFLOP/s bfloat16 over 35.183 ms, end to end; NVIDIA"`; or `""`.

    The source gives way where `width` is too small; numbers never do: the line is then longer.
    """
    use = analysis.utilization
    if use is None or use.mfu is None or use.peaks is None or use.step_time_ns is None:
        return ""
    shares = [_share_in_words("MFU", use.mfu, use.causal_mfu)]
    if use.hfu != use.mfu:
        shares.append(_share_in_words("HFU", use.hfu, use.causal_hfu))
    dtypes = main_dtypes(analysis)
    peaks = [f"{flop_rate((peak_of(use.peaks, dtype) or 0.0) * use.devices)} {dtype}".rstrip() for dtype in dtypes]
    line = f"{', '.join(shares)} of {' + '.join(peaks)} over {time_text(use.step_time_ns)}, end to end"
    if width - len(line) >= _SOURCE_WIDTH:
        line += "; " + shorten(clean(use.peaks.source), width - len(line) - 2)
    return line


def main_dtypes(analysis: Analysis) -> list[str]:
    """Return the types of number that more than 1 % of the FLOPs are of, those with most first."""
    flops: Counter[str] = Counter()
    for row in analysis.flops:
        flops[row.dtype] += row.flops_per_step
    return [dtype for dtype, count in flops.most_common() if count > _FEW_FLOPS * flops.total()]


def use_lines(analysis: Analysis, width: int) -> list[str]:
    """Break `use_line` into as many lines as it needs; none is broken between a number and its unit."""
    together = re.sub(r"(?<=\d) (?=\S)", "\u00a0", use_line(analysis, width))
    together = together.replace("end to end", "end\u00a0to\u00a0end")
    lines = textwrap.wrap(together, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _share_in_words(name: str, share: float | None, causal: float | None) -> str:
    text = f"{name} {100 * (share or 0):.1f} %"
    return text if causal is None or causal == share else f"{text} (causal {100 * causal:.1f} %)"


def flop_rate(flop_per_s: float) -> str:
    """Return `"989.4 TFLOP/s"`, `"85.2 GFLOP/s"`."""
    unit, size = ("TFLOP/s", 1e12) if flop_per_s >= 1e12 else ("GFLOP/s", 1e9)
    return f"{flop_per_s / size:.4g} {unit}"


def title_parts(analysis: Analysis, *, unicode: bool = False) -> list[str]:
    """Return what was measured, and how the steps went: the most telling first."""
    model = shorten(clean(root_names(analysis), unicode=unicode), _LONGEST_NAME)
    where = shorten(clean(machine(analysis), unicode=unicode), _LONGEST_NAME)
    total, outside_ns = time_text(analysis.time.total_ns / step_count(analysis)), outside_steps_ns(analysis)
    least = clean(AT_LEAST, unicode=unicode) if analysis.lost_launches else ""
    parts = [
        f"{model} on {where}" if model else where,
        rank_in_words(analysis),
        steps_in_words(analysis),
        "" if analysis.complete else "INCOMPLETE",
        f"{TIME_NAMES[analysis.time_basis]} {least}{total} {per_step(analysis)}",
        f"{time_text(outside_ns)} of it in no step" if outside_ns else "",
        f"{coverage_percent(analysis)} % attributed" if analysis.time.coverage < 1 else "",
        *_course(analysis, least),
    ]
    return [part for part in parts if part]


def _course(analysis: Analysis, least: str) -> list[str]:
    """Return how the steps went on the clock; `least`: stands before times of the device that are lower bounds."""
    parts = []
    step_time = "" if generates(analysis) else step_time_in_words(analysis)
    if step_time:
        parts.append(step_time)
    time, overview = analysis.time, analysis.overview
    wall_ns = 0 if overview is None else sum(step.span_ns for step in overview.steps)
    if overview is not None and overview.gaps_ns is not None and wall_ns:
        parts.append(f"device busy {100 * (1 - overview.gaps_ns / wall_ns):.1f} %")
    elif time.busy_ns is not None and time.span_ns:
        parts.append(f"device busy {least}{100 * time.busy_ns / time.span_ns:.1f} % of the trace")
    called = [row for row in analysis.layers if row.depth == 0 and row.phase in GENERATING_PHASES and row.calls]
    several = len({row.layer for row in called}) > 1
    for phase in dict.fromkeys(row.phase for row in called):
        each = [(row.layer, time_text(row.time_ns / (row.calls or 1))) for row in called if row.phase == phase]
        parts.append(f"{phase} {', '.join(f'{time} ({of})' if several else time for of, time in each)} a call")
    if time.exposed_communication_ns:
        exposed = time_text(time.exposed_communication_ns / step_count(analysis))
        parts.append(f"exposed communication {exposed} {per_step(analysis)}")
    backends = list(attention_backends(analysis))
    if backends:
        parts.append(f"attention: {' + '.join(clean(backend) for backend in backends)}")
    return parts


def expert_and_adapter_lines(analysis: Analysis, width: int) -> list[str]:
    """Return a line on experts, of the least balanced layer, and one on the time of all adapters."""
    lines, layers = [], analysis.expert_layers
    worst = max(layers, key=lambda row: row.balance or 0.0, default=None)
    if worst is not None and worst.balance is not None:
        busiest = max((row for row in analysis.experts if row.layer == worst.layer), key=lambda row: row.share or 0.0)
        share = f"{100 * (busiest.share or 0):.0f} % of the tokens to expert {busiest.expert}"
        lines.append(f"experts ({worst.method}): {share} ({worst.balance:.1f} x the mean) of {worst.layer}")
    if rows := analysis.adapters:
        own_ns, base_ns = (sum(getattr(row, f"{part}_time_ns") for row in rows) for part in ("adapter", "base"))
        own, base = (time_text(time_ns / step_count(analysis)) for time_ns in (own_ns, base_ns))
        lines.append(f"adapters: {own} {per_step(analysis)} beside {base} of the {len(rows)} layers they adapt")
    return [shorten(clean(line), width) for line in lines]


def peak_bytes(analysis: Analysis) -> int | None:
    """Return the highest allocated at any time; None where no allocation was recorded."""
    peak = analysis.memory.get("peak")
    whole = peak.get("allocated_bytes") if isinstance(peak, Mapping) else None
    known = [whole, *(row.peak_bytes for row in analysis.steps)]
    return max((int(size) for size in known if isinstance(size, (int, float))), default=None)


def attention_backends(analysis: Analysis) -> dict[str, int]:
    """Return attention time by backend in nanoseconds, most first."""
    times = Counter[str]()
    for row in analysis.attention:
        times[row.backend] += row.time_ns
    return dict(times.most_common())


def outside_label(row: LayerRow) -> str:
    """Name a row without a layer, for tables."""
    own = row.raw_name or row.class_name
    if own:
        return own
    if row.phase == "optimizer":
        return "optimizer"
    if row.time_ns and row.communication_ns >= _NEARLY_ALL * row.time_ns:
        return f"collectives of several layers ({row.phase})"
    if row.phase == "other":
        return "other code between calls"
    return f"outside layers ({row.phase})"


# --- What is followed by name: tracked names, named blocks and what functions make of a layer's events ---

_US_PER_MS = 1000
_LONG_MS = 1e7  # almost three hours: beyond it microseconds say nothing, and the digits would not fit
_FUNCTION_OF_LAYER = re.compile(r"(?:<lambda>|\w+)\[(.+)\]", re.DOTALL)


@dataclass(frozen=True)
class Followed:
    """One series: times in ms, or the values of a function in its own unit."""

    name: str
    values: tuple[float | None, ...]
    is_time: bool

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    def text(self, value: float) -> str:
        """Return `value` without its unit."""
        return f"{value:.3f}" if self.is_time and abs(value) < _LONG_MS else f"{value:.6g}"


def followed(analysis: Analysis) -> list[Followed]:
    """Return every series, as it is in the analysis."""
    layers = {row.layer for row in analysis.layers}
    series = []
    for name, values in analysis.series.items():
        match = _FUNCTION_OF_LAYER.fullmatch(name)
        is_time = match is None or match.group(1) not in layers
        if is_time:
            values = tuple(None if value is None else value / _US_PER_MS for value in values)
        series.append(Followed(name, values, is_time))
    return series


def followed_lines(analysis: Analysis, *, most: int, width: int, unicode: bool) -> list[str]:
    """Return `followed: vae 0.250 ms per step`: the mean of each in at most `most` lines; the last counts the others.

    What is a layer already has its row, and what has no value its warning.
    """
    layers, steps = {row.layer for row in analysis.layers}, len(step_numbers(analysis))
    series = [one for one in followed(analysis) if one.known and one.name not in layers]
    lines = []
    for i, one in enumerate(series[:most]):
        per = " per step" if len(one.values) == steps else " per entry" if len(one.values) > 1 else " in all"
        after = f" {one.text(fmean(one.known))}{' ms' if one.is_time else ''}{per}"
        if i == most - 1 and len(series) > most:
            after += f" ({len(series) - most} more in the log)"
        name = shorten(clean(one.name, unicode=unicode), width - cells("followed: " + after))
        lines.append(f"followed: {name}{after}")
    return lines
