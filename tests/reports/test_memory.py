"""memory.log: InternLM's layout line by line, and sums that are exact in bytes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.reports.memory import layer_order, memory_log, memory_tree, owner_path
from profiler_wrapper.tables.model import BEFORE_PROFILING, CATEGORIES, MemoryCategory, Owner
from sample_memory import MIB, llama_memory, memory_at_peak, owner, with_memory
from sample_results import Layer, analysis_of, llama

STATE = re.compile(
    r"Memory State:\n"
    r"time: (?P<time>[0-9.]+)\n"
    r"---summary---\n"
    r"total_memory: (?P<total>[0-9.]+) MB\n"
    r"params_memory: (?P<params>[0-9.]+) MB, grads_memory: (?P<grads>[0-9.]+) MB, "
    r"os_params_memory: (?P<os_params>[0-9.]+) MB, os_state_memory: (?P<os_state>[0-9.]+) MB, "
    r"activation_memory: (?P<activation>[0-9.]+) MB"
)


def test_the_log_of_a_small_model_line_by_line() -> None:
    model = analysis_of(
        [Layer("Net", "Net"), Layer("embedding", "E"), Layer("blocks.0", "B"), Layer("blocks.0.mixer", "M")]
    )
    use = memory_at_peak(
        (
            owner("params", MIB // 2, layer="blocks.0.mixer", name="blocks.0.mixer.bias", op=BEFORE_PROFILING),
            owner("params", 96 * MIB, layer="blocks.0.mixer", name="blocks.0.mixer.weight", op=BEFORE_PROFILING),
            owner("params", 806 * MIB, layer="embedding", name="embedding.weight", op=BEFORE_PROFILING),
            owner("os_state", 8 * MIB, layer="embedding", name="exp_avg of embedding.weight", op="aten::zeros_like"),
            owner("activation", 3 * MIB, layer="blocks.0", op="aten::add", phase="forward"),
            owner("activation", 5 * MIB, layer="blocks.0.mixer", op="aten::mm", phase="forward"),
            owner("other", MIB // 4, op="aten::ones", phase="other"),
        )
    )
    assert (
        memory_log(with_memory(use, model))
        == """\
# Memory of cpu (NVIDIA H200, rank 0). MB is 2^20 bytes.
# time: seconds since the recording began.
# The last state is the peak, the highest allocated; the layout is what was held then.

# after forward, step 2
Memory State:
time: 0.0006
---summary---
total_memory: 918.75 MB
params_memory: 902.50 MB, grads_memory: 0.00 MB, os_params_memory: 0.00 MB, os_state_memory: 8.00 MB, \
activation_memory: 8.00 MB, communication_memory: 0.00 MB, workspace_memory: 0.00 MB, other_memory: 0.25 MB

# highest allocated in forward of step 2
Memory State:
time: 0.0006
---summary---
total_memory: 918.75 MB
params_memory: 902.50 MB, grads_memory: 0.00 MB, os_params_memory: 0.00 MB, os_state_memory: 8.00 MB, \
activation_memory: 8.00 MB, communication_memory: 0.00 MB, workspace_memory: 0.00 MB, other_memory: 0.25 MB
---Layout---
params_layout:
layer: param_mem, layer_mem: 0.00 MB, total_mem: 902.50 MB
layer: param_mem.embedding, layer_mem: 0.00 MB, total_mem: 806.00 MB
layer: param_mem.embedding.weight, layer_mem: 806.00 MB, total_mem: 806.00 MB
layer: param_mem.blocks, layer_mem: 0.00 MB, total_mem: 96.50 MB
layer: param_mem.blocks.0, layer_mem: 0.00 MB, total_mem: 96.50 MB
layer: param_mem.blocks.0.mixer, layer_mem: 0.00 MB, total_mem: 96.50 MB
layer: param_mem.blocks.0.mixer.bias, layer_mem: 0.50 MB, total_mem: 0.50 MB
layer: param_mem.blocks.0.mixer.weight, layer_mem: 96.00 MB, total_mem: 96.00 MB
grads_layout:
layer: grad_mem, layer_mem: 0.00 MB, total_mem: 0.00 MB
os_params_layout:
layer: os_params_mem, layer_mem: 0.00 MB, total_mem: 0.00 MB
os_state_layout:
layer: os_state_mem, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: os_state_mem.embedding, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: os_state_mem.embedding.weight, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: os_state_mem.embedding.weight.exp_avg, layer_mem: 8.00 MB, total_mem: 8.00 MB
activation_base_layout:
layer: activation_base, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: activation_base.blocks, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: activation_base.blocks.0, layer_mem: 0.00 MB, total_mem: 8.00 MB
layer: activation_base.blocks.0.mixer, layer_mem: 0.00 MB, total_mem: 5.00 MB
layer: activation_base.blocks.0.mixer.aten::mm, layer_mem: 5.00 MB, total_mem: 5.00 MB
layer: activation_base.blocks.0.aten::add, layer_mem: 3.00 MB, total_mem: 3.00 MB
other_layout:
layer: other, layer_mem: 0.00 MB, total_mem: 0.25 MB
layer: other.(outside of layers), layer_mem: 0.00 MB, total_mem: 0.25 MB
layer: other.(outside of layers).aten::ones, layer_mem: 0.25 MB, total_mem: 0.25 MB
"""
    )


def test_every_state_reads_as_internlms_and_they_are_in_order_of_time() -> None:
    use = llama_memory(12)
    use = replace(use, begin_ns=use.begin_ns - 2_000_000)
    states = list(STATE.finditer(memory_log(with_memory(use))))
    assert len(states) == len(use.moments) + 2  # with the highest reserved and the peak
    times = [float(state["time"]) for state in states]
    assert times[:-1] == sorted(times[:-1])
    assert times[-1] == pytest.approx((use.peak.time_ns - int(use.timeline.time_ns[0])) / 1e9 + 0.002)
    assert float(states[-1]["total"]) == round(use.peak.total_bytes / MIB, 2)
    for name in ("params", "grads", "os_params", "os_state", "activation"):
        assert float(states[-1][name]) == round(use.peak.categories[name] / MIB, 2)  # type: ignore[index]


def test_reserved_is_told_where_it_is_known() -> None:
    assert "# after forward, step 2, reserved 360.00 MB" in memory_log(with_memory(llama_memory(12)))
    assert "reserved" not in memory_log(with_memory(llama_memory(12, device="cpu")))


def test_layers_are_in_the_models_order_and_numbers_count() -> None:
    lines = memory_log(with_memory(llama_memory(12))).splitlines()
    names = [line.split(",")[0].removeprefix("layer: param_mem.") for line in lines if "layer: param_mem.model" in line]
    direct = [name for name in names if name.count(".") == 1]
    assert direct == ["model.embed_tokens", "model.layers", "model.norm"]
    blocks = [name for name in names if re.fullmatch(r"model\.layers\.\d+", name)]
    assert blocks == [f"model.layers.{i}" for i in range(12)]


def test_a_name_cannot_begin_a_line() -> None:
    use = memory_at_peak((owner("params", MIB, name="a\nMemory State:\n\ud800.weight"),))
    lines = memory_log(with_memory(use)).splitlines()
    assert lines.count("Memory State:") == 2
    assert "layer: param_mem.a\\nMemory State:\\n\\ud800, layer_mem: 0.00 MB, total_mem: 1.00 MB" in lines


def test_nothing_known_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_use"):
        memory_log(llama(1))


@pytest.mark.parametrize(
    ("one", "path"),
    [
        (owner("params", 1, layer="a", name="a.0.weight"), ("a", "0", "weight")),
        (owner("os_state", 1, layer="a", name="exp_avg of a.weight"), ("a", "weight", "exp_avg")),
        (owner("os_params", 1, name="master of a.weight"), ("a", "weight", "master")),
        (owner("os_state", 1, op="aten::zeros", phase="optimizer"), ("(optimizer)", "aten::zeros")),
        (owner("activation", 1, layer="a.0", name="a.0.out", op="aten::mm"), ("a", "0", "aten::mm")),
        (owner("workspace", 1, layer="a"), ("a", "(op not known)")),
        (owner("other", 1, op=BEFORE_PROFILING), ("before profiling",)),
    ],
)
def test_where_an_owner_stands(one: Owner, path: tuple[str, ...]) -> None:
    assert owner_path(one) == path


owners = st.lists(
    st.builds(
        owner,
        st.sampled_from(CATEGORIES),
        st.integers(0, 2**60),
        layer=st.text("ab.1", max_size=9),
        name=st.text("ab.1", max_size=9),
        op=st.text("xy.", max_size=3),
        phase=st.sampled_from([None, "forward", "backward", "other"]),
    ),
    max_size=20,
)


@given(owners, st.sampled_from(CATEGORIES))
def test_a_total_is_its_own_and_those_right_below(held: list[Owner], category: MemoryCategory) -> None:
    tree = memory_tree(held, (category,), layer_order(llama(1)))
    assert tree[0].total_bytes == sum(one.size_bytes for one in held if one.category == category)
    for one in tree:
        below = sum(other.total_bytes for other in tree if other.path and other.path[:-1] == one.path)
        assert one.total_bytes == one.own_bytes + below
    paths = [one.path for one in tree]
    assert len(set(paths)) == len(paths)
    for i, path in enumerate(paths[1:], 1):
        assert path[:-1] in paths[:i]


def test_layers_without_a_place_in_the_model_are_in_natural_order() -> None:
    held = [
        Owner(category="activation", layer=f"layers.{i}", name="", op="aten::mm", phase=None, size_bytes=1, count=1)
        for i in (10, 2, 1)
    ]
    tree = memory_tree(held, ("activation",), {})
    assert [one.path[1] for one in tree if len(one.path) == 2] == ["1", "2", "10"]
