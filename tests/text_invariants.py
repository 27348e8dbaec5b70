"""What holds between the texts of any result and its rows: tables, verdict and findings. See `invariants.py`.

A number in a text is right where it is a number of the tables, rounded as the text shows it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from profiler_wrapper.place.names import LAUNCHED_BEFORE, PHASES
from profiler_wrapper.reports.columns import COLUMNS
from profiler_wrapper.reports.describe import step_count
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis, LayerRow
from row_invariants import Broken, above, findings_of, name_of, step_spans, sums_of, unfolded


def text_is_json(result: Analysis) -> Broken:
    """The full table and the printed one show the numbers of result.json, as they round them."""
    yield from _full_table_is_json(result)
    yield from _printed_table_is_json(result)


def _full_table_is_json(result: Analysis) -> Broken:
    """Times and counts are of a step, work is of a step already, bytes stay."""
    heading, _, *lines = full_table(result).split("\n\nLayers, in model order", 1)[1].split("\n\n")[1].split("\n")
    rows = sorted(result.layers, key=lambda row: (not row.layer, row.order, row.layer, PHASES.index(row.phase)))
    if not result.layers:
        heading, lines = "", []
    ends, steps = _ends(heading), step_count(result)
    for row, line in zip(rows, lines, strict=False):
        for column in COLUMNS:
            title = (
                "communication calls" if (column.full, result.time_basis) == ("communication", "cpu") else column.full
            )
            if column.field and title in ends and column.kind in _FULL_SCALE and column.key != "causal_flops":
                value = getattr(row, column.field)
                is_sum = column.kind in ("time", "count") and "_per_step" not in column.field
                value = None if value is None else value / (steps if is_sum else 1)
                what = f"{title} of {name_of(row)} in the full table"
                yield from _shows(what, _cell(line, ends[title]), value, _FULL_SCALE[column.kind])


_FULL_SCALE = {"time": 1e6, "flops": 1e9, "bytes": float(1 << 20), "count": 1.0}


def _printed_table_is_json(result: Analysis) -> Broken:
    """Rows of one layer, or of several that are folded into one, and the total."""
    lines = console_table(result, rows=100_000, width=400).split("\n")
    at = next((at for at, line in enumerate(lines) if line.startswith("layer  ")), len(lines) - 2)
    ends, units = _ends(lines[at]), lines[at + 1]
    steps, above = step_count(result), {-1: ""}
    by_layer: dict[str, list[LayerRow]] = defaultdict(list)
    for row in result.layers:
        by_layer[row.layer].append(row)
    for line in lines[at + 2 :]:
        label = re.split(r"  +", line.strip())[0].split(" [")[0]
        depth = (len(line) - len(line.lstrip())) // 2
        if label == "TOTAL":
            yield from _shows("TOTAL", _cell(line, ends["total"]), result.time.total_ns / steps, 1e6)
            break
        parent = above.get(depth - 1, "")
        names = [name for prefix in unfolded(parent) for name in unfolded(f"{prefix}.{label}" if prefix else label)]
        if depth and not all(name in by_layer for name in names):  # below a root, names begin anew
            names = unfolded(label)
        above[depth] = label if names == unfolded(label) else f"{parent}.{label}"
        if not names or not all(name in by_layer for name in names):
            continue
        rows = [row for name in names for row in by_layer[name]]
        values = {phase: sum(row.time_ns for row in rows if row.phase == phase) for phase in PHASES}
        values["total"] = sum(row.time_ns for row in rows)
        for title, value in values.items():
            if title in ends:
                yield from _shows(f"{title} of {label} in the table", _cell(line, ends[title]), value / steps, 1e6)
        if "peak" in ends and _cell(units, ends["peak"]) == "MiB":
            peak = max((row.peak_bytes for row in rows if row.peak_bytes is not None), default=None)
            yield from _shows(f"peak of {label} in the table", _cell(line, ends["peak"]), peak, float(1 << 20))


def _ends(heading: str) -> dict[str, int]:
    """Where each column ends, by its title."""
    return {match[0]: match.end() for match in re.finditer(r"\S+(?: \S+)*", heading)}


def _cell(line: str, end: int) -> str:
    """What ends there, if anything does."""
    match = re.search(r"\S+$", line[:end])
    return match[0] if match and len(line) >= end else ""  # lines have no spaces at their ends


def _shows(what: str, cell: str, value: float | None, scale: float) -> Broken:
    """An empty cell is null or 0; one with a sign for "at least" is that."""
    cell = cell.removesuffix("-") if cell == "-" else cell
    if cell.startswith((">=", "≥")) or (not cell and not value):
        return
    if not _is_rounded(cell or "0", (value or 0) / scale):
        yield f"{what}: {cell!r}, wanted {(value or 0) / scale:.6g}"


def _is_rounded(shown: str, value: float) -> bool:
    """Whether a number is this one, to the digits that it has: `%.3f` as well as `%.4g`."""
    number, decimals = float(shown), len(shown.partition("e")[0].partition(".")[2])
    digit = 10.0 ** (-decimals if "e" not in shown else math.floor(math.log10(abs(number) or 1)) - decimals)
    return abs(number - value) <= 0.5001 * digit


_DURATION = re.compile(r"(?<!under )(?<![\w.])(\d+(?:\.\d+)?) (s|ms|µs|ns)\b")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) (B|KiB|MiB|GiB)\b")
_SHARE = re.compile(r"(?:(under|over|at least|at most) )?(?<![\w.+-])(\d+(?:\.\d+)?) %")
_UNITS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def _verdict(result: Analysis) -> str:
    return result.summary.get("verdict") or ""


def _texts(finding: Mapping[str, Any]) -> list[str]:
    return [finding["title"], *finding["evidence"]]


def every_share_says_of_what(result: Analysis) -> Broken:
    """Behind each % of the verdict and the findings stands what it is a share of."""
    texts = {"verdict": [_verdict(result)], **{one["id"]: _texts(one) for one in findings_of(result)}}
    for name, lines in texts.items():
        for line in lines:
            for match in _SHARE.finditer(line):
                if not line[match.end() :].startswith(" of "):
                    yield f"{name}: {line[max(0, match.start() - 30) : match.end() + 40]!r} does not say of what"


class _Numbers:
    """What the tables have to say in a text: times of a step, sizes, shares."""

    def __init__(self) -> None:
        self.times_ns: list[float] = []
        self.sizes: list[float] = []
        self.shares: list[float] = []

    def missing(self, text: str, *, wholes_ns: Sequence[float] = ()) -> Broken:
        """The numbers of a text that are none of these, nor the share of one of these times of a whole."""
        for values, pattern in ((self.times_ns, _DURATION), (self.sizes, _SIZE)):
            for number, unit in pattern.findall(text):
                if not any(_is_rounded(number, value / _UNITS[unit]) for value in values):
                    yield f"{number} {unit}"
        of_times = [time_ns / whole for whole in wholes_ns if whole for time_ns in self.times_ns]
        for match in _SHARE.finditer(text):
            if not any(_is_share(match, share) for share in (*self.shares, *of_times)):
                yield match[0]


def _is_share(match: re.Match[str], share: float) -> bool:
    bound, number = match[1], match[2]
    if bound in ("under", "at most"):
        return 100 * share <= float(number)
    if bound in ("over", "at least"):
        return 100 * share >= float(number)
    return _is_rounded(number, 100 * share)


def _step_ns(result: Analysis) -> float:
    """Wall time of a step: the mean."""
    spans = step_spans(result)
    return fmean(spans) if spans else float(result.time.span_ns)


def _steps(result: Analysis) -> int:
    return max(1, sum(row.step is not None for row in result.steps))


def _launched_ns(result: Analysis) -> float:
    """Time of all that the trace itself launched."""
    before = sum(row.time_ns for row in result.unattributed if row.reason == LAUNCHED_BEFORE)
    return result.time.total_ns - before


def _of_the_whole(result: Analysis) -> _Numbers:
    """What stands in the tables of steps, phases, classes, the overview and memory."""
    found, steps = _Numbers(), _steps(result)
    spans = step_spans(result) or [result.time.span_ns]
    sums: list[float] = [result.time.total_ns, _launched_ns(result), result.time.exposed_communication_ns or 0]
    sums += sums_of((row.phase, row.time_ns) for row in result.classes).values()
    sums += sums_of((row.class_name, row.time_ns) for row in result.classes).values()
    found.times_ns = [min(spans), max(spans), fmean(spans), *(one / steps for one in sums)]
    if result.overview is not None:
        rows = result.overview.steps
        for part in ("kernel", "communication", "memcpy", "memset", "runtime", "dataloader", "cpu", "other"):
            found.times_ns.append(sum(getattr(row, f"{part}_ns") for row in rows) / max(1, len(rows)))
        if result.overview.gaps_ns is not None:
            found.times_ns.append(result.overview.gaps_ns / max(1, len(rows)))
    memory: Mapping[str, Any] = result.memory
    peak: Mapping[str, Any] = memory.get("peak") or {}
    device = result.run.get("device_memory_bytes") or (result.overview and result.overview.device_memory_bytes)
    found.sizes = [
        peak.get("allocated_bytes"),
        peak.get("reserved_bytes"),
        device,
        *(memory.get("categories") or {}).values(),
    ]
    found.sizes += [change.get("saves_bytes") for change in memory.get("changes") or ()]
    found.sizes = [size for size in found.sizes if size is not None]
    return found


def _of_a_finding(result: Analysis, finding: Mapping[str, Any]) -> _Numbers:
    """What a finding says in numbers, for programs: other laws compare these with the tables."""
    found = _of_the_whole(result)
    told = {"share": finding["share"], "saves_at_most_us": finding["saves_at_most_us"], **finding["details"]}
    told["saves_at_most_bytes"] = finding["saves_at_most_bytes"]
    for key, value in told.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.times_ns += [1000 * value] if key.endswith("_us") else []
            found.sizes += [value] if "bytes" in key else []
            found.shares += [value] if 0 <= value <= 1 else []
    device_us, saves_us = finding["details"].get("device_us"), finding["saves_at_most_us"]
    if device_us is not None and saves_us is not None:
        found.times_ns.append(1000 * (saves_us - device_us))  # what it saves beside the time of its kernels
    return found


def numbers_of_findings_are_in_their_details(result: Analysis) -> Broken:
    """Each number with a unit in a finding is one of its `details`, its savings, or of a table of the whole."""
    for finding in findings_of(result):
        if not finding["details"]:
            continue  # they were left out for room
        known = _of_a_finding(result, finding)
        wholes = (_step_ns(result), _launched_ns(result) / _steps(result))
        behind = _behind(result, finding)
        known.times_ns += behind.times_ns
        known.sizes += behind.sizes
        for text in _texts(finding):
            if finding["id"] == "low-utilization" and (" while " in text or "the longest gap" in text):
                continue  # parts of the idle time, see `causes_of_idleness_are_the_idle_time`
            for number in known.missing(text, wholes_ns=wholes):
                yield f"{finding['id']}: {number} of {text!r} stands in no table"


def _behind(result: Analysis, finding: Mapping[str, Any]) -> _Numbers:
    """The rows of the list that the finding's own command shows, one by one and summed by their columns."""
    found, steps = _Numbers(), _steps(result)
    match = re.search(r"--select (\w+)", finding.get("next") or "")
    rows = getattr(result, match[1], None) if match else None
    layers = {name for folded in finding["layers"] for name in unfolded(folded)}
    of_layers = [row for row in result.layers if row.layer in layers]
    for one in [*(rows if isinstance(rows, tuple) else ()), *of_layers]:
        for field in one.__dataclass_fields__:
            value = getattr(one, field)
            if isinstance(value, (int, float)) and field.endswith("_ns"):
                found.times_ns.append(value if "_per_step" in field else value / steps)
            elif isinstance(value, (int, float)) and field.endswith("_bytes"):
                found.sizes.append(value)
    for key in (lambda one: one.layer, lambda one: re.sub(r"\d+", "*", one.layer)):
        found.times_ns += [value / steps for value in sums_of((key(one), one.time_ns) for one in of_layers).values()]
    if finding["id"] == "unaligned-dimensions":
        size, dtype = finding["details"]["size"], finding["details"]["dtype"]
        sized = [row for row in result.products if size in (row.m, row.n, row.k) and row.dtype == dtype]
        for rows_of_role in (sized, [row for row in sized if row.batch > 1], [row for row in sized if row.batch == 1]):
            found.times_ns.append(sum(row.time_per_step_ns for row in rows_of_role))
    if isinstance(rows, tuple) and rows and hasattr(rows[0], "phase"):
        for field in ("time_ns", "exposed_ns", "wait_ns", "self_time_ns", "time_per_step_ns"):
            if hasattr(rows[0], field):
                by = [("phase",), ("phase", "collective"), ("phase", "op"), ("backend",), ("op",), ()]
                for names in by:
                    if all(hasattr(rows[0], name) for name in names):
                        pairs = ((tuple(getattr(r, n) for n in names), getattr(r, field) or 0) for r in rows)
                        scale = 1 if "_per_step" in field else steps
                        found.times_ns += [value / scale for value in sums_of(pairs).values()]
    return found


# What the tables say of a finding's details: at most so much, or exactly so much where `is_exact`.
def _tables_behind(result: Analysis, finding: Mapping[str, Any]) -> Iterator[tuple[str, float, bool]]:
    steps = _steps(result)
    classes = sums_of((row.class_name, row.time_ns / 1000 / steps) for row in result.classes)
    phases = sums_of((row.phase, row.time_ns / 1000 / steps) for row in result.classes)
    overview, layers = result.overview, {name for folded in finding["layers"] for name in unfolded(folded)}
    whole_steps = max(1, len(overview.steps)) if overview is not None else 1
    gaps_us = overview.gaps_ns / 1000 / whole_steps if overview is not None and overview.gaps_ns is not None else None
    match finding["id"]:
        case "low-utilization" if gaps_us is not None:
            yield "idle_us", gaps_us, True
            yield "busy", 1 - gaps_us / (_step_ns(result) / 1000), True
        case "launch-bound" if gaps_us is not None:
            yield "waiting_us", gaps_us, False
        case "synchronisation":
            rows = [row for row in result.synchronisations if f" in {row.op} " in finding["title"]]
            yield "wait_us", sum(row.wait_ns for row in rows if row.phase == finding["phase"]) / 1000 / steps, False
        case "unpinned-copies":
            yield "device_us", classes.get("copy", 0), False
        case "many-small-kernels":
            yield "device_us", sum(classes.get(name, 0) for name in _FUSABLE), False
            yield "kernels", sum(row.count for row in result.kernels) / steps, False
        case "unfused-elementwise":
            yield "device_us", sum(classes.get(name, 0) for name in _FUSABLE), False
        case "communication-bound":
            yield "exposed_us", (result.time.exposed_communication_ns or 0) / 1000 / steps, False
            if result.time_basis == "device":
                yield "communication_us", classes.get("communication", 0), False
        case "tensor-cores-unused":
            yield "time_us", classes.get("gemm", 0) + classes.get("attention", 0), False
        case "no-tf32":
            yield "time_us", classes.get("gemm", 0), False
        case "slow-optimizer":
            yield "time_us", phases.get("optimizer", 0), False
        case "attention-fallback":
            own = [row.time_ns for row in result.attention if row.backend == finding["details"].get("backend")]
            kinds = [row.time_ns for row in result.layers if row.kind == "attention"]
            yield "time_us", (sum(own) or sum(kinds)) / 1000 / steps, False
        case "recompute-not-needed":
            of_phase = [row.self_time_ns for row in result.layers if row.phase == "recompute"]
            yield "recompute_us", sum(of_phase) / 1000 / steps, True
        case "odd-block" if "time_us" in finding["details"]:
            yield "time_us", sum(row.time_ns for row in result.layers if row.layer in layers) / 1000 / steps, True
        case "odd-block":
            kept = [row.retained_bytes for row in result.layers if row.layer in layers and row.retained_bytes]
            yield "retained_bytes", max(kept, default=0), True
        case "fragmentation":
            peak = result.memory.get("peak") or {}
            yield "allocated_bytes", peak.get("allocated_bytes") or 0, True
            yield "reserved_bytes", peak.get("reserved_bytes") or 0, True
        case _:
            pass


_FUSABLE = ("elementwise", "norm", "softmax", "reduction", "copy")


def details_of_findings_are_those_of_the_tables(result: Analysis) -> Broken:
    """What a finding is about is no more than its table has, and exactly that where the table has the same."""
    for finding in findings_of(result):
        for key, value, is_exact in _tables_behind(result, finding):
            told = finding["details"].get(key)
            if told is None:
                continue
            is_right = math.isclose(told, value, rel_tol=1e-3, abs_tol=1.0) if is_exact else told <= 1.001 * value + 1
            if not is_right:
                yield f"{finding['id']}: {key} {told}, the table has {value:.6g}"


def causes_of_idleness_are_the_idle_time(result: Analysis) -> Broken:
    """What the CPU does while the device is idle is no more than the idle time, and nearly all of it."""
    for finding in findings_of(result):
        if finding["id"] != "low-utilization" or not finding["details"]:
            continue
        idle_ns = 1000 * finding["details"]["idle_us"]
        parts = [line for line in finding["evidence"] if " while " in line]
        told = sum(float(number) * _UNITS[unit] for line in parts for number, unit in _DURATION.findall(line)[:1])
        if parts and len(finding["evidence"]) < 3 and not 0.79 * idle_ns <= told <= 1.01 * idle_ns:
            yield f"{told / 1e6:.4g} ms while the CPU did something, idle for {idle_ns / 1e6:.4g} ms"


def findings_are_whole(result: Analysis) -> Broken:
    """Each finding has evidence, a fix and a command; saves no more than a step, or than the peak; the most first."""
    step_us = _step_ns(result) / 1000
    peak: Mapping[str, Any] = result.memory.get("peak") or {}
    held = max((size for key in ("allocated_bytes", "reserved_bytes") if (size := peak.get(key))), default=None)
    ids = Counter((one["id"], one["layer"], one["phase"], one["title"]) for one in findings_of(result))
    yield from (f"{name} is there {count} times" for (name, *_), count in ids.items() if count > 1)
    for finding in findings_of(result):
        name = finding["id"]
        yield from (f"{name} has no {key}" for key in ("title", "evidence", "fix", "next") if not finding[key])
        yield from above(f"saved by {name}", finding["saves_at_most_us"], 1.001 * step_us + 0.1)
        yield from above(f"bytes saved by {name}", finding["saves_at_most_bytes"], held)
        if finding["saves_at_most_us"] is not None and finding["saves_at_most_us"] <= 0:
            yield f"{name} saves {finding['saves_at_most_us']} us"
    comparable = result.summary.get("comparable") or {}
    if "step_us" in comparable and not math.isclose(comparable["step_us"], step_us, rel_tol=1e-3, abs_tol=0.11):
        yield f"comparable.step_us {comparable['step_us']}, the steps take {step_us:.6g}"


def no_time_is_claimed_twice(result: Analysis) -> Broken:
    """Findings about the gaps of a step claim no more than its gaps together, or say of what they are a part."""
    overview = result.overview
    if overview is None or overview.gaps_ns is None:
        return
    gaps_us = overview.gaps_ns / 1000 / max(1, len(overview.steps))
    claims: list[tuple[str, float]] = []
    for finding in findings_of(result):
        details, saves = finding["details"], finding["saves_at_most_us"] or 0
        if "part of" in " ".join(_texts(finding)):
            continue
        if finding["id"] in ("low-utilization", "launch-bound", "dataloader-bound", "synchronisation"):
            claims.append((finding["id"], saves))
        elif finding["id"] == "many-small-kernels":
            claims.append((finding["id"], max(0.0, saves - details.get("device_us", saves))))
    if sum(us for _, us in claims) > 1.01 * gaps_us + 0.2:
        told = ", ".join(f"{name} {us / 1000:.4g} ms" for name, us in claims if us)
        yield f"gaps of {gaps_us / 1000:.4g} ms a step are claimed by {told}"


_LEAST_TO_GAIN = 0.03


def the_verdict_says_its_findings(result: Analysis) -> Broken:
    """Most to gain is the first finding, worth 3 % of a step or bytes; so is the first fix."""
    verdict, findings = _verdict(result), findings_of(result)
    if "Most to gain: " in verdict:
        first = findings[0]
        if first["title"].rstrip(".") not in verdict and not verdict.endswith("..."):
            yield f"most to gain is not the first finding, {first['title']!r}"
        share = (first["saves_at_most_us"] or 0) * 1000 / _step_ns(result)
        saves_time = first["saves_at_most_us"] is not None and not first["saves_at_most_bytes"]
        if share < _LEAST_TO_GAIN and saves_time:
            yield f"most to gain is {first['id']}, {100 * share:.2g} % of a step"
    if "First fix: " in verdict and findings[0]["fix"].rstrip(".") not in verdict and not verdict.endswith("..."):
        yield f"first fix is not that of the first finding, {findings[0]['fix']!r}"
    if "Nothing stands out" in verdict and findings:
        yield f"nothing stands out, beside {len(findings)} findings"


def the_verdict_is_that_of_the_tables(result: Analysis) -> Broken:
    """The idle share, the largest part and what has no layer are those of the rows; other numbers stand there too."""
    text = _verdict(result)
    for finding in findings_of(result)[:1]:
        for part in (finding["title"].rstrip("."), finding["fix"].rstrip(".")):
            text = text.replace(part, "")
    launched, spans = _launched_ns(result) or 1, step_spans(result) or [result.time.span_ns]
    total = result.time.total_ns or 1
    if found := re.search(rf"idle for ({_SHARE.pattern}) of a", text):
        idle = None if result.overview is None else result.overview.gaps_ns
        share = None if idle is None else idle / sum(spans)
        if share is None or not _is_share(_match(found[1]), share):
            yield f"idle for {found[1]}, the overview has {share}"
    if found := re.search(rf"(?:^|\. )([^.]?.*?) takes ({_SHARE.pattern}) of", text):
        name, share = max(_parts_of_the_model(result).items(), key=lambda one: one[1], default=("", 0))
        if not _is_share(_match(found[2]), share / total):
            yield f"{found[1]} takes {found[2]}, the rows have {100 * share / total:.4g} % for {name}"
        part = name.rpartition(" ")[2][:40]
        if part not in f"{found[1]} {found[1].lower()}" or (not part and "own code" not in found[1]):
            yield f"{found[1]!r} takes most, the rows have {name!r}"
    if found := re.search(rf"No layer is known for ({_SHARE.pattern}) of", text):
        share = (result.time.unattributed_ns - (result.time.total_ns - launched)) / total
        if not _is_share(_match(found[1]), share):
            yield f"no layer for {found[1]}, the rows have {100 * share:.4g} %"
    if found := re.search(rf"; ([\w ]+) takes? ({_SHARE.pattern}) of it in all", text):
        of_class = sums_of((row.class_name, row.time_ns) for row in result.classes)
        if not _is_share(_match(found[2]), max(of_class.values()) / total):
            yield f"{found[1]}: {found[2]}, the classes have {max(of_class.values()) / total:.4g}"
    known = _of_the_whole(result)
    known.shares = [share / total for share in _parts_of_the_model(result).values()]
    known.times_ns += [row.time_ns / _steps(result) for row in result.unattributed]
    known.times_ns.append((result.time.unattributed_ns - (result.time.total_ns - launched)) / _steps(result))
    wholes = (_step_ns(result), launched / _steps(result), result.time.total_ns / _steps(result))
    yield from (f"{number} stands in no table" for number in known.missing(text, wholes_ns=wholes))


def _match(text: str) -> re.Match[str]:
    found = _SHARE.search(text)
    assert found is not None
    return found


def _parts_of_the_model(result: Analysis) -> dict[str, int]:
    """Self time of each part: what like blocks have at one place, a layer outside of blocks, what has no layer."""
    pairs = []
    for row in result.layers:
        if row.block:
            inside = row.layer.removeprefix(row.block).removeprefix(".")  # names below a root do not begin with its own
            name = f"{re.sub('[0-9]+(?!.*[0-9])', '*', row.block)} {inside.partition('.')[0]}"
        else:
            name = row.layer or (
                "optimizer"
                if row.phase == "optimizer"
                else "communication"
                if 2 * row.communication_ns > row.self_time_ns
                else "outside"
            )
        pairs.append((name, row.self_time_ns))
    return sums_of(pairs)


def _busy_share(result: Analysis) -> float:
    """Percent of the steps, of which findings say how long the device is idle."""
    overview = result.overview
    wall_ns = sum(step.span_ns for step in overview.steps) if overview is not None else 0
    return 100 * (1 - (overview.gaps_ns or 0) / wall_ns) if overview is not None and wall_ns else 0.0


def titles_say_the_total(result: Analysis) -> Broken:
    """The line above the table has the total, the step and the busy share of the tables."""
    text = " ".join(console_table(result, rows=100_000, width=400).split("\n")[:2])
    steps, time = step_count(result), result.time
    wanted: dict[str, list[float]] = {
        r"(?:wall time of ops|device time) ([\d.]+) ms": [time.total_ns / steps / 1e6],
        r"step takes ([\d.]+) ms": [
            _step_ns(result) / 1e6,
            ((result.utilization and result.utilization.step_time_ns) or 0) / 1e6,
        ],
        r"device busy ([\d.]+) % of the trace": [100 * (time.busy_ns or 0) / time.span_ns if time.span_ns else 0],
        r"device busy ([\d.]+) %(?! of)": [_busy_share(result)],
        r"exposed communication ([\d.]+) ms": [(time.exposed_communication_ns or 0) / steps / 1e6],
    }
    for pattern, values in wanted.items():
        if (found := re.search(pattern, text)) and not any(_is_rounded(found[1], value) for value in values):
            yield f"{found[0]!r} above the table, wanted {values[0]:.6g}"
