"""Why attention ran with no faster backend: on a CPU torch itself is asked, for CUDA its conditions one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from profiler_wrapper.advice.attention import Machine, why_not_efficient, why_not_flash
from profiler_wrapper.tables.model import AttentionCallRow
from torch_versions import TORCH

FLASH = 1  # of torch's SDPBackend
CPU = Machine(is_cuda=False, capability=None, switches={}, trains=True)
H100 = Machine(is_cuda=True, capability=(9, 0), switches={}, trains=True)
V100 = Machine(is_cuda=True, capability=(7, 0), switches={}, trains=True)
RTX_3090 = Machine(is_cuda=True, capability=(8, 6), switches={}, trains=True)


def call(
    query: tuple[int, ...] = (2, 4, 16, 64),
    key: tuple[int, ...] | None = None,
    value: tuple[int, ...] | None = None,
    *,
    dtype: str = "bfloat16",
    mask: tuple[int, ...] = (),
    causal: bool = False,
    dropout: float = 0.0,
    strided: bool = False,
) -> AttentionCallRow:
    """A call with these inputs; keys and values as queries where not given."""
    key = query if key is None else key
    return AttentionCallRow(
        layer="attention",
        phase="forward",
        backend="math",
        dtype=dtype,
        query_shape=query,
        key_shape=key,
        value_shape=key if value is None else value,
        mask=bool(mask),
        mask_shape=mask,
        causal=causal,
        dropout=dropout,
        grouped=False,
        strided=strided,
        calls_per_step=1,
        time_per_step_ns=1,
    )


def torch_takes_flash(row: AttentionCallRow) -> bool:
    """What torch would choose for such tensors on a CPU."""
    dtype = getattr(torch, row.dtype)
    query, key, value = (torch.zeros(shape, dtype=dtype) for shape in (row.query_shape, row.key_shape, row.value_shape))
    if row.strided:
        query = torch.zeros((*row.query_shape[:-1], 2 * row.query_shape[-1]), dtype=dtype)[..., ::2]
    mask = torch.zeros(row.mask_shape, dtype=dtype) if row.mask_shape else None
    choice = torch._fused_sdp_choice(query, key, value, mask, row.dropout or 0.0, bool(row.causal))
    return bool(choice == FLASH)


SHAPES = {
    "plain": ((2, 4, 16, 8), None, None),
    "odd head_dim": ((2, 4, 16, 7), None, None),
    "large head_dim": ((2, 4, 16, 320), None, None),
    "longer keys": ((2, 4, 16, 8), (2, 4, 24, 8), None),
    "wide values": ((2, 4, 16, 8), None, (2, 4, 16, 12)),
    "three dimensions": ((4, 16, 8), None, None),
    "one batch of keys": ((2, 4, 16, 8), (1, 4, 16, 8), None),
}
MASKS = {"none": (), "a matrix": (16, 16), "of scores": (2, 1, 16, 16), "of batches": (4, 16, 16), "a row": (1, 16)}


@pytest.mark.parametrize("shapes", SHAPES)
def test_on_a_cpu_a_reason_is_found_exactly_where_torch_takes_no_flash_attention(shapes: str) -> None:
    query, key, value = SHAPES[shapes]
    if shapes == "three dimensions" and TORCH >= (2, 15):
        pytest.skip(f"torch {torch.__version__} takes three dimensions")
    taken = []
    others = product(MASKS.values(), ("float32", "float64", "bfloat16", "float16"), (0.0, 0.1), (False, True))
    for mask, dtype, dropout, strided in others:
        row = call(query, key, value, dtype=dtype, mask=mask, dropout=dropout, strided=strided)
        if mask and (len(query) != 4 or (key is not None and mask[-1] != key[-2])):
            continue  # torch refuses a mask that does not fit
        taken.append(torch_takes_flash(row))
        assert (not why_not_flash(row, CPU)) == taken[-1], row
    assert any(taken) == (shapes not in ("wide values", "three dimensions", "one batch of keys"))


def causes(row: AttentionCallRow, machine: Machine) -> list[str]:
    return [reason.cause for reason in why_not_flash(row, machine)]


def test_on_cuda_flash_attention_has_these_conditions() -> None:
    assert causes(call(), H100) == []
    assert causes(call(dropout=0.1, causal=True), H100) == []  # which it takes, other than on a CPU
    assert causes(call((2, 4, 16, 100)), H100) == []  # torch fills up to a multiple of 8
    assert causes(call(dtype="float32"), H100) == ["dtype"]
    assert causes(call(mask=(16, 16)), H100) == ["mask"]
    assert causes(call((2, 4, 16, 320)), H100) == ["head_dim"]
    assert causes(call((2, 4, 16, 192), None, (2, 4, 16, 128)), H100) == ["head_dim"]
    assert causes(call((2, 4, 1, 64), (2, 4, 16, 64), causal=True), H100) == ["causal"]
    assert causes(call((4, 16, 64)), H100) == ["dimensions"]
    assert causes(call(strided=True), H100) == ["strides"]
    assert causes(call(dtype="float16"), V100) == ["device"]
    assert causes(call(mask=(16, 16), dtype="float32"), H100) == ["mask", "dtype"]


def test_training_with_wide_heads_has_no_kernel_where_shared_memory_is_small() -> None:
    inference = RTX_3090._replace(trains=False)
    assert causes(call((2, 4, 16, 208)), RTX_3090) == ["head_dim"]
    assert causes(call((2, 4, 16, 208)), inference) == []
    assert causes(call((2, 4, 16, 256)), RTX_3090) == []
    assert causes(call((2, 4, 16, 256), dropout=0.1), RTX_3090) == ["head_dim"]


def test_what_is_switched_off_is_the_first_reason() -> None:
    off = H100._replace(switches={"flash": False})
    assert causes(call(mask=(16, 16)), off) == ["switched off", "mask"]
    assert causes(call(), H100._replace(switches={"flash": True})) == []


def test_memory_efficient_attention_has_its_own_conditions() -> None:
    assert why_not_efficient(call(mask=(16, 16)), V100._replace(capability=(8, 0))) == ()
    assert [reason.cause for reason in why_not_efficient(call(), V100)] == ["dtype"]  # bfloat16 came with Ampere
    assert [reason.cause for reason in why_not_efficient(call((2, 4, 16, 100), dtype="float16"), V100)] == ["head_dim"]
    assert why_not_efficient(call(dtype="float32"), V100) == ()
