"""All rules asked: order, the limit of ten, like layers as one, rules that fail, how long a summary gets."""

from __future__ import annotations

import ast
import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advice_facts import facts_of
from advice_sources import finding_calls
from profiler_wrapper import analyse
from profiler_wrapper.advice.advise import (
    LONGEST,
    MOST_FINDINGS,
    RULES,
    advise,
    headline,
    summary_of,
    verdict,
)
from profiler_wrapper.advice.facts import RUN, Facts
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.reports.result_json import selected, to_dict
from profiler_wrapper.tables.model import Analysis, Finding, Summary
from profiler_wrapper.trace.recording import Category
from recordings import Trace
from sample_views import full_analysis

STEP_NS = 1_000_000


def trace() -> Trace:
    """Two steps of 1 ms; in each, two blocks of 200 us on the device and a head of 100 us."""
    made = Trace()
    for step in range(2):
        at = step * STEP_NS
        made.annotation(f"ProfilerStep#{step + 2}", at, at + STEP_NS)
        made.mark(".", at, at + 500_000, class_name="Net")
        for block in range(2):
            begin = at + block * 200_000
            made.mark(f"layers.{block}", begin, begin + 200_000, kind="block", class_name="Block")
            made.mark(f"layers.{block}.mlp", begin, begin + 199_000, kind="mlp", class_name="MLP")
            made.op("aten::mm", begin + 1000, begin + 2000)
            made.kernel("gemm", begin + 5000, begin + 205_000, launched=begin + 1500)
        made.mark("head", at + 400_000, at + 500_000, kind="head", class_name="Linear")
        made.op("aten::mm", at + 401_000, at + 402_000)
        made.kernel("gemm", at + 410_000, at + 510_000, launched=at + 401_500)
    return made


def facts() -> Facts:
    return facts_of(trace().recording())


def finding(**told: Any) -> Finding:
    base = Finding(
        id="rule",
        title="it is so",
        layer=None,
        phase=None,
        share=0.5,
        saves_at_most_us=100.0,
        saves_at_most_bytes=None,
        evidence=("a number",),
        confidence="high",
        fix="do it",
    )
    return replace(base, **told)


@pytest.mark.parametrize(("saves_us", "leads"), [(29.9, False), (30.0, True)])
def test_what_saves_under_three_hundredths_of_a_step_is_nothing_to_begin_with(saves_us: float, leads: bool) -> None:
    """It stays in the list."""
    (made,) = told(finding(saves_at_most_us=saves_us))
    sentence = verdict(facts(), [made])
    assert sentence.endswith("Most to gain: it is so. First fix: do it." if leads else "Nothing stands out.")


def told(*made: Finding) -> tuple[Finding, ...]:
    return advise(facts(), [], [lambda _: made])


def test_facts_of_a_step() -> None:
    seen = facts()
    assert (seen.steps, seen.has_steps, seen.on_device) == (2, True, True)
    assert seen.step_ns == STEP_NS
    assert seen.work_ns == 500_000
    assert seen.idle_ns == 500_000
    assert seen.blocks == ("layers.0", "layers.1")
    assert seen.share_of_step(250_000) == 0.25
    found = seen.finding("", "", fix="", saves_ns=5_000_000, rows=("overview",), details={})
    assert found.saves_at_most_us == 1000  # a step


def test_the_largest_saving_comes_first_and_memory_counts_half() -> None:
    seen = replace(facts(), analysis=replace(facts().analysis, memory={"peak": {"allocated_bytes": 1000}}))
    unknown = finding(id="unknown", saves_at_most_us=None, share=0.9)
    made = [
        unknown,
        finding(id="tenth", saves_at_most_us=100.0),
        finding(
            id="memory", saves_at_most_us=None, saves_at_most_bytes=500
        ),  # half of the peak: as a quarter of a step
        finding(id="fifth", saves_at_most_us=200.0),
        finding(id="third", saves_at_most_us=333.0),
    ]
    assert [one.id for one in advise(seen, [], [lambda _: made])] == ["third", "memory", "fifth", "tenth", "unknown"]


def test_memory_counts_less_where_it_is_free() -> None:
    memory = {"peak": {"allocated_bytes": 500, "reserved_bytes": 1000}}
    made = [finding(id="memory", saves_at_most_us=None, saves_at_most_bytes=500), finding(id="time")]
    for device, first in ((1200, "memory"), (2000, "time")):  # a quarter of a step; a tenth, and less sure
        made[0] = replace(made[0], confidence="low")
        analysis = replace(facts().analysis, memory=memory, run={"device_memory_bytes": device})
        seen = replace(facts(), analysis=analysis)
        assert advise(seen, [], [lambda _: made])[0].id == first


def test_what_saves_less_than_a_hundredth_is_not_told() -> None:
    assert [one.id for one in told(finding(id="a", saves_at_most_us=9.9), finding(id="b", saves_at_most_us=10.0))] == [
        "b"
    ]


def test_there_are_at_most_ten() -> None:
    made = [finding(id=f"rule-{i}", saves_at_most_us=100.0 + i) for i in range(14)]
    assert [one.id for one in told(*made)] == [f"rule-{i}" for i in range(13, 3, -1)]
    assert MOST_FINDINGS == 10


def test_like_layers_are_one_finding() -> None:
    made = [
        finding(layer=f"layers.{i}.attn", layers=(f"layers.{i}.attn",), saves_at_most_us=30.0 + i, share=0.1)
        for i in range(3)
    ]
    (one,) = told(*made)
    assert one.layer == "layers.{0..2}.attn"
    assert one.layers == ("layers.0.attn", "layers.1.attn", "layers.2.attn")
    assert one.saves_at_most_us == 93.0
    assert one.share == pytest.approx(0.3)
    assert "2 more like it" in one.title


@pytest.mark.parametrize(
    "different", [{"id": "other"}, {"phase": "backward"}, {"fix": "else"}, {"layer": "layers.1.mlp"}]
)
def test_unlike_ones_stay_apart(different: dict[str, Any]) -> None:
    made = finding(layer="layers.0.attn"), finding(**({"layer": "layers.1.attn"} | different))
    assert len(told(*made)) == 2


def test_a_rule_that_fails_is_a_note() -> None:
    def broken_rule(seen: Facts) -> Iterator[Finding]:
        yield finding(id="before")
        raise ZeroDivisionError("nothing to divide by")

    seen = facts()
    notes: list[str] = []
    summary = summary_of(seen.analysis, seen.found, notes, rules=[broken_rule, lambda _: [finding(id="other")]])
    assert [one["id"] for one in summary["findings"]] == ["other"]
    assert notes == [
        "the advice on broken rule is not available, because that failed: ZeroDivisionError: nothing to divide by"
    ]


def test_the_summary_is_json_and_says_what_was_found() -> None:
    seen = facts()
    notes: list[str] = []
    rule = [finding(layers=("layers.0", "layers.1"))]
    summary = summary_of(seen.analysis, seen.found, notes, rules=[lambda _: rule])
    assert notes == []
    assert json.loads(json.dumps(summary)) == summary
    assert summary["findings"][0]["layers"] == ["layers.{0,1}"]
    assert summary["verdict"].endswith(" Most to gain: it is so. First fix: do it.")


def test_a_summary_stays_short_whatever_is_in_it() -> None:
    long = "x" * 100_000
    made = [
        finding(
            id=f"rule-{i}",
            title=long,
            layer=f"layers.{i}.{long}",
            layers=tuple(f"{long}.{k}.{k * k}" for k in range(9)),
            evidence=(long,) * 9,
            fix=long,
            source=long + ":12",
            details={"text": long, "number": 1 / 3},
        )
        for i in range(12)
    ]
    seen = facts()
    summary = summary_of(seen.analysis, seen.found, [], rules=[lambda _: made])
    assert len(json.dumps(summary)) <= LONGEST
    assert len(summary["findings"]) >= 2
    assert all(one["source"] is None or one["source"].endswith(":12") for one in summary["findings"])
    assert all(len(one["evidence"]) >= 2 for one in summary["findings"])


def test_every_rule_is_asked_once() -> None:
    assert len(RULES) == len(set(RULES)) >= 12


def test_every_rule_says_what_shows_its_rows() -> None:
    """`rows` of each call that makes a finding, as the rules' sources give it."""
    data = to_dict(full_analysis())
    calls = list(finding_calls())
    assert len(calls) > 20
    for module, call in calls:
        (given,) = (ast.unparse(one.value) for one in call.keywords if one.arg == "rows")
        shown = eval(given, vars(module) | {"block": SimpleNamespace(name="a layer's")})
        made = facts().finding("", "", fix="", rows=shown, details={})
        program, analyze, run, *rest = shlex.split(made.next or "")
        assert (program, analyze, run) == ("profiler-wrapper", "analyze", RUN)
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        assert options.keys() - {"--where"} == {"--format", "--select", "--top"}
        where = [options["--where"]] if "--where" in options else []
        selected(data, select=options["--select"].split(","), where=where, top=int(options["--top"]))
        key = where[0].partition("=")[0] if where else ""
        rows = data[options["--select"].partition(".")[0]]
        assert not where or key in rows[0], f"{ast.unparse(call.args[0])}: rows have no {key}"


def test_a_finding_that_names_no_rows_is_shown_by_where_the_time_goes() -> None:
    seen = facts()
    summary = summary_of(seen.analysis, seen.found, [], rules=[lambda _: [finding(id="of others")]])
    assert summary["findings"][0]["next"].endswith("--select overview --top 5")


# --- the verdict ---------------------------------------------------------------------------------


def test_the_verdict_names_the_largest_part() -> None:
    largest = "The 2 blocks' mlp takes 80 % of the device time; a step takes 1.00 ms."
    assert verdict(facts(), []) == f"{largest} Nothing stands out."
    assert verdict(facts(), [finding(fix="wait less.")]) == f"{largest} Most to gain: it is so. First fix: wait less."


def test_the_headline_is_the_share_of_these_layers() -> None:
    seen = facts()
    assert headline(seen) == {
        "text": "The 2 blocks' mlp takes 80 % of the device time.",
        "about": "layers",
        "layers": ["layers.{0,1}.mlp"],
    }
    spent = sum(row.time_ns for row in seen.analysis.layers if row.layer.endswith(".mlp"))
    assert round(100 * spent / seen.analysis.time.total_ns) == 80


def test_the_verdict_of_an_idle_device_begins_with_that() -> None:
    made = trace().annotation("ProfilerStep#4", 2 * STEP_NS, 4 * STEP_NS)
    made.annotation("ProfilerStep#5", 4 * STEP_NS, 6 * STEP_NS)
    seen = facts_of(made.recording())
    assert verdict(seen, []).startswith("The device is idle for 83 % of a step of ")
    assert headline(seen) == {
        "text": "The device is idle for 83 % of a step of 1.50 ms.",
        "about": "idle",
        "layers": [],
    }


def test_the_verdict_without_steps() -> None:
    made = Trace().op("aten::mm", 0, 1000).kernel("gemm", 2000, 9000, launched=500)
    assert verdict(facts_of(made.recording()), []) == (
        "No layer is known for 100 % of the device time (a trace without layers); matrix products take 100 % of it in "
        "all; a trace takes 9.00 µs. Nothing stands out."
    )


def test_the_verdict_of_a_torn_recording_says_so() -> None:
    seen = facts_of(trace().recording(complete=False))
    assert verdict(seen, []).startswith("The recording is incomplete. The 2 blocks' mlp takes 80 % of ")


def test_the_verdict_of_what_has_no_layer_says_so_first() -> None:
    made = trace().kernel("elementwise", 5000, 905_000, correlation=10**6, stream=9)
    seen = facts_of(made.recording())
    assert "No layer is known for 47 % of " in verdict(seen, [])


def test_a_part_that_is_a_number_says_what_it_is() -> None:
    made = Trace().annotation("ProfilerStep#1", 0, 1000).mark("0", 0, 900, kind="block").mark("0.1", 10, 890)
    made.mark("1", 900, 990, kind="block").mark("1.1", 910, 980).op("aten::mm", 20, 880).op("aten::mm", 920, 970)
    assert verdict(facts_of(made.recording()), []).startswith("The 2 blocks' child 1 takes ")


@pytest.mark.parametrize(("name", "told"), [("1", "Layer 1"), ("0.1", "Layer 0.1"), ("head.1", "head.1")])
def test_a_layer_that_is_a_number_is_told_as_a_layer(name: str, told: str) -> None:
    made = Trace().annotation("ProfilerStep#1", 0, 1000).mark(name, 0, 900).op("aten::mm", 20, 880)
    assert verdict(facts_of(made.recording()), []).startswith(f"{told} takes ")


def test_of_steps_of_unlike_length_the_range_is_told_too() -> None:
    made = trace()
    end = 5 * STEP_NS
    made.annotation("ProfilerStep#4", 2 * STEP_NS, end)
    made.mark("head", 2 * STEP_NS, end, kind="head", class_name="Linear")
    made.op("aten::mm", 2 * STEP_NS + 1000, 2 * STEP_NS + 2000)
    made.kernel("gemm", 2 * STEP_NS + 5000, 2 * STEP_NS + 105_000, launched=2 * STEP_NS + 1500)
    assert verdict(facts_of(made.recording()), []) == (
        "The device is idle for 78 % of a step of 1.67 ms (1.00 ms to 3.00 ms). "
        "The 2 blocks' mlp takes 73 % of the device time. Nothing stands out."
    )


def test_what_was_launched_before_the_trace_is_of_no_step_but_of_the_table() -> None:
    """The headline's share is that of the layer table; findings go by what a step launched."""
    made = trace().kernel("elementwise", -900_000, -5000, correlation=0)
    seen = facts_of(made.recording())
    assert seen.analysis.time.unattributed_ns == 895_000
    assert seen.work_ns == facts().work_ns
    assert verdict(seen, []).startswith("The 2 blocks' mlp takes 42 % of the device time; ")  # 800 of 1,895 us
    found = seen.finding("", "", fix="", share=seen.of_work(250_000), rows=("overview",), details={})
    assert found.share_of == "the device time that a step launched"


def cpu_training(*ops: str) -> Trace:
    """A head of 100 ns below the root, and ops of 300 ns each in the root itself."""
    made = Trace().annotation("ProfilerStep#1", 0, 2000).mark(".", 0, 1900, class_name="Net")
    made.mark("head", 100, 250, class_name="Linear").op("aten::mm", 120, 220)
    for i, op in enumerate(ops):
        made.op(op, 300 + 400 * i, 600 + 400 * i)
    return made


def test_a_layer_with_layers_below_is_told_by_its_own_code() -> None:
    assert verdict(facts_of(cpu_training("aten::add").recording()), []).startswith(
        "Net's own code (outside its layers) takes "
    )
    assert verdict(facts_of(cpu_training("aten::add", "aten::cross_entropy_loss").recording()), []).startswith(
        "Net's own code (outside its layers; the loss) takes "
    )


def test_the_verdict_on_a_cpu() -> None:
    made = Trace().annotation("ProfilerStep#1", 0, 1000).mark(".", 0, 900, class_name="Net").op("aten::mm", 100, 800)
    made.op("Optimizer.step#SGD.step", 900, 910)
    assert verdict(facts_of(made.recording()), []) == (
        "Net takes 99 % of the wall time of ops; a step takes 1.00 µs. Nothing stands out."
    )


# --- whatever is recorded ------------------------------------------------------------------------

_TIMES = st.tuples(st.integers(0, 3_000_000), st.integers(0, 1_500_000))
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "loader", "mark", "op", "kernel", "nccl", "copy", "node", "region", "memory", "gloo"]),
        _TIMES,
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=25,
)


def made_of(events: list[tuple[str, tuple[int, int], int]]) -> Trace:
    made = Trace().op("aten::mm", 0, 10)
    steps = sorted(begin for kind, (begin, _), _ in events if kind == "step")
    for number, (begin, end) in enumerate(itertools.pairwise(steps)):
        made.annotation(f"ProfilerStep#{number}", begin, end)
    for number, (kind, (begin, length), choice) in enumerate(events):
        end = begin + length
        if kind == "loader":
            made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, end)
        elif kind == "mark":
            made.mark(f"layers.{choice}", begin, end, kind="block", class_name="Block", thread=10 + number)
        elif kind == "region":
            made.op("Torch-Compiled Region: 0/0", begin, end)
        elif kind == "op":
            made.op(("aten::mm", "aten::item", "aten::add")[choice], begin, end, sequence=choice)
        elif kind == "node":
            made.node("MmBackward0", begin, end, number=choice)
        elif kind == "memory":
            made.memory(begin, 1 + length, address=number, device=choice - 1)
        elif kind == "gloo":
            made.annotation("gloo:all_reduce", begin, end, thread=9)
        else:
            name = {"nccl": "ncclDevKernel_AllReduce", "copy": "Memcpy HtoD (Pageable -> Device)"}.get(kind, "gemm")
            category = Category.MEMCPY if kind == "copy" else Category.KERNEL
            launched = max(0, begin - 1000 * choice) if choice else None
            made.kernel(name, begin, end, launched=launched, category=category, device=choice // 2)
    return made


@given(_EVENTS)
@settings(max_examples=50, deadline=None)
def test_no_rule_fails_and_no_bound_is_beyond_the_step(events: list[tuple[str, tuple[int, int], int]]) -> None:
    seen = facts_of(made_of(events).recording())
    notes: list[str] = []
    found = [finding for rule in RULES for finding in advise(seen, notes, [rule])]
    summary = summary_of(seen.analysis, seen.found, notes)
    assert notes == []
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["verdict"].endswith(".")
    for finding in found:
        assert finding.saves_at_most_us is None or 0 <= finding.saves_at_most_us * 1000 <= seen.step_ns * 1.001, finding
        assert finding.share is None or 0 <= finding.share <= 1, finding


def test_what_could_not_be_found_out_is_a_warning_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Analysis, __: Placed, notes: list[str]) -> Summary:
        notes.append("a rule failed")
        return {"verdict": "it is so."}

    monkeypatch.setattr(analyse, "summary_of", failing)
    seen = facts()
    assert seen.analysis.warnings[-1] == "a rule failed"
    assert seen.analysis.summary == {"verdict": "it is so."}
