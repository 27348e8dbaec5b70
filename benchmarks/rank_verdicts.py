"""How often `ranks` names what slows a job, and what a step would take without it: simulated jobs whose truth is known.

Each job follows from its seed: its layout, its noise, the causes in it, how it is recorded. Its truth is the same job
simulated without the cause. A verdict counts where it is the cause that costs most.

    python benchmarks/rank_verdicts.py [--jobs 1000] [--seeds 0-999] [--kind KIND] [--layout LAYOUT] [--ranks 4096]
        [--causes 1] [--way csv] [--show-wrong] [--processes 2]
    python benchmarks/rank_verdicts.py --seed 17 --write DIR [the same options]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

sys.path.insert(0, str(measuring.ROOT / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rank_causes import KINDS, Job, Planted, Truth, make_job
from rank_job_files import WAYS, make_recording, write
from rank_layouts import LAYOUTS

LEAST, LARGE = 0.02, 0.05  # of a step: a cause that costs less need not be named; one that costs more is large
NEARLY_ALL = 0.87  # of a cause: what gains so much may be named for it; 90 % are asked, and noise is a part of both
OUTCOMES = ("right", "cannot tell", "nothing", "wrong", "error")


# --- what the product says ---


@dataclass(frozen=True, kw_only=True)
class Named:
    """A verdict in the words of `Planted`."""

    kind: str  # one of KINDS; "nothing": no straggler
    ranks: frozenset[int] = frozenset()
    host: str | None = None
    stage: int | None = None
    layer: str | None = None
    phase: str | None = None
    group: str | None = None
    gain_ms: float | None = None
    unsure: bool = False
    sentence: str = ""


_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "data loading": "data"}
_VERDICTS = {"none": "nothing", "imbalance": "uneven work", "checkpoint": "save", "unrecorded": "unrecorded rank"}


def named(report: Mapping[str, Any]) -> Named:
    """What a report as JSON says first. The one place that knows the product's keys."""
    verdict, cause = report["verdict"], report["cause"]
    ranks, layer = report.get("named_ranks"), report["layer"]
    if ranks is None:
        ranks = [] if report["rank"] is None else [report["rank"]]
    phase = report.get("phase") or _PHASES.get(cause)
    kind = _VERDICTS.get(verdict, verdict)
    if layer is not None:
        kind = "layer of a rank" if verdict == "rank" else "layer"
    elif cause == "checkpoint":
        kind = "save"
    elif verdict == "data" and ranks:
        kind = "data of a rank"
    elif verdict == "rank" and phase is not None:
        kind = "phase"
    words = report["sentence"].lower()
    return Named(
        kind=kind,
        ranks=frozenset(ranks),
        host=report.get("host"),
        stage=report["stage"],
        layer=layer,
        phase=phase,
        group=report.get("group"),
        gain_ms=report["lost_ms_per_step"],
        unsure=report["confidence"] == "low" or "most likely" in words or "cannot tell" in words,
        sentence=report["sentence"],
    )


# --- whether it is so ---


def is_named(planted: Planted, said: Named, job: Job, *, has_tokens: bool) -> bool:
    """Whether a verdict is that cause, as narrow as it is."""
    recorded = set(range(job.shape.ranks)) - job.unrecorded
    ranks = set(planted.ranks) & recorded
    # All that they compute, or what alone has nearly all of it.
    nearly_all = planted.phases_ms.get(said.phase or "", 0.0) >= NEARLY_ALL * planted.gain_ms
    whole = said.layer is None and (said.phase is None or nearly_all)
    same = bool(ranks) and _ranks_of(said, job) == ranks
    if planted.kind in ("phase", "data of a rank"):
        return same and said.layer is None and (said.phase == planted.phase or said.kind == "stage")
    if planted.kind in ("rank", "host", "tied", "stage"):
        return whole and same
    if planted.kind == "half":
        return whole and len(_ranks_of(said, job) ^ ranks) <= 0.1 * len(ranks)
    if planted.kind in ("layer of a rank", "layer"):
        return said.layer == planted.layer and said.ranks == ranks
    if planted.kind in ("link", "group"):
        return said.kind in ("link", "group") and (said.group == planted.group or same)
    if planted.kind == "uneven work":
        return said.kind == planted.kind or (not has_tokens and whole and same)
    if planted.kind in ("save", "background save"):
        return said.kind in ("save", "background save") and said.ranks in (frozenset(), ranks)
    return said.kind == planted.kind and (planted.kind == "unrecorded rank" or said.ranks == ranks)


def _ranks_of(said: Named, job: Job) -> set[int]:
    """All ranks that a verdict names."""
    if said.ranks:
        return set(said.ranks)
    if said.host is not None:
        return set(job.shape.hosts()[int(said.host.rpartition("-")[2])])
    if said.kind == "stage" and said.stage is not None:
        return set(job.program.roles[said.stage].tolist())
    return set()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A job, what was said of it and whether it is so."""

    seed: int
    what: str  # its layout, size and files
    truth: Truth
    said: Named
    outcome: str  # one of OUTCOMES
    error_ms: float | None  # of what a step would be shorter, where it is right
    simulated_s: float
    judged_s: float

    @property
    def share(self) -> float:
        """What the largest cause costs, of a step."""
        return self.truth.largest.gain_ms / self.truth.step_ms if self.truth.largest else 0.0

    @property
    def kind(self) -> str:
        return self.truth.largest.kind if self.truth.largest else "none"

    @property
    def is_healthy_named(self) -> bool:
        """Surely named is a rank that nothing is planted on."""
        planted = {rank for cause in self.truth.causes for rank in cause.ranks}
        return self.outcome == "wrong" and not self.said.ranks <= planted

    @property
    def gain_is_right(self) -> bool:
        gain = self.truth.largest.gain_ms if self.truth.largest else 0.0
        return self.error_ms is not None and abs(self.error_ms) <= max(1.0, 0.05 * gain)


def judge(seed: int, asked: Mapping[str, Any], way: str | None) -> Judged:
    """The job of a seed, written, read by the product in this process, and compared with its truth."""
    from profiler_wrapper.ranks.load import load_ranks

    started = time.perf_counter()
    job = make_job(seed, **asked)
    truth, recording = job.truth, make_recording(job, seed, way)
    with tempfile.TemporaryDirectory() as folder:
        path, is_table = write(job, recording, Path(folder))
        written = time.perf_counter()
        try:
            said = named(load_ranks(path, spans=path if is_table else None).to_dict())
        except Exception:
            said = Named(kind="error", sentence=traceback.format_exc().strip().splitlines()[-1])
    judged_s = time.perf_counter() - written
    largest = truth.largest.gain_ms if truth.largest else 0.0
    near = [one for one in truth.causes if one.gain_ms >= largest - max(1.0, 0.05 * largest)]
    found = [one for one in near if is_named(one, said, job, has_tokens=recording.has_tokens)]
    sure = not said.unsure or any(one.kind == "unrecorded rank" for one in found)
    outcome = said.kind if said.kind in ("error", "nothing") else "right" if found else "wrong"
    if outcome != "error" and not sure:
        outcome = "cannot tell"
    shape = job.shape
    return Judged(
        seed=seed,
        what=f"{shape.layout}, {shape.ranks} ranks, {job.steps} steps, {recording.way}",
        truth=truth,
        said=said,
        outcome=outcome,
        error_ms=said.gain_ms - found[0].gain_ms if found and said.gain_ms is not None else None,
        simulated_s=written - started,
        judged_s=judged_s,
    )


# --- tables ---


def tell(jobs: Sequence[Judged]) -> None:
    """Right and wrong by kind; alarms; what was taken for what; time."""
    print(f"\n{'largest cause':18}{'jobs':>6}", *(f"{name:>12}" for name in OUTCOMES), f"{'gain right':>12}", sep="")
    for title, least, most in ((f"{LARGE:.0%} of a step or more", LARGE, 9.0), (f"{LEAST:.0%} to", LEAST, LARGE)):
        of_size = [each for each in jobs if each.truth.causes and least <= each.share < most]
        print(f"--- it costs {title}" + ("" if most > 1 else f" {most:.0%}"))
        for kind in KINDS:
            _line(kind, [each for each in of_size if each.kind == kind])
        _line("all", of_size)
    quiet = [each for each in jobs if not each.truth.causes]
    small = [each for each in jobs if each.truth.causes and each.share < LEAST]
    alarms = [each for each in quiet if each.outcome == "wrong"]
    print(f"\nno cause: {len(quiet)} jobs, {len(alarms)} alarms: {_seeds(alarms)}")
    print(f"below {LEAST:.0%}: {len(small)} jobs, {sum(each.outcome == 'wrong' for each in small)} with a wrong name")
    healthy = [each for each in jobs if each.is_healthy_named]
    print(f"a healthy rank named: {len(healthy)} of {len(jobs)} jobs: {_seeds(healthy)}")
    confused = Counter(
        (each.kind, _short(each.said))
        for each in jobs
        if each.truth.causes and each.share >= LEAST and each.outcome not in ("right", "cannot tell")
    )
    print("\ntaken for")
    for (kind, said), times in confused.most_common(40):
        print(f"{times:6}  {kind} -> {said}")
    simulated, judged = (sum(getattr(each, name) for each in jobs) for name in ("simulated_s", "judged_s"))
    print(f"\n{len(jobs)} jobs: {simulated:.0f} s of the simulator, {judged:.0f} s of the product")


def _line(kind: str, jobs: Sequence[Judged]) -> None:
    if not jobs:
        return
    counts = Counter(each.outcome for each in jobs)
    right = [each for each in jobs if each.outcome == "right" and each.error_ms is not None]
    gain = f"{sum(each.gain_is_right for each in right)} of {len(right)}"
    print(f"{kind:18}{len(jobs):6}", *(f"{counts[name] or '-':>12}" for name in OUTCOMES), f"{gain:>12}", sep="")


def _short(said: Named) -> str:
    return said.sentence if said.kind == "error" else f"{said.kind}{'' if said.phase is None else ' ' + said.phase}"


def _seeds(jobs: Iterable[Judged]) -> str:
    return ", ".join(str(each.seed) for each in jobs) or "none"


def in_words(planted: Planted, step_ms: float) -> str:
    """One cause in a line."""
    about = [f"{name} {getattr(planted, name)}" for name in ("host", "stage", "layer", "phase", "group")]
    about = [text for text in about if not text.endswith(" None")]
    if planted.ranks:
        about.append(f"ranks {','.join(map(str, planted.ranks[:8]))}{'...' if len(planted.ranks) > 8 else ''}")
    if planted.steps:
        about.append(f"in {len(planted.steps)} steps, {planted.steps[0]} to {planted.steps[-1]}")
    gain = f"{planted.gain_ms:.1f} ms, {planted.gain_ms / step_ms:.1%} of a step"
    return f"{planted.kind} ({'; '.join(about)}): {gain}"


def show(one: Judged, options: str) -> None:
    """Truth and verdict of a job, and how to see it."""
    truth = " + ".join(
        in_words(each, one.truth.step_ms) for each in sorted(one.truth.causes, key=lambda each: -each.gain_ms)
    )
    gain = "" if one.error_ms is None else f", off by {one.error_ms:+.1f} ms"
    print(f"{one.seed}: {one.outcome}{gain}; {one.what}, {one.truth.step_ms:.1f} ms; {truth or 'no cause'}")
    print(f"    said: {one.said.sentence}\n    python {sys.argv[0]} --seed {one.seed} --write DIR{options}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, help="so many, from the first seed on")
    parser.add_argument("--seeds", default="0-999", help="A-B")
    parser.add_argument("--kind", choices=KINDS, help="of the first cause")
    parser.add_argument("--layout", choices=LAYOUTS)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--causes", type=int, choices=range(4))
    parser.add_argument("--way", choices=WAYS, help="of recording")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true")
    parser.add_argument("--seed", type=int, help="of one job")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the job's files, and print its truth")
    chosen = parser.parse_args()
    asked = {name: getattr(chosen, name) for name in ("kind", "layout", "ranks", "causes")}
    options = "".join(
        f" --{name} {f'{value!r}' if ' ' in str(value) else value}"
        for name, value in {**asked, "way": chosen.way}.items()
        if value is not None
    )
    if chosen.seed is not None:
        if chosen.write is not None:
            job = make_job(chosen.seed, **asked)
            recording = make_recording(job, chosen.seed, chosen.way)
            path, is_table = write(job, recording, chosen.write)
            missing = sorted(recording.missing)
            cut = {rank: int(steps) for rank, steps in enumerate(recording.steps) if steps < job.steps}
            print(f"{job.shape}\nmissing ranks {missing}, cut after steps {cut}, torn {recording.torn}")
            print(f"profiler-wrapper ranks {'--spans ' if is_table else ''}{path}")
        show(judge(chosen.seed, asked, chosen.way), options)
        return
    first, _, last = chosen.seeds.partition("-")
    seeds = range(int(first), int(first) + chosen.jobs if chosen.jobs else int(last or first) + 1)
    print(f"seeds {seeds[0]} to {seeds[-1]}{options}; {measuring.machine()}")
    began, jobs = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        tasks = ((seed, asked, chosen.way) for seed in seeds)
        for one in pool.imap_unordered(_judge, tasks):
            jobs.append(one)
            bad = one.outcome not in ("right", "nothing") if one.share < LEAST else not one.gain_is_right
            if chosen.show_wrong and bad:
                show(one, options)
    tell(sorted(jobs, key=lambda one: one.seed))
    print(f"{time.perf_counter() - began:.0f} s in all")


def _judge(task: tuple[int, Mapping[str, Any], str | None]) -> Judged:
    return judge(*task)


if __name__ == "__main__":
    main()
