"""`calculate_mfu_with_profiler`: the exact share of the peak, and nothing of the model changed."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiler_wrapper.compat import calculate_mfu_with_profiler
from profiler_wrapper.demo import DemoConfig, DemoLlama
from profiler_wrapper.errors import ProfilerWrapperWarning
from tests import models

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


def test_a_frozen_layer_has_no_weight_gradients() -> None:
    model = models.build("llama").model
    model.model.layers[1].mlp.requires_grad_(False)
    mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0)
    assert mfu * 1e12 == pytest.approx(llama_flops() - 2 * BATCH * TOKENS * MLP, rel=1e-12)


def test_the_autocast_of_the_caller_decides_the_type() -> None:
    model = models.build("llama").model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks={"bfloat16": 4.0, "float32": 1.0})
    assert mfu == pytest.approx(llama_flops() / 4e12, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "mixtral"])
def test_families_of_models(name: str) -> None:
    assert 0 < calculate_mfu_with_profiler(models.build(name).model, BATCH, TOKENS, 1.0, peaks=1.0) < 1


def test_a_model_without_a_config() -> None:
    config = DemoConfig(layers=1, hidden=32, heads=4, key_value_heads=2, intermediate=64, vocabulary=64, tokens=TOKENS)
    assert 0 < calculate_mfu_with_profiler(DemoLlama(config), BATCH, TOKENS, 1.0, peaks=1.0) < 1


def test_wrapped_by_ddp_or_compiled(process_group: None) -> None:
    case = models.build("llama")
    wrapped = nn.parallel.DistributedDataParallel(case.model)
    compiled = torch.compile(models.build("llama").model, backend="eager")
    for model in (wrapped, compiled):
        mfu = calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0)
        assert mfu * 1e12 == pytest.approx(llama_flops(), rel=1e-12)
    assert all(math.isfinite(loss) for loss in models.train(case, model=wrapped, steps=2))  # the reducer is whole


class Checkpointed(nn.Module):
    """Two linear layers a block, which are always run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    mfu = calculate_mfu_with_profiler(Checkpointed(), BATCH, TOKENS, 1.0, peaks=1.0)
    assert mfu * 1e12 == pytest.approx(3 * 2 * BATCH * TOKENS * 2 * (8 * 16 + 16 * 8), rel=1e-12)


class Everything(nn.Module):
    """What a careless measurement disturbs: dropout, running statistics, modes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.dropout(self.embedding(ids)))
        return self.head(self.norm(hidden.flatten(0, 1)))


def state(model: nn.Module) -> dict[str, object]:
    return {
        "modes": [module.training for module in model.modules()],
        "tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "grads": [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
    }


def test_nothing_of_the_model_changes() -> None:
    model = Everything().train()
    model.frozen.eval()
    model(torch.randint(32, (2, 4))).sum().backward()
    model.embedding.weight.grad = None  # some have a gradient, some none
    before = copy.deepcopy(state(model))
    call = nn.Module.__call__
    assert calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0) > 0
    assert state(model) == before
    assert nn.Module.__call__ is call


def test_a_failing_model_is_left_as_it_was() -> None:
    class Fails(Everything):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            super().forward(ids)
            raise RuntimeError("no")

    model = Fails().train()
    before = state(model)
    with pytest.warns(ProfilerWrapperWarning, match="MFU is not available: RuntimeError: no"):
        assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0))
    assert state(model) == before
    assert calculate_mfu_with_profiler(Everything(), BATCH, TOKENS, 1.0, peaks=1.0) > 0  # no profiler stayed on


def test_training_is_the_same_with_it() -> None:
    def losses(measured: bool) -> list[float]:
        case = models.build("gpt2")  # drops out
        optimizer = models.optimizer_of(case.model)
        torch.manual_seed(3)
        found = []
        for step in range(3):
            found.append(models.train_step(case, case.model, optimizer, seed=step))
            if measured:
                calculate_mfu_with_profiler(case.model, BATCH, TOKENS, 1.0, peaks=1.0)
        return found

    assert losses(True) == losses(False)


def test_more_than_the_peak_is_said_and_not_cut_off() -> None:
    with pytest.warns(ProfilerWrapperWarning, match="more than the peak allows"):
        mfu = calculate_mfu_with_profiler(models.build("llama").model, BATCH, TOKENS, 1e-6, peaks=1.0)
    assert mfu == pytest.approx(llama_flops() / 1e-6 / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 2.5}, "batch_size=2.5: give a positive whole number"),
        ({"seq_length": "16"}, "seq_length='16': give a positive whole number"),
        ({"step_time": "1 s"}, "step_time='1 s': give a positive number of seconds"),
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


def test_a_sharded_model_is_refused_and_not_waited_for(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = models.build("llama").model
    fully_shard(model)
    with pytest.warns(ProfilerWrapperWarning, match="spread over ranks"):
        assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0))
    zero_3 = models.build("llama").model
    zero_3.lm_head.weight.ds_id = 0
    with pytest.warns(ProfilerWrapperWarning, match="ZeRO-3"):
        assert math.isnan(calculate_mfu_with_profiler(zero_3, BATCH, TOKENS, 1.0, peaks=1.0))


def test_inside_another_profiler_it_is_not_known() -> None:
    model = models.build("llama").model
    with torch.profiler.profile() as profiler:
        with pytest.warns(ProfilerWrapperWarning, match="another torch profiler"):
            assert math.isnan(calculate_mfu_with_profiler(model, BATCH, TOKENS, 1.0, peaks=1.0))
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert profiler.key_averages()  # it went on
