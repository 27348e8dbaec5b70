"""Each law can fail: one number of a result is changed, and the law that is about it says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from invariants import INVARIANTS, broken, main
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.tables.model import Analysis
from recordings import AUTOGRAD, Trace, analyse

Change = Callable[[dict[str, Any]], object]


@cache
def _result() -> Analysis:
    """Two steps of two blocks on a device that idles, with a collective, an attention kernel and memory."""
    trace = Trace()
    for step in range(2):
        t = 10_000_000 * step
        trace.annotation(f"ProfilerStep#{step + 3}", t, t + 9_000_000).mark(".", t + 10, t + 3000)
        for number, path in enumerate(("layers.0", "layers.1")):
            at = t + 100 + 1000 * number
            trace.mark(path, at, at + 900, kind="block").mark(f"{path}.attn", at + 10, at + 800, kind="attention")
            trace.op("aten::_flash_attention_forward", at + 20, at + 600, sequence=10 * step + number, forward_thread=0)
            trace.memory(at + 30, 1 << 20, address=100 * step + number)
            begin = at + 60 + 1_500_000 * number
            trace.kernel("flash_fwd_kernel", begin, begin + 50_000, launched=at + 40)
        trace.node("FlashAttentionBackward0", t + 4000, t + 5000, number=10 * step + 1)
        trace.op("aten::mm", t + 4100, t + 4900, thread=AUTOGRAD)
        trace.memory(t + 4150, -(1 << 20), address=100 * step + 1, thread=AUTOGRAD)
        behind = {"thread": AUTOGRAD, "launched": t + 4200}
        trace.kernel("gemm", t + 5_000_000, t + 5_100_000, **behind)
        trace.kernel("ncclDevKernel_AllReduce", t + 5_050_000, t + 5_110_000, stream=20, **behind)
        trace.annotation("Optimizer.step#SGD.step", t + 6000, t + 7000)
        trace.kernel("multi_tensor_apply", t + 7_000_000, t + 7_010_000, launched=t + 6100)
    return analyse(trace.recording())


def _first(data: dict[str, Any], name: str, **where: Any) -> dict[str, Any]:
    return next(row for row in data[name] if all(row[key] == value for key, value in where.items()))


def _add(name: str, key: str, by: float = 1, **where: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        row = _first(data, name, **where)
        row[key] = (row[key] or 0) + by

    return change


def _set(name: str, key: str, value: Any, **where: Any) -> Change:
    return lambda data: _first(data, name, **where).update({key: value})


def _again(name: str) -> Change:
    return lambda data: data[name].append(copy.deepcopy(data[name][0]))


def _say(text: str) -> Change:
    return lambda data: data["summary"].update(verdict=text)


def _finding(**keys: Any) -> Change:
    return lambda data: data["summary"]["findings"][0].update(keys)


IN_LAYERS = {"layer": "layers.0.attn", "phase": "forward"}
FAIL: dict[str, Change] = {
    "layers_make_the_total": _add("layers", "self_time_us", **IN_LAYERS),
    "reasons_make_the_unattributed": lambda data: data["time"].update(unattributed_us=1.0),
    "classes_make_the_total": _add("classes", "time_us"),
    "steps_make_the_total": _add("steps", "time_us"),
    "phases_are_the_same_in_all_tables": lambda data: data["classes"][0].update(phase="recompute"),
    "operators_make_the_total": _add("operators", "self_time_us"),
    "kernels_make_the_total": _add("kernels", "count"),
    "events_are_counted_once": _add("layers", "self_events", **IN_LAYERS),
    "parts_make_their_step": lambda data: data["parts"].append(
        {"step": 3, "part": "other", "index": 0, "count": 1, "time_us": 1.0}
    ),
    "collectives_make_the_communication": _add("collectives", "exposed_us"),
    "attention_is_that_of_its_layers": _add("attention", "time_us"),
    "rows_are_one_tree": _set("layers", "depth", 3, **IN_LAYERS),
    "parents_hold_children": _add("layers", "time_us", layer="layers.0", phase="forward"),
    "roots_hold_everything": _add("layers", "time_us", parent=None, phase="forward"),
    "what_is_unknown_below_is_unknown_above": lambda data: [
        row.update(self_flops_per_step=1, flops_per_step=None) for row in data["layers"]
    ],
    "no_part_is_more_than_its_whole": _add("layers", "attention_us", 1e9, **IN_LAYERS),
    "children_are_parts_of_parents": _add("layers", "cpu_time_us", 1e9, **IN_LAYERS),
    "steps_of_a_row_are_its_time": lambda data: _first(data, "layers", **IN_LAYERS)["step_times_us"].pop(),
    "flops_are_the_same_in_all_tables": _set("layers", "self_flops_per_step", 7, **IN_LAYERS),
    "utilization_is_flops_over_time": lambda data: data.update(
        utilization={"step_time_us": 1.0, "mfu": 0.5, "hfu": 0.4, "devices": 1}
    ),
    "parts_of_the_wall_time_make_each_step": lambda data: data["overview"]["steps"][0].update(kernel_us=1.0),
    "busy_and_idle_are_known_together": lambda data: (
        data["time"].update(busy_us=None),
        data["overview"].update(steps=data["overview"]["steps"][:1]),
    ),
    "shares_are_from_0_to_1": lambda data: data["overview"].update(utilization=1.2),
    "no_peak_is_below_what_is_held": _set("layers", "peak_bytes", 1, layer="layers.0", phase="forward"),
    "no_peak_is_below_one_inside": _set("layers", "peak_bytes", 1, layer="layers.0", phase="forward"),
    "categories_make_what_is_allocated": lambda data: data["memory"]["categories"].update(grads=1),
    "what_is_kept_was_allocated": _add("op_memory", "kept_bytes", 1 << 40),
    "what_is_kept_for_backward_is_kept_inside": _add("layers", "retained_bytes", 9, layer="layers.0", phase="forward"),
    "moments_are_in_their_steps": lambda data: data["memory"]["moments"][0].update(allocated_bytes=1 << 40),
    "names_of_layers_are_rows": _set("operators", "layers", ["nowhere"]),
    "products_have_the_flops_of_their_sizes": lambda data: data.update(
        products=[_product("a", 4), _product("b", 4)], flops=[_flops("a", 128), _flops("b", 64)]
    ),
    "experts_make_their_layer": lambda data: data.update(
        experts=[{"layer": "moe", "expert": 0, "tokens_per_step": 3.0, "share": 1.0}],
        expert_layers=[{"layer": "moe", "method": "modules", "tokens_per_step": 4.0, "experts": 1}],
    ),
    "what_makes_results_comparable_is_so": lambda data: data["summary"]["comparable"].update(layers=99),
    "no_row_is_twice_and_the_most_come_first": _again("classes"),
    "nothing_is_below_zero": _set("kernels", "min_us", -1.0),
    "what_is_not_known_has_a_reason": lambda data: data.update(warnings=[]),
    "every_share_says_of_what": _say("Attention takes 12 %."),
    "numbers_of_findings_are_in_their_details": _finding(title="the device waits 4.56 ms a step"),
    "details_of_findings_are_those_of_the_tables": lambda data: data["overview"].update(gaps_us=1.0),
    "causes_of_idleness_are_the_idle_time": _finding(evidence=["1.00 ms while the CPU sleeps"]),
    "findings_are_whole": _finding(saves_at_most_us=1e9),
    "no_time_is_claimed_twice": lambda data: data["summary"]["findings"].append(
        copy.deepcopy(data["summary"]["findings"][0])
    ),
    "the_verdict_says_its_findings": _say("Nothing stands out."),
    "the_verdict_is_that_of_the_tables": _say("The device is idle for 12 % of a step of 9.00 ms."),
}  # fmt: skip
# Of these the whole package would have to be wrong: they compare what it writes with itself.
WRITTEN = {"json_comes_back", "csv_is_json", "text_is_json", "titles_say_the_total", "a_result_is_like_itself"}


def _product(layer: str, size: int) -> dict[str, Any]:
    sizes = {"m": size, "n": size, "k": size, "batch": 1}
    return {"op": "aten::mm", "layer": layer, "phase": "forward", "dtype": "float32", "calls_per_step": 1.0, **sizes}


def _flops(layer: str, flops: int) -> dict[str, Any]:
    counts = {"flops_per_step": flops, "causal_flops_per_step": flops}
    return {"layer": layer, "phase": "forward", "class": "gemm", "dtype": "float32", **counts}


def test_all_laws_hold_of_a_result_by_hand_and_each_is_broken_by_a_change() -> None:
    assert FAIL.keys() | WRITTEN == INVARIANTS.keys()
    result = _result()
    assert {finding["id"] for finding in result.summary["findings"]} == {"low-utilization"}
    assert broken(from_dict(to_dict(result))) == []


@pytest.mark.parametrize("name", FAIL)
def test_a_law_is_broken_by_a_change(name: str) -> None:
    data = to_dict(_result())
    FAIL[name](data)
    assert broken(from_dict(data), [name]) != []


def test_tables_as_text_that_show_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import row_invariants
    import text_invariants

    result = _result()
    full, csv = text_invariants.full_table(result), row_invariants.csv_text
    monkeypatch.setattr(text_invariants, "full_table", lambda _: full.replace("0.050", "0.051", 1))
    assert len(broken(result, ["text_is_json"])) == 1
    printed = text_invariants.console_table(result, rows=100_000, width=400)
    monkeypatch.setattr(text_invariants, "full_table", lambda _: full)
    monkeypatch.setattr(text_invariants, "console_table", lambda *_, **__: printed.replace("0.100", "0.102"))
    assert broken(result, ["text_is_json"]) != []
    monkeypatch.setattr(text_invariants, "console_table", lambda *_, **__: printed.replace("takes 9.0", "takes 9.1"))
    assert len(broken(result, ["titles_say_the_total"])) == 1
    monkeypatch.setattr(row_invariants, "csv_text", lambda *given: csv(*given).replace("100.0", "100.1"))
    assert broken(result, ["csv_is_json"]) != []


def test_by_hand(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace().mark(".", 0, 9000).op("aten::mm", 20, 80).write(tmp_path / "x.json")
    assert main([str(trace)]) == 0
    assert capsys.readouterr().out == f"{trace}: nothing\n"
