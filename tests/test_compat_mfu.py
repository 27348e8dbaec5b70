"""`calculate_mfu_with_profiler`: the exact share of the peak."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import models
from profiler_wrapper.compat import calculate_mfu_with_profiler
from profiler_wrapper.errors import ProfilerWrapperWarning

BATCH, TOKENS = 2, 16
# The Llama of tests/models.py: width 64, 4 heads of 16, 2 of keys and values, 128 in the MLP, 128 tokens known.
PROJECTIONS = 64 * 64 + 2 * 64 * 32 + 64 * 64
MLP = 3 * 64 * 128
HEAD = 64 * 128
ATTENTION = 4 * BATCH * TOKENS**2 * 64  # scores, and their product with the values


def llama_flops(layers: int = 2, *, causal: bool = False) -> int:
    """Forward, and twice that in backward."""
    matmuls = 2 * BATCH * TOKENS * (layers * (PROJECTIONS + MLP) + HEAD)
    return 3 * (matmuls + layers * (ATTENTION // 2 if causal else ATTENTION))


def causal_attention(tokens: int) -> int:
    return 4 * BATCH * (tokens * (tokens + 1) // 2) * 64


@pytest.fixture(autouse=True)
def _no_warning_unless_expected() -> None:
    warnings.simplefilter("error", ProfilerWrapperWarning)


def test_mfu_is_flops_over_time_over_peak() -> None:
    model = models.build("llama").model
    mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 0.25, peaks=2.0)
    assert mfu == pytest.approx(llama_flops() / 0.25 / 2e12, rel=1e-12)


def test_the_convention_halves_attention_alone() -> None:
    model = models.build("llama").model
    full = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0) * 1e12
    causal = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0, convention="causal") * 1e12
    by_half = 3 * 2 * ATTENTION / 2
    by_triangle = 3 * 2 * (ATTENTION - causal_attention(TOKENS))
    assert round(full - causal) in (round(by_half), round(by_triangle))


def test_it_grows_with_the_batch() -> None:
    model = models.build("llama").model
    one, three = (calculate_mfu_with_profiler(model, size, TOKENS, 1.0, peaks=1.0) for size in (1, 3))
    assert three == pytest.approx(3 * one, rel=1e-12)


def test_the_autocast_of_the_caller_decides_the_type() -> None:
    model = models.build("llama").model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks={"bfloat16": 4.0, "float32": 1.0})
    assert mfu == pytest.approx(llama_flops() / 4e12, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "mixtral"])
def test_families_of_models(name: str) -> None:
    assert 0 < calculate_mfu_with_profiler(models.build(name).model, BATCH, TOKENS, 1.0, peaks=1.0) < 1


def test_wrapped_by_ddp_or_compiled(process_group: None) -> None:
    case = models.build("llama")
    wrapped = nn.parallel.DistributedDataParallel(case.model)
    compiled = torch.compile(models.build("llama").model, backend="eager")
    for model in (wrapped, compiled):
        mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0)
        assert mfu * 1e12 == pytest.approx(llama_flops(), rel=1e-12)
    assert all(math.isfinite(loss) for loss in models.train(case, model=wrapped, steps=2))  # the reducer is whole


def test_more_than_the_peak_is_said_and_not_cut_off() -> None:
    with pytest.warns(ProfilerWrapperWarning, match="more than the peak allows"):
        mfu = calculate_mfu_with_profiler(models.build("llama").model, BATCH, TOKENS, 1e-6, peaks=1.0)
    assert mfu == pytest.approx(llama_flops() / 1e-6 / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, found 2.5"),
        ({"seq_length": "16"}, "seq_length must be a whole number of at least 1, found '16'"),
        ({"step_time": "1 s"}, "could not convert string to float: '1 s'"),
    ],
)
def test_a_number_of_the_wrong_kind_is_told_in_words(wrong: dict[str, object], said: str) -> None:
    arguments = {"batch_size": BATCH, "seq_length": TOKENS, "step_time": 1.0, **wrong}
    with pytest.warns(ProfilerWrapperWarning, match=said) as warned:
        assert math.isnan(calculate_mfu_with_profiler(models.build("llama").model, **arguments, peaks=1.0))  # type: ignore[arg-type]
    assert len(warned) == 1


@pytest.mark.parametrize("wrong", [{"step_time": 0.0}, {"step_time": -1.0}, {"step_time": math.nan}, {"batch_size": 0}])
def test_wrong_arguments_are_a_warning(wrong: dict[str, float]) -> None:
    arguments = {"batch_size": BATCH, "seq_length": TOKENS, "step_time": 1.0, **wrong}
    with pytest.warns(ProfilerWrapperWarning, match=next(iter(wrong))):
        assert math.isnan(calculate_mfu_with_profiler(models.build("llama").model, **arguments, peaks=1.0))


def test_a_peak_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROFILER_WRAPPER_PEAK_TFLOPS", raising=False)
    model = models.build("llama").model
    with pytest.warns(ProfilerWrapperWarning, match="PROFILER_WRAPPER_PEAK_TFLOPS"):
        assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0))
    with pytest.warns(ProfilerWrapperWarning, match="float32"):
        assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks={"bfloat16": 1.0}))
    monkeypatch.setenv("PROFILER_WRAPPER_PEAK_TFLOPS", "1")
    assert calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0) > 0


def test_a_sharded_model_has_the_flops_of_the_plain_one(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = models.build("llama").model
    fully_shard(model)
    mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0)
    assert mfu * 1e12 == pytest.approx(llama_flops(), rel=1e-12)


def test_of_a_model_without_parameters_the_peak_is_not_known() -> None:
    llama = models.build("llama").model
    model = type(type(llama).__name__, (nn.Identity,), {"config": llama.config})()
    with pytest.warns(ProfilerWrapperWarning, match=r"MFU is not available: WrongUse: \w+ has no parameters"):
        assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0))


def test_of_a_model_without_a_config_it_is_not_known() -> None:
    with pytest.warns(ProfilerWrapperWarning, match="MFU is not available: WrongUse: Linear has no config"):
        assert math.isnan(calculate_mfu_with_profiler(nn.Linear(2, 2), BATCH, TOKENS, 1.0, peaks=1.0))
