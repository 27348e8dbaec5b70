"""FLOPs of ops as the profiler records them, against torch's own counter and by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from profiler_wrapper.place.attention_ops import ATTENTIONS, HOLDING_ATTENTION, NO_MASK
from profiler_wrapper.result import attribute_trace
from profiler_wrapper.tables.work.flops import flops_of_recording
from profiler_wrapper.tables.work.formulas import flops_of, has_formula, has_work
from profiler_wrapper.trace.recording import OpShapes
from torch_versions import since_torch

FP8 = torch.float8_e4m3fn


def r(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def profiled(run: Callable[[], Any], path: Path) -> int:
    """FLOPs of what `run` does, by its trace."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    found = attribute_trace(path)
    count = flops_of_recording(found)
    assert not isinstance(count, str) and not count.uncounted
    return sum(row.flops_per_step for row in count.rows)


def counted_by_torch(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as mode:
        run()
    return int(mode.get_total_flops())


def trained(op: Callable[..., torch.Tensor], *shapes: tuple[int, ...], **more: Any) -> Callable[[], None]:
    return lambda: op(*(r(*shape) for shape in shapes), **more).sum().backward()


LIKE_TORCH: dict[str, Callable[[], Any]] = {
    "mm": trained(torch.mm, (3, 4), (4, 5)),
    "addmm": trained(torch.addmm, (5,), (3, 4), (4, 5)),
    "bmm": trained(torch.bmm, (2, 3, 4), (2, 4, 5)),
    "baddbmm": trained(torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "linear": trained(F.linear, (2, 3, 8), (5, 8), (5,)),
    "matmul that broadcasts": trained(torch.matmul, (2, 1, 3, 4), (6, 4, 5)),
    "einsum": trained(partial(torch.einsum, "bqhd,bkhd->bhqk"), (2, 3, 4, 5), (2, 6, 4, 5)),
    "conv1d": trained(F.conv1d, (2, 4, 9), (6, 4, 3), (6,), padding="same"),
    "conv2d": trained(F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,), stride=2, padding=1),
    "conv2d of patches": trained(F.conv2d, (2, 3, 16, 16), (8, 3, 4, 4), (8,), stride=4),
    "conv2d without a batch": trained(F.conv2d, (4, 9, 9), (6, 4, 3, 3)),
    "conv3d": trained(F.conv3d, (2, 4, 9, 9, 9), (6, 4, 3, 3, 3), dilation=2),
    "transposed conv2d": trained(F.conv_transpose2d, (2, 4, 9, 9), (4, 6, 3, 3), stride=2, padding=1, output_padding=1),
    "conv2d, weight alone": lambda: F.conv2d(torch.randn(2, 4, 9, 9), r(6, 4, 3, 3)).sum().backward(),
    "conv2d, input alone": lambda: F.conv2d(r(2, 4, 9, 9), torch.randn(6, 4, 3, 3)).sum().backward(),
    "grouped conv2d, forward": lambda: F.conv2d(r(2, 4, 9, 9), r(6, 2, 3, 3), groups=2),
    "attention in pieces": lambda: trained(
        partial(F.scaled_dot_product_attention, dropout_p=0.5), (2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)
    )(),
    "_scaled_mm": lambda: torch._scaled_mm(
        torch.ones(32, 64).to(FP8), torch.ones(32, 64).to(FP8).t(), torch.tensor(1.0), torch.tensor(1.0)
    ),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_counts_as_torch_does(name: str, tmp_path: Path) -> None:
    expected = counted_by_torch(LIKE_TORCH[name])
    assert expected > 0
    assert profiled(LIKE_TORCH[name], tmp_path / "trace.json") == expected


BY_HAND: dict[str, tuple[Callable[[], Any], int]] = {
    # the gradient of each of two inputs is one more product
    "linear": (trained(F.linear, (2, 3, 8), (5, 8), (5,)), 3 * 2 * (2 * 3) * 8 * 5),
    "linear, frozen weight": (
        lambda: F.linear(r(2, 3, 8), torch.randn(5, 8)).sum().backward(),
        2 * 2 * (2 * 3) * 8 * 5,
    ),
    "bmm": (trained(torch.bmm, (2, 3, 4), (2, 4, 5)), 3 * 2 * 2 * 3 * 4 * 5),
    # 9 + 2 * 1 - 3 = 8, in steps of 2: 5 by 5 outputs
    "conv2d": (trained(F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,), stride=2, padding=1), 3 * 2 * 2 * 25 * 6 * 4 * 9),
    # torch has no formula for these; the gradients of the first two are no products of matrices, but for the vector's
    "matrix and vector": (trained(torch.mv, (4, 8), (8,)), 2 * (2 * 4 * 8)),
    "dot": (trained(torch.dot, (8,), (8,)), 2 * 8),
    "addbmm": (lambda: torch.addbmm(r(3, 5), r(2, 3, 4), r(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "int8": (
        lambda: torch._int_mm(torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 16, dtype=torch.int8)),
        2 * 32 * 64 * 16,
    ),
    "grouped mm": (
        lambda: torch._grouped_mm(
            torch.ones(12, 8, dtype=torch.bfloat16),
            torch.ones(3, 8, 16, dtype=torch.bfloat16),
            offs=torch.tensor([4, 8, 12], dtype=torch.int32),
        ),
        2 * 12 * 8 * 16,
    ),
    # torch gives the weight's gradient as many FLOPs as without groups; it is three times the forward here
    "grouped conv2d": (trained(F.conv2d, (2, 4, 9, 9), (6, 2, 3, 3), groups=2), 3 * 2 * 2 * 7 * 7 * 6 * 2 * 9),
    # torch counts attention on a CPU as 0: two products forward, five backward
    "attention": (
        trained(F.scaled_dot_product_attention, (2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
        7 * 2 * 2 * 4 * 8 * 6 * 16,
    ),
    "attention, fewer heads of keys": (
        trained(F.scaled_dot_product_attention, (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), enable_gqa=True),
        7 * 2 * 2 * 4 * 8 * 8 * 16,
    ),
    "no products": (lambda: torch.softmax(r(8, 8), -1).relu().sum().backward(), 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_counts_what_is_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    run, expected = BY_HAND[name]
    assert profiled(run, tmp_path / "trace.json") == expected


Q, K, V = [2, 8, 16, 64], [2, 2, 24, 64], [2, 2, 24, 32]
OUT = [2, 8, 16, 32]


def swapped(shape: list[int]) -> list[int]:
    return [shape[0], shape[2], shape[1], shape[3]]


def call(op: str, given: dict[str, Any], **values: str) -> OpShapes:
    """A call of an aten op: `given` by the names of its schema, values as the trace writes them."""
    names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    assert {*given, *values} <= {*names}, names
    return OpShapes(
        dims=tuple(given.get(name, []) for name in names),
        types=tuple("c10::BFloat16" if name in given else "Scalar" for name in names),
        concrete=tuple(values.get(name, "") for name in names),
    )


def attention_call(op: str, *, causal: bool) -> OpShapes:
    """A call of one of aten's attention ops with the tensors above."""
    names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    order = (lambda shape: shape) if op.startswith("_scaled_dot_product") else swapped
    given = {"query": order(Q), "key": order(K), "value": order(V)}
    gradient = next((name for name in names if name.startswith("grad_out")), None)
    if gradient:
        given |= {gradient: order(OUT), "out": order(OUT)}
    flag = {"custom_mask_type": "1" if causal else "0"} if "custom_mask_type" in names else {"is_causal": str(causal)}
    return call(op, given, **flag)


ATEN_ATTENTIONS = [name.removeprefix("aten::") for name in ATTENTIONS if name.startswith("aten::")]


@pytest.mark.parametrize("op", [op for op in ATEN_ATTENTIONS if hasattr(torch.ops.aten, op)])
def test_every_attention_of_torch_is_read_by_its_schema(op: str) -> None:
    pairs = 2 * 8 * 16 * 24
    per_pair = 3 * 64 + 2 * 32 if "backward" in op else 64 + 32
    full = flops_of(f"aten::{op}", attention_call(op, causal=False))
    causal = flops_of(f"aten::{op}", attention_call(op, causal=True))
    assert full is not None
    assert causal is not None
    again = 2 * pairs * 64 if "backward" in op else 0  # the scores, which the forward did not keep
    assert full == (2 * pairs * per_pair, 2 * pairs * per_pair, "bfloat16", again, again)
    assert causal.flops == full.flops
    # 16 queries and 24 keys: the first query sees one key, or the last one all of them
    seen = 2 / 3 if op.startswith("_flash_attention") else 1 / 3
    assert causal.causal_flops == round(full.flops * seen)
    assert (causal.repeated_flops, causal.causal_repeated_flops) == (again, round(again * seen))


@pytest.mark.parametrize("name", [*ATTENTIONS, *HOLDING_ATTENTION])
def test_the_inputs_of_attention_are_where_torch_declares_them(name: str) -> None:
    op = name.removeprefix("aten::")
    if op == name or not hasattr(torch.ops.aten, op):
        pytest.skip("no op of this build")
    names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    inputs = {**ATTENTIONS, **HOLDING_ATTENTION}[name]
    masks = {"attn_mask", "attn_bias", "bias"} & {*names}
    assert {None if inputs.mask in (None, NO_MASK) else names[inputs.mask]} == (masks or {None})
    for place, expected in (
        (inputs.query, ("query",)),
        (inputs.causal, ("is_causal", "custom_mask_type")),
        (inputs.dropout, ("dropout_p",)),
        (inputs.wants_sums, ("compute_log_sumexp", "compute_logsumexp")),
        (inputs.wants_gradients, ("grad_input_mask",)),
    ):
        assert place is None or names[place] in expected
    if inputs.backward:
        out, sums = inputs.saved or (inputs.query + 3, inputs.query + 4)
        assert (names[out], names[sums]) in (("out", "logsumexp"), ("output", "logsumexp"))


@since_torch(2, 11, "the formulas know no fewer heads of keys")
@pytest.mark.parametrize("op", [op for op in ATEN_ATTENTIONS if hasattr(torch.ops.aten, op)])
def test_attention_agrees_with_the_formula_of_torch(op: str) -> None:
    formula = flop_registry.get(getattr(torch.ops.aten, op))
    if formula is None or not op.startswith("_scaled_dot_product"):
        pytest.skip("torch has no formula for it, or takes heads first where tokens are")
    shapes = attention_call(op, causal=True)
    tensors = [torch.empty(dims, device="meta") if dims else None for dims in shapes.dims]
    ours = flops_of(f"aten::{op}", shapes)
    assert ours is not None
    assert ours.flops == formula(*tensors, out_val=None)


def packed(ends: int, tokens_q: int, tokens_k: int, *, longest: tuple[int, int]) -> OpShapes:
    given = {
        "query": [tokens_q, 8, 64],
        "key": [tokens_k, 2, 64],
        "value": [tokens_k, 2, 64],
        "cum_seq_q": [ends],
        "cum_seq_k": [ends],
    }
    return call("_flash_attention_forward", given, max_q=str(longest[0]), max_k=str(longest[1]), is_causal="True")


def test_sequences_end_to_end_count_where_their_lengths_follow_from_the_shapes() -> None:
    name = "aten::_flash_attention_forward"
    one = flops_of(name, packed(2, 10, 10, longest=(10, 10)))
    alike = flops_of(name, packed(4, 30, 60, longest=(10, 20)))
    assert one == (2 * 8 * 10 * 10 * 128, 2 * 8 * 10 * 10 * 64, "bfloat16", 0, 0)
    assert alike is not None
    assert alike.flops == 3 * 2 * 8 * 10 * 20 * 128
    assert flops_of(name, packed(4, 25, 60, longest=(10, 20))) is None


def external(dims: dict[int, list[int]], values: dict[int, str], length: int) -> OpShapes:
    return OpShapes(
        dims=tuple(dims.get(i, []) for i in range(length)),
        types=tuple("c10::Half" if i in dims else "Scalar" for i in range(length)),
        concrete=tuple(values.get(i, "") for i in range(length)),
    )


def test_flash_attn_counts_by_its_own_order_of_inputs() -> None:
    q, k = [2, 16, 8, 64], [2, 16, 2, 64]
    tokens, few = [32, 8, 64], [32, 2, 64]
    pairs = 2 * 8 * 16 * 16
    forward, backward = pairs * 2 * 128, pairs * 2 * 320
    calls = {
        "flash_attn::_flash_attn_forward": (external({0: q, 1: k, 2: k}, {5: "True"}, 11), forward),
        "flash_attn::_flash_attn_backward": (external({0: q, 1: q, 2: k, 3: k, 4: q}, {11: "True"}, 18), backward),
        "flash_attn::_flash_attn_varlen_forward": (
            external({0: tokens, 1: few, 2: few, 3: [3], 4: [3]}, {5: "16", 6: "16", 9: "True"}, 19),
            forward,
        ),
        "flash_attn::_flash_attn_varlen_backward": (
            external({0: tokens, 1: tokens, 2: few, 3: few, 9: [3], 10: [3]}, {11: "16", 12: "16", 15: "True"}, 23),
            backward,
        ),
        "flash_attn_3::fwd": (external({0: q, 1: k, 2: k}, {24: "True"}, 35), forward),
        "flash_attn_3::_flash_attn_backward": (external({0: q, 1: q, 2: k, 3: k}, {16: "True"}, 22), backward),
    }
    for name, (shapes, expected) in calls.items():
        again = 2 * pairs * 64 if "backward" in name else 0
        assert flops_of(name, shapes) == (expected, expected // 2, "float16", again, again // 2), name
    paged = external({0: q, 1: [9, 16, 2, 64], 2: [9, 16, 2, 64], 14: [2, 5]}, {24: "True"}, 35)
    assert flops_of("flash_attn_3::fwd", paged) is None


def test_flex_attention_counts_in_full_where_the_first_inputs_are_query_key_and_value() -> None:
    name = "triton_tem_fused_flex_attention_0"
    shapes = external({0: Q, 1: K, 2: K, 3: [2, 8, 16]}, {}, 8)
    assert flops_of(name, shapes) == (2 * 2 * 8 * 16 * 24 * 128,) * 2 + ("float16", 0, 0)
    assert flops_of(name, external({0: [512, 96], 1: K, 2: K}, {}, 8)) is None


@pytest.mark.parametrize(
    ("name", "left", "right", "types", "expected"),
    [
        ("aten::_scaled_mm", [32, 64], [64, 16], "c10::Float8_e4m3fn", (2 * 32 * 64 * 16, "float8_e4m3fn")),
        ("aten::_scaled_mm", [32, 64], [64, 16], "c10::Float4_e2m1fn_x2", (2 * 32 * 128 * 16, "float4_e2m1fn_x2")),
        ("aten::_weight_int8pack_mm", [5, 64], [16, 64], "c10::BFloat16", (2 * 5 * 64 * 16, "bfloat16")),
        ("aten::_weight_int4pack_mm", [5, 64], [2, 4, 32, 4], "c10::BFloat16", (2 * 5 * 64 * 16, "bfloat16")),
        ("aten::_weight_int4pack_mm_for_cpu", [5, 64], [16, 32], "float", (2 * 5 * 64 * 16, "float32")),
        ("aten::_grouped_mm", [12, 8], [3, 8, 16], "c10::BFloat16", (2 * 12 * 8 * 16, "bfloat16")),
        ("aten::_grouped_mm", [8, 12], [12, 16], "c10::BFloat16", (2 * 12 * 8 * 16, "bfloat16")),
        ("aten::_grouped_mm", [3, 8, 4], [3, 4, 16], "c10::BFloat16", (2 * 3 * 4 * 8 * 16, "bfloat16")),
        ("aten::linear", [2, 3, 8], [5, 8], "signed char", (2 * 6 * 8 * 5, "int8")),
    ],
)
def test_products_say_what_they_multiply(
    name: str, left: list[int], right: list[int], types: str, expected: tuple[int, str]
) -> None:
    counted = flops_of(name, OpShapes(dims=(left, right), types=(types, types), concrete=("", "")))
    assert counted is not None
    assert (counted.flops, counted.dtype) == expected


@pytest.mark.parametrize(
    "shapes",
    [
        OpShapes(dims=(), types=(), concrete=()),
        OpShapes(dims=([], []), types=("", ""), concrete=("", "")),
        OpShapes(dims=([3, 4], [5, 6]), types=("float", "float"), concrete=("", "")),
        OpShapes(dims=([[3, 4]], "x"), types=("TensorList", ""), concrete=("", "")),
        OpShapes(dims=(None, None), types=("", ""), concrete=("", "")),
    ],
)
def test_shapes_that_fit_no_formula_tell_nothing(shapes: OpShapes) -> None:
    for name in ("aten::mm", "aten::linear", "aten::convolution", "aten::convolution_backward", *ATTENTIONS):
        assert flops_of(name, shapes) is None, name


def test_a_convolution_without_its_stride_is_not_guessed() -> None:
    shapes = OpShapes(dims=([2, 4, 9, 9], [6, 4, 3, 3]), types=("float", "float"), concrete=())
    assert flops_of("aten::convolution", shapes) is None


def test_what_torch_counts_we_count() -> None:
    of_us = {"cudnn_convolution", "_slow_conv2d_forward"}  # always inside aten::convolution
    for op in flop_registry:
        name = str(op)
        if name.startswith("aten.") and name.removeprefix("aten.") not in of_us:
            assert has_formula(name.replace("aten.", "aten::")), name


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("aten::mm", True),
        ("aten::mkldnn_rnn_layer", True),
        ("aten::_cudnn_rnn_backward", True),
        ("triton_tem_fused_mm_0", False),
        ("triton_poi_fused_addmm_relu_0", False),
        ("cpp_fused_flex_attention_view_0", True),
        ("vllm::unified_attention_with_output", True),
        ("FlashAttnFunc", True),
        ("aten::einsum", False),
        ("aten::_scaled_dot_product_attention_math", False),
        ("aten::add", False),
        ("AddmmBackward0", False),
    ],
)
def test_ops_with_work_are_known_by_name(name: str, works: bool) -> None:
    assert has_work(name) == works
