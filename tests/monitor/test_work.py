"""What a monitor makes of FLOPs, counts and a peak: every number follows by hand."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models import build
from monitoring import Clock, monitoring
from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.config_flops import model_flops as model_flops_module
from profiler_wrapper.config_flops.model_flops import model_flops
from profiler_wrapper.errors import Notices, ProfilerWrapperWarning, WrongUse
from profiler_wrapper.monitor import steps as steps_module
from profiler_wrapper.monitor.flop_probe import FlopProbe
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord
from profiler_wrapper.monitor.work import Measurement, Parallelism, Roof, StepWorks, why_over_peak
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.tables.work.roofline import StepWork
from programs import warned

# Forward and backward of the Llama of the tests on 2 x 16 tokens: 2 layers, 64 wide, 4 heads, 2 of keys, 128 words.
PROJECTIONS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
MLP = 2 * 3 * 64 * 128
HEAD = 64 * 128
PLAIN_CALL = nn.Module.__call__
LLAMA = 3 * 2 * (2 * 16) * (PROJECTIONS + MLP + HEAD) + 3 * 2 * 2 * 2 * (2 * 16 * 16 * 64)


def peaks(**flops: float) -> Peaks:
    return Peaks(device="A device", flops_per_s=flops, bandwidth_bytes_per_s=None, source="made up")


def one_step(
    directory: Path, seconds: float = 0.5, *, step: Mapping[str, Any] | None = None, **options: Any
) -> StepRecord:
    clock = Clock()
    with monitoring(directory, clock=clock, **options) as (monitor, records):
        monitor.start_step()
        clock.now_s += seconds
        monitor.end_step(**(step or {}))
    return records[0]


def test_mfu_and_rates_are_exact(tmp_path: Path) -> None:
    record = one_step(
        tmp_path, 0.5, flops_per_step=2e12, peaks=8, dtype="bfloat16", step={"tokens": 4096, "samples": 4}
    )
    assert record.mfu == 0.5  # 4 TFLOP/s of 8
    assert (record.tflops_per_gpu, record.tflops_total) == (4.0, 4.0)
    assert (record.tokens_per_s, record.samples_per_s) == (8192.0, 8.0)
    assert (record.flops_source, record.flops_step, record.hfu) == ("given", None, None)


def test_more_than_the_peak_is_told_as_it_is_with_the_likely_cause(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match=r"MFU is 2\.00 in step 0.*FLOPs are given") as told:
        record = one_step(tmp_path, 0.5, flops_per_step=1e12, peaks=peaks(bfloat16=1e12), dtype="bfloat16")
    assert record.mfu == 2.0
    assert len(told) == 1


@pytest.mark.parametrize("source", ["given", "config", "measured"])
def test_more_than_the_peak_says_where_both_numbers_are_from(source: Any) -> None:
    some = works()
    some.roof = Roof(peaks(bfloat16=1e12), Notices())
    record = StepRecord(
        step=3, timestamp=0.0, step_time_s=1.0, model_flops=2e12, model_time_at_peak_s=2.0, flops_source=source
    )
    assert re.search(
        rf"MFU is 2\.00 in step 3.*FLOPs are {source}.*peak is too low \(made up", why_over_peak(record, some)
    )


def test_a_type_that_is_too_wide_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.warns(ProfilerWrapperWarning, match=r"another type than that of its parameters give dtype='bfloat16'"):
        one_step(tmp_path, 0.5, flops_per_step=1e12, peaks=peaks(float32=1e12, bfloat16=1e13), model=model)


@pytest.mark.parametrize(
    ("options", "job_flops", "device_share"),
    [
        ({"world_size": 8}, 8.0, 1.0),
        ({"world_size": 8, "tensor_parallel": 4}, 2.0, 0.25),
        ({"world_size": 8, "tensor_parallel": 2, "pipeline_parallel": 2}, 2.0, 0.25),
        ({"world_size": 8, "tensor_parallel": 2, "context_parallel": 4}, 1.0, 0.125),
        ({"data_parallel": 2, "tensor_parallel": 2}, 2.0, 0.5),
        ({"world_size": 8, "tensor_parallel": 4, "counts": "job"}, 1.0, 0.125),
    ],
)
def test_totals_of_a_job_follow_from_how_it_is_divided(
    tmp_path: Path, options: dict[str, Any], job_flops: float, device_share: float
) -> None:
    """FLOPs given for this rank's batch are those of as many ranks as have data of their own."""
    record = one_step(
        tmp_path, 1.0, flops_per_step=1e12, peaks=10, dtype="float16", step={"tokens": 100, "samples": 10}, **options
    )
    assert record.tflops_total == job_flops
    assert record.tflops_per_gpu == device_share
    assert record.mfu == device_share / 10
    assert (record.tokens, record.samples) == (100 * job_flops, 10 * job_flops)


def test_config_flops_are_those_of_this_ranks_batch(tmp_path: Path) -> None:
    model = build("llama").model
    record = one_step(tmp_path, 1.0, model=model, batch_size=2, seq_length=16, world_size=4, tensor_parallel=2, peaks=1)
    assert record.model_flops == 2 * LLAMA
    assert record.model_time_at_peak_s == 2 * LLAMA / 4 / 1e12
    assert (record.samples, record.tokens, record.flops_source) == (4, 64, "config")


def test_batches_of_another_size_have_other_flops(tmp_path: Path) -> None:
    model = build("llama").model
    whole = one_step(tmp_path, model=model, step={"samples": 2, "tokens": 32})
    half = one_step(tmp_path, model=model, batch_size=2, seq_length=16, step={"samples": 1})
    assert (whole.model_flops, half.model_flops) == (LLAMA, LLAMA / 2)
    assert (half.samples, half.tokens) == (1, 16)


def test_real_tokens_are_counted_with_a_mask_and_flops_with_the_padding(tmp_path: Path) -> None:
    mask = torch.ones(2, 16)
    mask[1, 5:] = 0
    record = one_step(tmp_path, model=build("llama").model, data_parallel=3, step={"attention_mask": mask})
    assert (record.samples, record.tokens) == (3 * 2, 3 * (16 + 5))
    assert record.model_flops == 3 * LLAMA


def test_masks_of_micro_batches_add_up(tmp_path: Path) -> None:
    record = one_step(tmp_path, step={"attention_mask": [torch.ones(2, 8), torch.ones(1, 8)]})
    assert (record.samples, record.tokens) == (3, 24)


def test_micro_batches_of_unlike_shapes_have_the_flops_of_each(tmp_path: Path) -> None:
    model = build("llama").model
    shapes = [(2, 16), (1, 8), (3, 5)]
    of_each = sum(model_flops(model, *shape).total for shape in shapes)
    masks = [torch.ones(shape) for shape in shapes]
    masks[2][:, 3:] = 0
    by_masks = one_step(tmp_path, model=model, data_parallel=2, step={"attention_mask": masks})
    by_shapes = one_step(tmp_path, model=model, data_parallel=2, step={"shapes": [torch.Size(s) for s in shapes]})
    assert (by_masks.samples, by_masks.tokens, by_masks.model_flops) == (12, 2 * (32 + 8 + 9), 2 * of_each)
    assert (by_shapes.samples, by_shapes.tokens, by_shapes.model_flops) == (12, 2 * (32 + 8 + 15), 2 * of_each)
    together = one_step(tmp_path, model=model, step={"shapes": shapes, "samples": 6, "tokens": 49})
    assert (together.samples, together.tokens, together.model_flops) == (6, 49, of_each)


def test_shapes_of_a_part_of_the_batch_stand_for_the_rest_if_they_are_alike(tmp_path: Path) -> None:
    model = build("llama").model
    alike = one_step(tmp_path, model=model, step={"attention_mask": torch.ones(1, 16), "samples": 2})
    assert alike.model_flops == LLAMA
    with pytest.warns(ProfilerWrapperWarning, match="nothing tells the batch"):
        unlike = one_step(tmp_path, model=model, step={"shapes": [(1, 16), (1, 8)], "samples": 4})
    assert unlike.model_flops is None


@pytest.mark.parametrize("shapes", [(2, 16), [(2, 3, 16, 16)], [], "ab", [(2, None)]])
def test_shapes_that_are_none_are_left_out_with_one_warning(tmp_path: Path, shapes: Any) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="the monitor leaves out shapes") as told:
        record = one_step(tmp_path, model=build("llama").model, batch_size=2, seq_length=16, step={"shapes": shapes})
    assert len(told) == 1
    assert record.model_flops == LLAMA


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 8,
       "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
DIT = {"_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4,
       "num_layers": 1, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
       "activation_fn": "gelu-approximate"}  # fmt: skip
COGVIDEOX = {"_class_name": "CogVideoXTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 4,
             "in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_height": 8, "sample_width": 8,
             "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 226,
             "text_embed_dim": 8, "time_embed_dim": 8, "activation_fn": "gelu-approximate"}  # fmt: skip


@pytest.mark.parametrize("config", [VIT, DIT, COGVIDEOX], ids=["ViT", "DiT", "CogVideoX"])
def test_models_of_images_and_videos_need_only_how_many(tmp_path: Path, config: dict[str, Any]) -> None:
    record = one_step(tmp_path, model_config=config, step={"samples": 3})
    assert record.model_flops == model_flops(config, 3).total
    assert record.flops_source == "config"


def test_a_formula_that_needs_long_sequences_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_long_ones(config: object, sequences: int, length: int | None, **others: Any) -> SimpleNamespace:
        if length is None or length < 226:
            raise WrongUse("sequences have none but text")
        return SimpleNamespace(total=sequences * length)

    monkeypatch.setattr(model_flops_module, "model_flops", of_long_ones)
    assert one_step(tmp_path, model_config={}, step={"shapes": [(3, 300)]}).model_flops == 900


def test_float32_counts_by_the_peak_of_tf32_where_it_is_multiplied_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"flops_per_step": 1e12, "dtype": "float32", "peaks": {"float32": 1, "tfloat32": 4}}
    assert one_step(tmp_path, 2.0, **given).model_time_at_peak_s == 1.0  # no GPU
    monkeypatch.setattr(steps_module, "run_info", lambda **_: RunInfo(device="A device", device_type="cuda"))
    for precision, seconds in (("highest", 1.0), ("high", 0.25), ("medium", 0.25), (None, 1.0)):
        monkeypatch.setattr(steps_module, "float32_matmul_precision", lambda told=precision: told)
        assert one_step(tmp_path, 2.0, **given).model_time_at_peak_s == seconds


IDS = torch.zeros(2, 16, dtype=torch.long)


def said_of_batches(
    directory: Path, model: nn.Module, *batches: torch.Tensor, step: Mapping[str, Any] | None = None, **told: Any
) -> list[str]:
    """The monitor's warnings about batches in three steps of calls with `batches`."""
    with warnings.catch_warnings(record=True) as said, monitoring(directory, model=model, **told) as (monitor, _):
        warnings.simplefilter("always")
        for _ in range(3):
            monitor.start_step()
            for batch in batches:
                model(batch)
            monitor.end_step(**(step or {}))
    assert nn.Module.__call__ is PLAIN_CALL and not model._forward_pre_hooks
    return [str(one.message) for one in said if "contradicts" in str(one.message)]


def test_a_batch_that_is_not_as_told_is_said_once_with_both_numbers(tmp_path: Path) -> None:
    model = build("llama").model
    (said,) = said_of_batches(tmp_path, model, IDS, batch_size=8, seq_length=4096)
    assert "step 0 is taken to have 8 x 4096, which contradicts its calls of the model, with 2 x 16:" in said
    (said,) = said_of_batches(tmp_path, model, IDS, batch_size=8)
    assert "taken to have 8," in said and "with 2 x 16:" in said
    (said,) = said_of_batches(tmp_path, model, IDS, seq_length=4096, step={"samples": 2, "tokens": 32})
    assert "taken to have 2 x 4096," in said and "with 2 x 16:" in said
    (said,) = said_of_batches(tmp_path, model, IDS, IDS, step={"attention_mask": torch.ones(2, 16)}, batch_size=4)
    assert "taken to have 2 x 16," in said and "with 2 x 16 and 2 x 16:" in said
    (said,) = said_of_batches(tmp_path, nn.Linear(4, 4), torch.zeros(2, 4), batch_size=8)
    assert "taken to have 8," in said and "with 2:" in said


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        (2, {"attention_mask": torch.ones(2, 16)}),
        (4, {"shapes": [(2, 16), (2, 16)]}),
        (None, {"attention_mask": [torch.ones(2, 16)] * 4}),
        (None, {"attention_mask": torch.ones(2, 16), "samples": 8}),
        (None, {"attention_mask": torch.ones(0, 16)}),
    ],
)
def test_a_part_of_the_batch_is_said_without_a_model_too(
    tmp_path: Path, rows: int | None, step: Mapping[str, Any]
) -> None:
    messages = warned(lambda: one_step(tmp_path, batch_size=8, step=step))
    assert [message for message in messages if "rows" in message] == [
        f"attention_mask or shapes have {rows} rows where batch_size=8: samples and tokens are theirs. With several "
        "micro-batches in a step give a list of their masks, or samples= and tokens="
    ] * (rows is not None)


def test_a_batch_of_the_job_is_no_part_of_itself(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "counts": "job", "data_parallel": 4, "world_size": 4}
    messages = warned(lambda: one_step(tmp_path, step={"attention_mask": torch.ones(2, 16)}, **options))
    assert not any("rows" in message for message in messages)


def test_a_batch_that_is_as_told_is_not_said(tmp_path: Path) -> None:
    model = build("llama").model
    told = {"batch_size": 8, "seq_length": 16}
    assert not said_of_batches(tmp_path, model, IDS, batch_size=2, seq_length=16)
    assert not said_of_batches(tmp_path, model, IDS, IDS, IDS, IDS, **told)  # micro-batches
    assert not said_of_batches(tmp_path, model, IDS.reshape(1, 32), batch_size=2, seq_length=16)  # packed
    assert not said_of_batches(tmp_path, model, IDS, step={"shapes": [(2, 16)]}, **told)
    assert not said_of_batches(tmp_path, model, IDS, world_size=4, tensor_parallel=4, **told)
    assert not said_of_batches(tmp_path, nn.Linear(4, 4), torch.zeros(5, 8, 4), batch_size=8)  # samples come second
    with torch.no_grad():
        assert not said_of_batches(tmp_path, model, IDS, **told)  # no training


def test_flops_that_nothing_tells_are_not_known_and_said_once(tmp_path: Path) -> None:
    model = build("llama").model
    nothing_tells = pytest.warns(ProfilerWrapperWarning, match="nothing tells the batch")
    with monitoring(tmp_path, model=model) as (monitor, records), nothing_tells as told:
        for _ in range(3):
            with monitor.step():
                pass
    assert len(told) == 1
    assert [record.model_flops for record in records] == [None] * 3


def test_a_batch_the_formula_does_not_fit_leaves_the_others_known(tmp_path: Path) -> None:
    said = pytest.warns(ProfilerWrapperWarning, match="for a batch of 2: the length of the sequences is missing")
    with monitoring(tmp_path, model=build("llama").model) as (monitor, records), said as told:
        for tokens in (None, 33, 32):
            monitor.end_step(samples=2, tokens=tokens)
    assert len(told) == 1
    assert [record.model_flops for record in records] == [None, None, LLAMA]


def test_where_the_formula_has_failed_a_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []

    def wants(probe: FlopProbe, step: int, *, otherwise_known: bool) -> bool:
        known.append(otherwise_known)
        return False

    monkeypatch.setattr(FlopProbe, "wants", wants)
    with warnings.catch_warnings(), monitoring(tmp_path, model=build("llama").model) as (monitor, _):
        warnings.simplefilter("ignore")
        for tokens in (64, None, 64):
            monitor.start_step()
            monitor.end_step(samples=2, tokens=tokens)
    assert known == [True, True, False]


def test_a_config_no_formula_fits_is_said_when_it_was_given(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="FLOPs by the model's config are not available"):
        record = one_step(tmp_path, model_config={"nothing": 1}, batch_size=1, seq_length=8)
    assert record.mfu is None


def test_an_unknown_device_is_one_warning_and_no_share(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="peak") as told:
        record = one_step(tmp_path, flops_per_step=1e12, peaks=None, dtype="bfloat16")
    assert (record.mfu, record.tflops_per_gpu) == (None, 2.0)
    assert len(told) == 1


def test_a_type_whose_peak_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="that of bfloat16 is not known of A device"):
        assert one_step(tmp_path, flops_per_step=1e12, peaks=peaks(float16=1e12), dtype="bfloat16").mfu is None


def test_without_a_model_the_type_has_to_be_given(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="give dtype='bfloat16'"):
        assert one_step(tmp_path, flops_per_step=1e12, peaks=peaks(bfloat16=1e12)).mfu is None


def test_frozen_models_are_said_to_have_fewer_flops(tmp_path: Path) -> None:
    model = build("llama").model
    model.requires_grad_(False)
    with pytest.warns(ProfilerWrapperWarning, match="100 % of the parameters are not trained"):
        one_step(tmp_path, model=model, batch_size=2, seq_length=16)


def test_memory_of_a_cpu_training_is_that_of_the_process(tmp_path: Path) -> None:
    record = one_step(tmp_path)
    assert record.memory_bytes is not None
    assert record.peak_memory_bytes is not None
    assert 10 << 20 < record.memory_bytes <= record.peak_memory_bytes
    without = one_step(tmp_path, config={"perf_memory_tracking": False})
    assert (without.memory_bytes, without.peak_memory_bytes) == (None, None)


def test_each_type_of_number_has_its_own_peak() -> None:
    roof = Roof(peaks(bfloat16=1e12, float8=2e12, float32=1e11, tfloat32=5e11), Notices())
    assert roof.time_s({"bfloat16": 1e12, "float8_e4m3fn": 1e12, "int8": 0}) == 1.5
    assert roof.time_s({"float32": 1e11}) == 1.0
    assert Roof(roof.peaks, Notices(), tf32=True).time_s({"float32": 1e11}) == 0.2


def works(convention: str = "full", **options: Any) -> StepWorks:
    sizes = Parallelism(world_size=4, data_parallel=2, **options)
    roof = Roof(peaks(bfloat16=1e12, float32=1e11), Notices())
    return StepWorks(  # type: ignore[arg-type]
        roof=roof, sizes=sizes, convention=convention, notices=Notices(), given=5.0, dtype="bfloat16"
    )


MEASURED = StepWork(
    model_flops_by_dtype={"bfloat16": 8, "float32": 2},
    hardware_flops_by_dtype={"bfloat16": 12, "float32": 2},
    causal_model_flops_by_dtype={"bfloat16": 6, "float32": 2},
    causal_hardware_flops_by_dtype={"bfloat16": 9, "float32": 2},
)


def test_measured_flops_come_before_given_ones_and_are_those_of_one_rank() -> None:
    full, causal = works(), works("causal")
    full.take(Measurement(7, MEASURED))
    causal.take(Measurement(7, MEASURED))
    work, causal_work = full.of(()), causal.of(())
    assert work is not None
    assert causal_work is not None
    assert (work.model_flops, work.hardware_flops, work.flops_source, work.flops_step) == (40, 56, "measured", 7)
    assert work.model_time_at_peak_s == pytest.approx(8e-12 + 2e-11)
    assert work.hardware_time_at_peak_s == pytest.approx(12e-12 + 2e-11)
    assert (causal_work.model_flops, causal_work.hardware_flops) == (32, 44)


def test_what_cannot_be_counted_whole_does_not_count() -> None:
    some = works()
    unknown = StepWork(**{**_by_type(MEASURED), "uncounted": ("mine::attention",)})
    with pytest.warns(ProfilerWrapperWarning, match="step 3 could not be measured.*mine::attention"):
        some.take(Measurement(3, unknown))
    work = some.of(())
    assert work is not None
    assert (work.flops_source, work.model_flops) == ("given", 10.0)


def test_a_step_without_any_flops_is_not_known_rather_than_zero() -> None:
    some = works()
    nothing = StepWork(**{name: {} for name in _by_type(MEASURED)})
    with pytest.warns(ProfilerWrapperWarning, match="no op with FLOPs ran on the thread"):
        some.take(Measurement(3, nothing))


def test_stages_of_a_pipeline_make_the_total_an_estimate() -> None:
    with pytest.warns(ProfilerWrapperWarning, match="estimate"):
        works(pipeline_parallel=2).take(Measurement(3, MEASURED))


def _by_type(work: StepWork) -> dict[str, Any]:
    return {
        name: getattr(work, name)
        for name in (
            "model_flops_by_dtype",
            "hardware_flops_by_dtype",
            "causal_model_flops_by_dtype",
            "causal_hardware_flops_by_dtype",
        )
    }


def test_the_first_rank_writes_and_others_keep_their_numbers(tmp_path: Path) -> None:
    for rank, log_rank, writes in ((0, 0, True), (1, 0, False), (3, -1, True), (1, 1, True)):
        with monitoring(tmp_path, rank=rank, log_rank=log_rank, world_size=4) as (monitor, records):
            with monitor.step(tokens=5):
                pass
            assert bool(records) is writes
            assert monitor.last is not None
            assert monitor.last.tokens == 20
            assert monitor.statistics is not None
            assert monitor.statistics.steps == 1


def test_what_happens_at_the_first_step_is_not_asked_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    for name in ("all_reduce", "barrier", "all_gather", "all_gather_object", "broadcast_object_list", "new_group"):
        monkeypatch.setattr(dist, name, lambda *args, **options: pytest.fail("the monitor communicates"))
    one_step(tmp_path, world_size=4)
    assert TrainingMonitor(tmp_path).active
