"""What a step is where nothing trains: a request; and the parts of any step. Against hooks of the test's own."""

from __future__ import annotations

import operator
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.generation.utils import GenerationMixin

import models
from profiler_wrapper import ProfileResult, ProfilerWrapper
from profiling import QUICK, result_of

pytestmark = pytest.mark.full

IDS = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(0))


def profiler(model: object, output_dir: Path, **options: Any) -> ProfilerWrapper:
    quiet = {"files": QUICK, "enable_print_summary": False, "background": False}
    return ProfilerWrapper(model, output_dir=output_dir, **quiet, **options)


def llama(**config: Any) -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **{**small, **config})).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def t5() -> Any:
    torch.manual_seed(0)
    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=128, **small)).eval()


def whisper() -> Any:
    torch.manual_seed(0)
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (
        ("layers", 2), ("attention_heads", 4), ("ffn_dim", 64)
    )}  # fmt: skip
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=32, max_source_positions=50, max_target_positions=64, num_mel_bins=8, **sides, **tokens
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def qwen2_vl() -> Any:
    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 128, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def image_and_words() -> dict[str, torch.Tensor]:
    """An image of 64 patches, four of which make a token, and five words."""
    ids = torch.tensor([[5, 122, *[120] * 16, 123, 6, 7]])
    image = {"pixel_values": torch.ones(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return image | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 120).int()}


def generate(model: Any, tokens: int = 5, **options: Any) -> torch.Tensor:
    if not {"input_features", "input_ids"} & options.keys():
        options["input_ids"] = IDS
    return model.generate(min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, **options)


def learn(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor = IDS, *, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def checked(result: ProfileResult) -> ProfileResult:
    """The parts of each step add up to its time."""
    for step in result.steps:
        assert sum(row.time_ns for row in result.parts if row.step == step.step) == step.time_ns
    return result


def parts_of(result: ProfileResult) -> list[dict[str, int]]:
    """Per step how many there are of each part."""
    found: dict[int, Counter[str]] = {}
    for row in result.parts:
        if row.step is not None:
            found.setdefault(row.step, Counter())[row.part] += row.count
    return [dict(one) for one in found.values()]


@contextmanager
def counted(*modules: nn.Module) -> Iterator[list[int]]:
    """How often each is called, by hooks."""
    calls = [0] * len(modules)

    def count(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[place] += 1

        return hook

    handles = [module.register_forward_hook(count(i)) for i, module in enumerate(modules)]
    yield calls
    for handle in handles:
        handle.remove()


# --- generate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_a_request_is_a_step_with_its_prefill_and_tokens(given: bool, tmp_path: Path) -> None:
    model = llama()
    original, alone = GenerationMixin.generate, generate(model)
    with profiler(model if given else None, tmp_path) as prof:
        generated = [generate(model) for _ in range(6)]
    assert all(torch.equal(alone, one) for one in generated)
    assert GenerationMixin.generate is original
    result = checked(result_of(prof))
    assert result.run["step_source"] == "requests"
    assert (result.run["full_steps"], result.run["timed_steps"]) == ([0, 1], [2, 3, 4])
    assert parts_of(result) == [{"prefill": 1, "token": 4, "other": 1}] * 3
    assert [(one["what"], one["count"]) for one in result.run["left_out"]] == [("requests of warm-up", 2)]
    assert {row.phase: row.calls for row in result.rows("model.layers.1")} == {"prefill": 3, "decode": 12}


@pytest.mark.parametrize(("make", "inputs"), [(t5, {}), (whisper, {"input_features": torch.ones(1, 8, 100)})])
def test_an_encoder_and_a_decoder_are_called_as_hooks_see_it(
    make: Callable[[], Any], inputs: dict[str, Any], tmp_path: Path
) -> None:
    model = make()
    decoder, encoder = model.get_decoder(), model.get_encoder()
    with profiler(model, tmp_path, steps="all") as prof, counted(encoder, decoder) as calls:
        for _ in range(3):
            generate(model, **inputs)
    result = checked(result_of(prof))
    assert [row.step for row in result.steps if row.step is not None] == [0, 1, 2]
    names = {layer.rpartition(".")[2]: layer for layer in {row.layer for row in result.layers} if layer.count(".") < 2}
    seen = [sum(row.calls or 0 for row in result.rows(names[name])) for name in ("encoder", "decoder")]
    assert seen == calls
    assert calls[0] == 3 and all(step["prefill"] == 1 for step in parts_of(result))


def test_a_vision_tower_sees_the_image_once_a_request(tmp_path: Path) -> None:
    model, inputs = qwen2_vl(), image_and_words()
    alone, inner = generate(model, **inputs), model.model
    with profiler(model, tmp_path, steps="all") as prof, counted(inner.visual, inner.language_model) as calls:
        assert all(torch.equal(alone, generate(model, **inputs)) for _ in range(3))
    result = checked(result_of(prof))
    assert result.run["step_source"] == "requests"
    assert calls == [3, 15]
    assert [row.calls for row in result.rows("model.visual")] == [3]
    assert {row.phase: row.calls for row in result.rows("model.language_model")} == {"prefill": 3, "decode": 12}
    assert parts_of(result) == [{"model.visual": 1, "prefill": 1, "token": 4, "other": 1}] * 3


@pytest.mark.parametrize("trained", [False, True])
def test_two_towers_are_one_step(trained: bool, tmp_path: Path) -> None:
    """By calls, where a tower that was called already begins the next step; by the optimizer of both."""
    torch.manual_seed(0)
    users, items = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
    optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], 0.1)
    with (
        profiler({"users": users, "items": items}, tmp_path) as prof,
        counted(users, items) as calls,
        torch.set_grad_enabled(trained),
    ):
        for _ in range(8):
            likeness = (users(torch.ones(3, 8)) * items(torch.ones(3, 8))).sum()
            if trained:
                likeness.backward()
                optimizer.step()
                optimizer.zero_grad()
    result = checked(result_of(prof))
    assert calls == [8, 8]
    assert result.run["step_source"] == ("optimizer" if trained else "root calls")
    assert result.run["timed_steps"] == [2, 3, 4]
    assert [(step["users"], step["items"]) for step in parts_of(result)] == [(1, 1)] * 3
    assert {row.layer: row.calls for row in result.rows("users") + result.rows("items") if row.calls} == {
        "users": 3, "items": 3
    }  # fmt: skip


def test_assisted_decoding_shows_what_it_verifies(tmp_path: Path) -> None:
    model, draft = llama(), llama(num_hidden_layers=1, hidden_size=16)
    alone = generate(model, 12, assistant_model=draft)
    with profiler({"target": model, "draft": draft}, tmp_path, steps="all") as prof, counted(model) as calls:
        assert torch.equal(alone, generate(model, 12, assistant_model=draft))
    result = checked(result_of(prof))
    phases = {row.phase: row.calls for row in result.rows("target")}
    assert phases["prefill"] == 1 and phases["verify"] and sum(map(int, filter(None, phases.values()))) == calls[0]
    assert "verify" not in {row.phase for row in result.rows("draft")}
    assert parts_of(result)[0]["target verify"] == phases["verify"]


def test_many_tokens_share_rows_and_none_is_lost(tmp_path: Path) -> None:
    model = llama()
    with profiler(model, tmp_path, steps="all") as prof:
        generate(model, 100)
    result = checked(result_of(prof))
    tokens = [row for row in result.parts if row.part == "token"]
    assert sum(row.count for row in tokens) == 99 and len(tokens) <= 64
    assert [row.index for row in tokens] == [sum(row.count for row in tokens[:i]) for i in range(len(tokens))]


def test_a_request_that_fails_leaves_its_class_as_it_was(tmp_path: Path) -> None:
    model = llama()
    original = GenerationMixin.generate
    with pytest.raises(ZeroDivisionError), profiler(model, tmp_path):
        model.model.layers[1].register_forward_hook(lambda *_: 1 // 0)
        generate(model)
    assert GenerationMixin.generate is original


def test_a_compiled_function_may_make_a_request(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)

    @torch.compile(backend="eager")
    def asked(ones: torch.Tensor) -> torch.Tensor:
        twice = ones * 2
        torch._dynamo.graph_break()
        return generate(model, 2) * twice

    alone = asked(torch.ones(1))
    with profiler(model, tmp_path) as prof:
        said = [asked(torch.ones(1)) for _ in range(6)]
    assert all(torch.equal(one, alone) for one in said)
    result = checked(result_of(prof))
    assert result.complete and result.run["step_source"] == "requests" and result.run["timed_steps"] == [2, 3, 4]


def test_a_class_made_later_is_heard_from_its_first_request_on(tmp_path: Path) -> None:
    model = llama()
    with profiler(None, tmp_path, steps="all") as prof:

        class Late(transformers.LlamaForCausalLM):
            def generate(self, *args: Any, **options: Any) -> Any:
                return super().generate(*args, **options)

        model.__class__ = Late
        for _ in range(3):
            generate(model)
    assert parts_of(checked(result_of(prof))) == [{"prefill": 1, "token": 4, "other": 1}] * 3


def test_a_loop_by_hand_is_asked_to_say_what_a_step_is(tmp_path: Path) -> None:
    model = llama()
    with profiler(model, tmp_path) as prof, torch.no_grad():
        past, token = None, IDS
        for _ in range(8):
            out = model(input_ids=token, past_key_values=past, use_cache=True)
            past, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    result = result_of(prof)
    assert result.run["step_source"] == "root calls"
    assert any("call prof.step()" in warning for warning in result.warnings)


# --- a higher rule discards what a lower one counted --------------------------------------------


@pytest.mark.parametrize("calls", [1, 3, 7])
def test_the_first_step_of_the_user_discards_what_was_counted_otherwise(calls: int, tmp_path: Path) -> None:
    """Seven calls are a whole window, which was recorded before the user says what a step is."""
    model = llama()
    with profiler(model, tmp_path) as prof, torch.no_grad():
        for _ in range(8):
            for _ in range(calls):
                model(IDS)
            prof.step()
    result = checked(result_of(prof))
    assert result.run["step_source"] == "prof.step()"
    assert [step["LlamaForCausalLM"] for step in parts_of(result)] == [calls] * 3


def test_requests_before_training_were_none(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profiler(model, tmp_path) as prof:
        for _ in range(2):
            generate(model)
        for _ in range(8):
            learn(model, optimizer)
    result = checked(result_of(prof))
    assert result.run["step_source"] == "optimizer"
    assert parts_of(result) == [{"train": 1, "optimizer": 1, "other": 1}] * 3
    assert "before the first step of an optimizer" in {one["what"] for one in result.run["left_out"]}


# --- training -----------------------------------------------------------------------------------


def test_rollout_score_and_training_are_parts_of_a_step(tmp_path: Path) -> None:
    policy, reference = llama().train(), llama()
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    with profiler(None, tmp_path) as prof:
        for _ in range(7):
            tokens = generate(policy)
            with torch.no_grad():
                reference(tokens)
            learn(policy, optimizer, tokens, micro_batches=2)
    result = checked(result_of(prof))
    assert result.run["timed_steps"] == [2, 3, 4]
    counts = {"rollout": 1, "score: LlamaForCausalLM": 1, "train": 2, "optimizer": 1, "other": 1}
    assert parts_of(result) == [counts] * 3


def test_the_keys_of_the_models_are_the_roles(tmp_path: Path) -> None:
    policy, reward = llama().train(), llama()
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    with profiler({"policy": policy, "reward": reward}, tmp_path) as prof:
        for _ in range(7):
            with torch.no_grad():
                reward(IDS)
            learn(policy, optimizer)
    result = checked(result_of(prof))
    assert [{*step} - {"other"} for step in parts_of(result)] == [{"policy", "reward", "optimizer"}] * 3
    backward_ns = sum(row.time_ns for row in result.layers if row.layer == "policy" and row.phase == "backward")
    assert sum(row.time_ns for row in result.parts if row.part == "policy") > backward_ns > 0


def test_an_evaluation_in_between_is_left_out_of_the_mean(tmp_path: Path) -> None:
    case = models.build("llama")
    with profiler(case.model, tmp_path) as prof:
        for step in range(8):
            models.train(case, steps=1)
            if step == 3:
                case.model.eval()
                with torch.no_grad():
                    for seed in range(4):
                        case.model(**case.batch(seed))
                case.model.train()
    result = checked(result_of(prof))
    assert result.run["timed_steps"] == [2, 3, 5]
    left_out = {one["what"]: one["count"] for one in result.run["left_out"]}
    assert left_out == {"steps of warm-up": 2, "steps with an evaluation": 1}
    assert {row.phase: row.calls for row in result.rows("model.layers.0")} == {
        "forward": 3, "backward": None, "accumulate_grad": None
    }  # fmt: skip
    assert "left out: steps with an evaluation (1," in result.table()


# --- pipelines ----------------------------------------------------------------------------------


def transformer_pipeline() -> Any:
    """A DiT, whose pipeline needs no text."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        num_embeds_ada_norm=1000, norm_num_groups=2,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=[8], norm_num_groups=4, latent_channels=4)
    pipeline = diffusers.DiTPipeline(
        transformer=transformer.eval(), vae=vae.eval(), scheduler=diffusers.DDIMScheduler()
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stable_diffusion_pipeline() -> Any:
    pytest.importorskip("diffusers")
    return runpy.run_path(str(Path(__file__).parents[1] / "docs_preludes" / "diffusion_pipeline.py"))["pipe"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "prompt", "per_image"),
    [
        (transformer_pipeline, [1], {"transformer": 4, "vae.decoder": 1}),
        (stable_diffusion_pipeline, "a cat", {"text_encoder": 2, "unet": 4, "vae.decoder": 1}),
    ],
)
def test_an_image_is_a_step_of_all_its_models(
    make: Callable[[], Any], prompt: Any, per_image: dict[str, int], tmp_path: Path
) -> None:
    pipeline = make()
    original = type(pipeline).__call__

    def image() -> Any:
        options = {"num_inference_steps": max(per_image.values()), "generator": torch.Generator().manual_seed(0)}
        return pipeline(prompt, output_type="np", **options).images

    alone = image()
    with (
        profiler(pipeline, tmp_path, steps="all") as prof,
        counted(*(operator.attrgetter(name)(pipeline) for name in per_image)) as calls,
    ):
        images = [image() for _ in range(4)]
    assert all((one == alone).all() for one in images)
    assert type(pipeline).__call__ is original
    result = checked(result_of(prof))
    assert result.run["step_source"] == "requests"
    seen = [sum(row.calls or 0 for row in result.rows(name)) for name in per_image]
    assert seen == calls == [4 * count for count in per_image.values()]
    assert [{name: step[name] for name in per_image} for step in parts_of(result)] == [per_image] * 4

    with profiler(pipeline, tmp_path) as prof:
        for _ in range(6):
            image()
    timed = checked(result_of(prof))
    assert timed.run["timed_steps"] == [2, 3, 4]
    assert [{name: step[name] for name in per_image} for step in parts_of(timed)] == [per_image] * 3
