"""Bytes of one call of an op, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from profiler_wrapper.tables.work.bytes import has_rule, moved_by, moves_nothing
from profiler_wrapper.tables.work.traffic import element_size_of_kernel
from profiler_wrapper.trace.recording import OpShapes

HALF, FLOAT, LONG, BOOL = "c10::BFloat16", "float", "long int", "bool"


def bytes_moved(name: str, shapes: OpShapes, *, element_size: int | None = None) -> int | None:
    """Bytes of one call, read and written; None where not known."""
    moved = (0, 0) if moves_nothing(name) else moved_by(name, shapes, element_size=element_size)
    return None if moved is None else sum(moved)


def tensor(*dims: int, of: str = FLOAT, strides: list[int] | None = None) -> tuple[Any, str, str, Any]:
    dense = [1] * len(dims)
    for i in range(len(dims) - 2, -1, -1):
        dense[i] = dense[i + 1] * dims[i + 1]
    return list(dims), of, "", dense if strides is None else strides


def value(text: object = "", kind: str = "Scalar") -> tuple[Any, str, str, Any]:
    """What is no tensor, as a trace has it; without a text an input that was not given."""
    return [], kind if str(text) else "", str(text), []


def tensors(*dims: list[int]) -> tuple[Any, str, str, Any]:
    return list(dims), "TensorList", "", [tensor(*one)[3] for one in dims]


def moved(op: str, *inputs: tuple[Any, str, str, Any], element_size: int | None = None) -> tuple[int, int] | None:
    """(read, written)."""
    dims, types, concrete, strides = zip(*inputs, strict=True)
    shapes = OpShapes(dims, types, concrete, strides)
    name = op if "::" in op or op.startswith("triton") else f"aten::{op}"
    told = moved_by(name, shapes, element_size=element_size)
    if told is not None:
        assert bytes_moved(name, shapes, element_size=element_size) == told.read + told.written
    return told


X = tensor(8, 16)
N = 8 * 16


# --- elementwise ---


@pytest.mark.parametrize(
    ("op", "inputs", "read", "written"),
    [
        ("relu", [X], 4 * N, 4 * N),
        ("add", [X, tensor(16), value(1)], 4 * N + 64, 4 * N),
        ("add", [tensor(8, 1), tensor(1, 16), value(1)], 32 + 64, 4 * N),
        ("add_", [X, tensor(16, of=HALF), value(1)], 4 * N + 32, 4 * N),
        ("mul", [tensor(8, 16, of=HALF), X], 2 * N + 4 * N, 4 * N),
        ("mul", [tensor(8, 16, of=HALF), tensor(of="double")], 2 * N, 2 * N),
        ("mul", [tensor(8, 16, of=HALF), tensor(of=FLOAT)], 2 * N + 4, 2 * N),
        ("mul", [tensor(8, 16, of=HALF), tensor(8, 16, of="c10::Half")], 4 * N, 4 * N),
        ("mul", [tensor(8, of=LONG), tensor(of=FLOAT)], 64 + 4, 32),
        ("mul", [X, tensor(8, 16, of="c10::complex<float>")], 12 * N, 8 * N),
        ("div", [tensor(8, of=LONG), tensor(of=LONG)], 64, 32),
        ("add", [tensor(8, of=LONG), value("1.5"), value(1)], 64, 32),
        ("exp", [tensor(8, of=LONG)], 64, 32),
        ("eq", [X, value(0)], 4 * N, N),
        ("abs", [tensor(8, of="c10::complex<float>")], 64, 32),
        ("add", [X, X, value(1), tensor(8, 16, of=HALF)], 8 * N, 2 * N),
        ("add", [tensor(8, 16, strides=[0, 1]), X, value(1)], 64 + 4 * N, 4 * N),
        ("relu", [tensor(8, 16, strides=[0, 2])], 64, 4 * N),
        ("relu", [tensor(8, 16, strides=[1, 1])], 4 * 23, 4 * N),  # windows that overlap
        ("where", [tensor(8, 16, of=BOOL), X, tensor()], 5 * N + 4, 4 * N),
        ("masked_fill", [X, tensor(8, 1, of=BOOL), value(0)], 4 * N + 8, 4 * N),
        ("gelu_backward", [X, X, value("none")], 8 * N, 4 * N),
        ("native_dropout", [X, value(0.1), value("True")], 4 * N, 4 * N + N),
        ("copy_", [X, tensor(8, 16, of=HALF), value("False")], 2 * N, 4 * N),
        ("fill_", [X, value(1)], 0, 4 * N),
        ("zero_", [X], 0, 4 * N),
    ],
)
def test_elementwise_ops_read_each_input_and_write_what_these_give(
    op: str, inputs: list[Any], read: int, written: int
) -> None:
    assert moved(op, *inputs) == (read, written)


def test_division_of_whole_numbers_with_a_way_to_round_is_not_told() -> None:
    assert moved("div", tensor(8, of=LONG), tensor(of=LONG), value()) is None


# --- products and attention ---


@pytest.mark.parametrize(
    ("op", "inputs", "read", "written"),
    [
        ("mm", [tensor(2, 3, of=HALF), tensor(3, 5, of=HALF)], 2 * (6 + 15), 2 * 10),
        ("mm", [tensor(2, 3), tensor(3, 5), tensor(2, 5)], 4 * 21, 4 * 10),  # into a tensor that is there
        ("addmm", [tensor(5), tensor(2, 3), tensor(3, 5), value(1), value(1)], 4 * (5 + 6 + 15), 4 * 10),
        ("addmm", [tensor(2, 5), tensor(2, 3), tensor(3, 5), value(0), value(1)], 4 * (6 + 15), 4 * 10),
        ("bmm", [tensor(7, 2, 3), tensor(7, 3, 5)], 4 * 7 * 21, 4 * 70),
        ("addbmm", [tensor(2, 5), tensor(7, 2, 3), tensor(7, 3, 5), value(1), value(1)], 4 * (10 + 147), 4 * 10),
        ("mv", [tensor(2, 3), tensor(3)], 4 * 9, 4 * 2),
        ("dot", [tensor(3), tensor(3)], 24, 4),
        ("_int_mm", [tensor(2, 3, of="signed char"), tensor(3, 5, of="signed char")], 21, 4 * 10),
        ("linear", [tensor(4, 2, 3), tensor(5, 3), tensor(5)], 4 * (24 + 15 + 5), 4 * 40),
        (
            "_scaled_mm",
            [
                tensor(2, 8, of="c10::Float4_e2m1fn_x2"), tensor(8, 5, of="c10::Float4_e2m1fn_x2"),
                tensor(2, of="c10::Float8_e4m3fn"), tensor(5, of="c10::Float8_e4m3fn"), value(), value(), value(15),
            ],
            16 + 40 + 2 + 5,
            2 * 10,
        ),
        ("_grouped_mm", [tensor(6, 3, of=HALF), tensor(2, 3, 5, of=HALF), tensor(2, of="int")], 2 * 48 + 8, 2 * 30),
        ("_grouped_mm", [tensor(6, 3, of=HALF), tensor(3, 5, of=HALF), tensor(2, of="int")], 2 * 33 + 8, 2 * 2 * 30),
        ("_weight_int8pack_mm", [tensor(2, 8, of=HALF), tensor(5, 8, of="signed char"), tensor(5, of=HALF)], 82, 20),
    ],
)  # fmt: skip
def test_products(op: str, inputs: list[Any], read: int, written: int) -> None:
    assert moved(op, *inputs) == (read, written)


def convolution(*, transposed: bool, groups: int = 1) -> list[Any]:
    weight = tensor(3, 4, 3, 3) if transposed else tensor(4, 3 // groups, 3, 3)
    texts = ("[2, 2]", "[1, 1]", "[1, 1]", transposed, "[1, 1]" if transposed else "[0, 0]", groups)
    return [tensor(2, 3, 8, 8), weight, tensor(4), *map(value, texts)]


def test_convolutions_write_all_their_outputs() -> None:
    read = 4 * (2 * 3 * 64 + 4 * 27 + 4)
    assert moved("convolution", *convolution(transposed=False)) == (read, 4 * 2 * 4 * 4 * 4)
    assert moved("convolution", *convolution(transposed=True)) == (read, 4 * 2 * 4 * 16 * 16)


@pytest.mark.parametrize(
    ("mask", "read", "written"),
    [
        ("[True, True, True]", 128 + 384 + 108, 384 + 108 + 4),
        ("[True, False, False]", 128 + 108, 384),  # of the input: not the input itself
        ("[False, True, False]", 128 + 384, 108),
    ],
)
def test_the_backward_of_a_convolution_moves_what_the_gradients_asked_for_need(
    mask: str, read: int, written: int
) -> None:
    texts = ("[4]", "[2, 2]", "[1, 1]", "[1, 1]", False, "[0, 0]", 1, mask)
    inputs = [tensor(2, 4, 4, 4), tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), *map(value, texts)]
    assert moved("convolution_backward", *inputs) == (4 * read, 4 * written)


Q, KV, SUMS = tensor(2, 4, 16, 8, of=HALF), tensor(2, 2, 32, 8, of=HALF), tensor(2, 4, 16)
Q_BYTES, KV_BYTES, SUM_BYTES = 2 * 1024, 2 * 1024, 4 * 128


def test_attention_reads_its_inputs_and_writes_the_output_and_a_sum_for_each_query() -> None:
    told = moved("_scaled_dot_product_flash_attention", Q, KV, KV, value(0), value("True"), value("False"), value())
    assert told == (Q_BYTES + 2 * KV_BYTES, Q_BYTES + SUM_BYTES)
    bias = tensor(2, 4, 16, 32, of=HALF, strides=[0, 0, 32, 1])
    told = moved("_scaled_dot_product_efficient_attention", Q, KV, KV, bias, value("False"), value(0), value("False"))
    assert told == (Q_BYTES + 2 * KV_BYTES + 2 * 16 * 32, Q_BYTES)


def test_the_backward_of_attention_writes_gradients_of_query_key_and_value() -> None:
    nothing = [value()] * 2
    read = 3 * Q_BYTES + 2 * KV_BYTES + SUM_BYTES
    flash = [Q, Q, KV, KV, Q, SUMS, *nothing, value(16), value(32), value(0), value("True"), value(), value()]
    assert moved("_scaled_dot_product_flash_attention_backward", *flash) == (read, Q_BYTES + 2 * KV_BYTES)
    mask = value("[True, True, True, False]", "ScalarList")
    efficient = [Q, Q, KV, KV, value(), Q, SUMS, tensor(of=LONG), tensor(of=LONG), value(0), mask, value("False")]
    assert moved("_scaled_dot_product_efficient_attention_backward", *efficient) == (read, Q_BYTES + 2 * KV_BYTES)
    below = [Q, Q, KV, KV, value(), Q, *nothing, value(16), value(32), SUMS, value(0), *nothing, value(1)]
    assert moved("_efficient_attention_backward", *below) == (read, Q_BYTES + 2 * KV_BYTES)
    third = [Q, Q, KV, KV, Q, SUMS, *[value()] * 10, value("True"), *[value()] * 5]
    assert moved("flash_attn_3::_flash_attn_backward", *third) == (read, Q_BYTES + 2 * KV_BYTES)


# --- reductions, softmax, norms, losses ---


@pytest.mark.parametrize(
    ("op", "inputs", "read", "written"),
    [
        ("sum", [X, value()], 4 * N, 4),
        ("sum", [X, value("[-1]", "ScalarList"), value("True"), value()], 4 * N, 4 * 8),
        ("sum", [tensor(8, of=BOOL), value()], 8, 8),
        ("sum", [tensor(8, 16, of=HALF), value("[0]", "ScalarList"), value("False"), value(6)], 2 * N, 4 * 16),
        ("mean", [X, value("[0, 1]", "ScalarList"), value("False"), value()], 4 * N, 4),
        ("var_mean", [X, value("[1]", "ScalarList"), value("True"), value("False")], 4 * N, 2 * 4 * 8),
        ("max", [X, value(1), value("False")], 4 * N, 8 * (4 + 8)),
        ("max", [X], 4 * N, 4),
        ("argmax", [X, value(-1), value("False")], 4 * N, 8 * 8),
        ("all", [tensor(8, of=BOOL)], 8, 1),
        ("cumsum", [tensor(8, of=BOOL), value(0), value()], 8, 64),
        ("topk", [X, value(3), value(-1), value("True"), value("True")], 4 * N, 8 * 3 * (4 + 8)),
        ("sort", [X, value(-1), value("False")], 4 * N, N * (4 + 8)),
        ("_softmax", [tensor(8, 16, of="c10::Half"), value(-1), value("True")], 2 * N, 4 * N),
        ("_log_softmax_backward_data", [X, X, value(1), value(6)], 8 * N, 4 * N),
        (
            "native_layer_norm",
            [tensor(8, 16, of=HALF), value("[16]", "ScalarList"), tensor(16, of=HALF), tensor(16, of=HALF), value(1)],
            2 * (N + 32), 2 * N + 2 * 4 * 8,
        ),
        (
            "native_layer_norm_backward",
            [
                X, X, value("[16]", "ScalarList"), tensor(8, 1), tensor(8, 1), tensor(16), tensor(16),
                value("[True, True, False]", "ScalarList"),
            ],
            4 * (2 * N + 16 + 16), 4 * (N + 16),
        ),
        ("_fused_rms_norm", [X, value("[16]", "ScalarList"), tensor(16), value()], 4 * (N + 16), 4 * (N + 8)),
        (
            "native_batch_norm",
            [tensor(2, 3, 4, 4), *[tensor(3)] * 4, value("True"), value(0.1), value(0.1)],
            4 * (96 + 12), 4 * (96 + 12),
        ),
        ("native_batch_norm", [tensor(2, 3, 4, 4), *[tensor(3)] * 4, value("False")], 4 * 108, 4 * 96),
        (  # batch, channels, size of an image, groups: a mean and a deviation for each of 2 * 3
            "native_group_norm", [tensor(2, 6, 4, 4), tensor(6), tensor(6), *map(value, (2, 6, 16, 3, "1e-05"))],
            4 * (192 + 12), 4 * (192 + 2 * 6),
        ),
        ("nll_loss_forward", [tensor(32, 128), tensor(32, of=LONG), value(), value(1), value(-100)], 32 * 12, 8),
        (
            "nll_loss_backward",
            [tensor(), tensor(32, 128), tensor(32, of=LONG), value(), value(1), value(-100), tensor()],
            4 + 256 + 4, 4 * 32 * 128,
        ),
        ("mse_loss", [X, X, value(1)], 8 * N, 4),
        (
            "max_pool2d_with_indices",
            [tensor(2, 3, 8, 8), *map(value, ("[2, 2]", "[2, 2]", "[0, 0]", "[1, 1]", "False"))],
            4 * 384, 96 * 12,
        ),
    ],
)  # fmt: skip
def test_reductions_softmax_norms_and_losses(op: str, inputs: list[Any], read: int, written: int) -> None:
    assert moved(op, *inputs) == (read, written)


# --- data ---


@pytest.mark.parametrize(
    ("op", "inputs", "read", "written"),
    [
        ("clone", [tensor(8, 16, strides=[0, 1]), value()], 64, 4 * N),
        ("_to_copy", [X, value(15), value()], 4 * N, 2 * N),
        ("embedding", [tensor(1000, 16), tensor(2, 5, of=LONG)], 10 * 64 + 80, 10 * 64),
        ("embedding", [tensor(4, 16), tensor(2, 5, of=LONG)], 4 * 64 + 80, 10 * 64),  # the whole table
        ("embedding_dense_backward", [tensor(2, 5, 16), tensor(2, 5, of=LONG), value(1000)], 720, 4 * 16000),
        ("index_select", [tensor(4, 16), value(0), tensor(10, of=LONG)], 4 * 64 + 80, 640),
        ("index_select", [tensor(1000, 16), value(0), tensor(10, of=LONG)], 640 + 80, 640),
        ("gather", [X, value(1), tensor(8, 3, of=LONG), value("False")], 24 * 12, 24 * 4),
        ("scatter_add_", [X, value(1), tensor(8, 3, of=LONG), tensor(8, 16)], 24 * (8 + 4 + 4), 24 * 4),
        ("index_add_", [X, value(0), tensor(5, of=LONG), tensor(5, 16), value(1)], 40 + 320 + 320, 320),
        ("constant_pad_nd", [X, value("[1, 2]", "ScalarList"), value(0)], 4 * N, 4 * 8 * 19),
        ("slice_backward", [tensor(8, 4), value("[8, 16]", "ScalarList")], 4 * 32, 4 * N),
        ("repeat", [X, value("[3, 1]", "ScalarList")], 4 * N, 12 * N),
        ("arange", [value(0), value(10), value(3), tensor(0, of=LONG)], 0, 4 * 8),
    ],
)
def test_ops_that_move_data(op: str, inputs: list[Any], read: int, written: int) -> None:
    assert moved(op, *inputs) == (read, written)


def test_lists_of_tensors_are_told_with_the_size_of_an_element_alone() -> None:
    pair = tensors([2, 3], [5])
    assert moved("cat", pair, value(0)) is None
    assert moved("cat", pair, value(0), element_size=2) == (22, 22)
    assert moved("_foreach_add_", pair, pair, value(1), element_size=4) == (88, 44)
    assert moved("_foreach_sqrt", pair, element_size=4) == (44, 44)
    assert moved("_foreach_norm", pair, value(2), value(), element_size=4) == (44, 8)
    assert moved("_foreach_copy_", pair, pair, value("False"), element_size=4) == (44, 44)


def test_an_optimizer_in_one_kernel_reads_all_and_writes_all_but_the_gradients() -> None:
    params, steps = tensors([2, 3], [5]), tensors([], [])
    lists = [params, params, params, params, tensors(), steps]
    assert moved("_fused_adamw_", *lists, element_size=4) == (4 * 44 + 8, 3 * 44)
    assert moved("_fused_sgd_", params, params, params, element_size=4) == (3 * 44, 2 * 44)
    expanded = ([[2, 3], [5]], "TensorList", "", [[0, 1], [1]])  # gradients of 3 and 5 different numbers
    assert moved("_fused_sgd_", params, expanded, tensors(), element_size=4) == (44 + 32, 44)


def test_kernels_over_lists_name_the_size_of_an_element() -> None:
    space = "at::native::(anonymous namespace)::"
    cat = f"void {space}CatArrayBatchedCopy<{space}OpaqueType<2u>, unsigned int, 3, 64, 64>({space}OpaqueType<2u>*)"
    adam = (
        f"void {space}multi_tensor_apply_kernel<{space}FusedOptimizerTensorListMetadata<4>, "
        f"{space}FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*>()"
    )
    foreach = (
        f"void {space}multi_tensor_apply_kernel<{space}TensorListMetadata<2>, "
        f"{space}BinaryOpListAlphaFunctor<c10::BFloat16, 2, 2, 0>, std::plus<float>, float>()"
    )
    assert [element_size_of_kernel(name) for name in (cat, adam, foreach, "void other<float>()")] == [2, 4, 2, None]


def test_kernels_of_vllm() -> None:
    slots, quantized = tensor(3, of=LONG), tensor(9, 16, 2, 8, of="c10::Float8_e4m3fn")
    cached = [tensor(3, 2, 8, of=HALF), tensor(3, 2, 4, of=HALF), quantized, tensor(9, 16, 2, 4, of=HALF), slots]
    assert moved("_C_cache_ops::reshape_and_cache_flash", *cached) == (2 * 48 + 2 * 24 + 24, 48 + 2 * 24)
    rotated = [slots, tensor(3, 16, of=HALF), tensor(3, 8, of=HALF), value(8), tensor(100, 8, of=HALF)]
    assert moved("_C::rotary_embedding", *rotated) == (24 + 96 + 48 + 3 * 8 * 2, 96 + 48)


def test_a_fused_kernel_moves_each_tensor_that_it_is_given() -> None:
    inputs = [tensor(8, 16, of=HALF), tensor(16, of=HALF), tensor(8, 16, of=HALF), value(128)]
    assert moved("triton_red_fused_add_mean_mul_pow_rsqrt_0", *inputs) == (2 * (N + 16 + N), 0)
    assert moved("triton_poi_fused_embedding_0", *inputs) is None


# --- what is not told ---


@pytest.mark.parametrize("op", ["view", "t", "expand", "empty", "reshape", "slice", "linear_", "result_type"])
def test_views_and_allocations_move_nothing(op: str) -> None:
    shapes = OpShapes(([8, 16],), (FLOAT,), ("",), ([16, 1],))
    assert bytes_moved(f"aten::{op}", shapes) == (None if op == "linear_" else 0)


@pytest.mark.parametrize("op", ["nonzero", "unique", "masked_select", "somebody::else", "index"])
def test_what_no_rule_tells_is_none(op: str) -> None:
    assert moved(op, X) is None


def test_inputs_that_a_rule_is_not_for_are_not_told_and_raise_nothing() -> None:
    strange: list[OpShapes] = [
        OpShapes((), (), ()),
        OpShapes(([], []), ("", ""), ("", "")),
        OpShapes(([3, 4], [5, 6]), (FLOAT, FLOAT), ("", "")),
        OpShapes(([[3, 4]], "x"), ("TensorList", ""), ("", "")),
        OpShapes((None, None), (FLOAT, FLOAT), ("", "")),
        OpShapes(([2], [2]), ("Foreign", FLOAT), ("", "")),
    ]
    names = ("mm", "convolution", "sum", "topk", "embedding", "cat", "_fused_adamw_", "where", "gather")
    for name in names:
        assert has_rule(f"aten::{name}")
        for shapes in strange:
            told = bytes_moved(f"aten::{name}", shapes)
            assert told is None or told >= 0
    for shapes in strange:
        assert bytes_moved("aten::mm", shapes) is None
        assert bytes_moved("aten::_scaled_dot_product_flash_attention", shapes) is None
