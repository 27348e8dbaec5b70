"""The KV cache of requests, against the formula by hand: 2 * layers * kv_heads * head_dim * element_size * tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, QuantizedLayer, StaticCache

from page_tables import Opener
from profiler_wrapper import ProfileResult, ProfilerWrapper
from profiler_wrapper.capture.kv_cache import RequestCaches
from profiler_wrapper.units import file_size
from profiling import QUICK, result_of

pytestmark = pytest.mark.full

PROMPT, NEW = 12, 5
TOKENS = PROMPT + NEW - 1  # the last one is not given to the model any more
IDS = torch.randint(3, 100, (2, PROMPT), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
GREEDY = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False}
HEAD_DIM, FLOAT = 8, 4


def llama(kv_heads: int = 4, **config: Any) -> Any:
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig, num_key_value_heads=kv_heads, **config)


def mistral(window: int) -> Any:
    return _made(
        transformers.MistralForCausalLM, transformers.MistralConfig, num_key_value_heads=2, sliding_window=window
    )


def gemma(window: int, **config: Any) -> Any:
    """Every second layer slides."""
    sizes = {"num_key_value_heads": 2, "head_dim": HEAD_DIM, "sliding_window": window, **config}
    return _made(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **sizes)


def _made(cls: Any, config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = cls(config(**{**SMALL, "num_attention_heads": 4, **options})).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def t5() -> Any:
    torch.manual_seed(0)
    small = {"d_model": 32, "d_kv": HEAD_DIM, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=128, **small)).eval()


def profiled(model: Any, output_dir: Path, ids: torch.Tensor = IDS, **options: Any) -> ProfileResult:
    """One request, whose text is the same with and without us."""
    alone = model.generate(ids, **{**GREEDY, **options})
    with profiler(model, output_dir) as prof:
        assert torch.equal(model.generate(ids, **{**GREEDY, **options}), alone)
    return result_of(prof)


def profiler(model: Any, output_dir: Path) -> ProfilerWrapper:
    quiet: dict[str, Any] = {"files": QUICK, "enable_print_summary": False, "background": False}
    return ProfilerWrapper(model, output_dir=output_dir, steps="all", **quiet)


def cache_of(result: ProfileResult) -> dict[str, Any]:
    (cache,) = result.run["kv_cache"]
    assert cache["bytes"] == sum(row["bytes"] * row["count"] for row in cache["layers"])
    found: dict[str, Any] = cache
    return found


def longer(cache: dict[str, Any]) -> dict[int, int]:
    return {one["tokens"]: one["bytes"] for one in cache["contexts"]}


def line(result: ProfileResult) -> str:
    lines = [one for one in result.table().splitlines() if one.startswith("KV cache:")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_and_grouped_heads(kv_heads: int, dtype: torch.dtype, tmp_path: Path) -> None:
    result = profiled(llama(kv_heads).to(dtype), tmp_path)
    cache, each = cache_of(result), 2 * kv_heads * HEAD_DIM * dtype.itemsize
    assert (cache["tokens"], cache["sequences"], cache["beams"]) == (TOKENS, 2, 1)
    assert cache["bytes_after_prefill"] == each * 4 * 2 * PROMPT
    assert cache["bytes"] == each * 4 * 2 * TOKENS
    assert cache["bytes_per_token"] == each * 4 * 2
    (row,) = cache["layers"]
    assert (row["kind"], row["count"], row["bytes_per_token"]) == ("full", 4, each)
    assert row["held_bytes"] == row["bytes"] and row["dtype"] == str(dtype).removeprefix("torch.")
    assert longer(cache)[32768] == each * 4 * 2 * 32768
    said = f"at {TOKENS} tokens of 2 sequences, {file_size(each * 4 * 2)} a token of each; "
    assert said in line(result) and line(result).endswith(" at 131072 tokens")


def test_what_a_longer_context_would_take_is_what_it_takes(tmp_path: Path) -> None:
    """The estimate for 4096 tokens, from a short request, against one with so many."""
    model = gemma(window=8, num_hidden_layers=2, num_attention_heads=2)
    short = cache_of(profiled(model, tmp_path / "short", IDS[:1]))
    ids = torch.randint(3, 100, (1, 4092), generator=torch.Generator().manual_seed(0))
    with profiler(model, tmp_path / "long") as prof:
        model.generate(ids, **GREEDY)
    assert cache_of(result_of(prof))["tokens"] == 4096
    assert cache_of(result_of(prof))["bytes"] == longer(short)[4096]


def test_a_sliding_window_keeps_all_but_the_token_that_comes(tmp_path: Path) -> None:
    result = profiled(mistral(window=8), tmp_path)
    cache, each = cache_of(result), 2 * 2 * HEAD_DIM * FLOAT
    assert cache["bytes_after_prefill"] == cache["bytes"] == each * 4 * 2 * 7
    (row,) = cache["layers"]
    assert (row["kind"], row["window"], cache["tokens"], cache["bytes_per_token"]) == ("sliding", 8, TOKENS, 0)
    # The seven are the end of a tensor of eight: what came before is kept with them.
    assert row["held_bytes"] == each * 2 * 8
    assert set(longer(cache).values()) == {cache["bytes"]}
    assert "window of 8" in line(result)


def test_of_two_kinds_of_layers_each_has_its_row(tmp_path: Path) -> None:
    cache, each = cache_of(profiled(gemma(window=8), tmp_path)), 2 * 2 * HEAD_DIM * FLOAT
    rows = {row["kind"]: row for row in cache["layers"]}
    assert (rows["sliding"]["count"], rows["sliding"]["bytes"]) == (2, each * 2 * 7)
    assert (rows["full"]["count"], rows["full"]["bytes"]) == (2, each * 2 * TOKENS)
    assert cache["bytes_per_token"] == each * 2 * 2
    assert longer(cache)[4096] == each * 2 * 2 * (7 + 4096)


def test_a_window_that_is_not_full_grows(tmp_path: Path) -> None:
    cache, each = cache_of(profiled(mistral(window=64), tmp_path)), 2 * 2 * HEAD_DIM * FLOAT
    assert (cache["bytes"], cache["bytes_per_token"]) == (each * 4 * 2 * TOKENS, each * 4 * 2)
    assert longer(cache)[4096] == each * 4 * 2 * 63


def test_a_static_cache_has_its_capacity_from_the_first_call(tmp_path: Path) -> None:
    model = llama(2)
    result = profiled(model, tmp_path, cache_implementation="static", disable_compile=True, max_length=40)
    cache, each = cache_of(result), 2 * 2 * HEAD_DIM * FLOAT
    (row,) = cache["layers"]
    assert (row["kind"], row["capacity"], cache["tokens"]) == ("static", PROMPT + NEW - 1, TOKENS)
    assert cache["bytes_after_prefill"] == cache["bytes"] == each * 4 * 2 * TOKENS
    assert longer(cache)[4096] == each * 4 * 2 * 4096


def test_a_static_cache_of_ones_own_tells_no_tokens_where_it_held_some(tmp_path: Path) -> None:
    model = llama(2)
    cache = StaticCache(config=model.config, max_cache_len=40)
    with profiler(model, tmp_path) as prof:
        model.generate(IDS, past_key_values=cache, disable_compile=True, **GREEDY)
        first = model.generate(IDS, past_key_values=cache, disable_compile=True, **GREEDY)
    found, each = cache_of(result_of(prof)), 2 * 2 * HEAD_DIM * FLOAT
    assert first is not None and found["requests"] == 2
    assert found["bytes"] == each * 4 * 2 * 40 and found["layers"][0]["capacity"] == 40
    caches = RequestCaches()
    caches.call("m", "prefill", {"past_key_values": cache}, 3)(None)
    assert caches.describe(1)[0]["tokens"] is None and caches.describe(1)[0]["bytes"] == found["bytes"]


def test_static_layers_with_a_window(tmp_path: Path) -> None:
    result = profiled(gemma(window=8), tmp_path, cache_implementation="static", disable_compile=True)
    cache, each = cache_of(result), 2 * 2 * HEAD_DIM * FLOAT
    assert {row["kind"]: row["capacity"] for row in cache["layers"]} == {"static": TOKENS, "static sliding": 8}
    assert cache["bytes"] == each * 2 * 2 * (TOKENS + 8)
    assert longer(cache)[4096] == each * 2 * 2 * (4096 + 8)
    cut = cache_of(profiled(mistral(64), tmp_path / "cut", cache_implementation="static", disable_compile=True))
    assert cut["bytes"] is not None and set(longer(cut).values()) == {None}  # the capacity hides the window


def test_quantized_to_eight_bits(tmp_path: Path) -> None:
    """Each of keys and values has one scale of four bytes."""
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    cache, each = cache_of(profiled(llama(2), tmp_path, **options)), 2 * 2 * HEAD_DIM
    (row,) = cache["layers"]
    assert (row["kind"], row["dtype"], row["bytes_per_token"]) == ("quantized", "float8_e4m3fn", each)
    assert (cache["tokens"], cache["bytes"]) == (TOKENS, 4 * (each * 2 * TOKENS + 2 * 4))
    assert longer(cache)[4096] == 4 * (each * 2 * 4096 + 2 * 4)


class _Grouped(QuantizedLayer):
    """As HQQ does it: two numbers in a byte, a scale for each group of them."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        packed = tensor.flatten()[::2].reshape(-1, 32).to(torch.uint8)
        return packed, {"scale": torch.ones(len(packed), 1), "shape": tensor.shape}

    def _dequantize(self, quantized: Any) -> torch.Tensor:
        return torch.zeros(quantized[1]["shape"])


def test_quantized_in_groups_with_what_is_not_yet(tmp_path: Path) -> None:
    """Its bytes are known; what a token takes is not even."""
    model = llama(2)
    own = transformers.Cache(layers=[_Grouped(residual_length=64) for _ in range(4)])
    with profiler(model, tmp_path) as prof:
        model.generate(IDS, past_key_values=own, **GREEDY)
    cache, numbers = cache_of(result_of(prof)), 2 * 2 * HEAD_DIM * 2  # of a token of both sequences
    groups = numbers * PROMPT // 64
    assert cache["bytes_after_prefill"] == 4 * groups * (32 + FLOAT)
    assert cache["bytes"] == 4 * (groups * (32 + FLOAT) + numbers * (TOKENS - PROMPT) * FLOAT)
    assert (cache["bytes_per_token"], cache["tokens"]) == (None, TOKENS)
    assert "quantized" in line(result_of(prof)) and "a token" not in line(result_of(prof))


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_quantized_by_a_library(backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend], reason="the backend is not installed")
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend, "residual_length": 64}}
    cache = cache_of(profiled(llama(4, head_dim=64), tmp_path, **options))
    assert cache["bytes"] < 2 * 4 * 4 * 64 * FLOAT * 2 * TOKENS and cache["layers"][0]["kind"] == "quantized"


@pytest.mark.parametrize("beams", [1, 3])
def test_cross_attention_and_beams(beams: int, tmp_path: Path) -> None:
    result = profiled(t5(), tmp_path, num_beams=beams)
    cache, each = cache_of(result), 2 * 4 * HEAD_DIM * FLOAT
    rows = {row["attention"]: row for row in cache["layers"]}
    assert (cache["sequences"], cache["beams"], cache["tokens"]) == (2 * beams, beams, NEW)
    assert rows["self"]["bytes"] == each * 2 * beams * NEW and rows["self"]["count"] == 2
    assert rows["cross"]["bytes"] == each * 2 * beams * PROMPT and rows["cross"]["count"] == 2
    assert cache["bytes_after_prefill"] == each * 2 * 2 * beams * (1 + PROMPT)
    assert longer(cache)[4096] == each * 2 * 2 * beams * (4096 + PROMPT)
    assert ("2 sequences of 3 beams" in line(result)) == (beams == 3)


def test_the_page_has_a_figure_of_it(opened: Opener, tmp_path: Path) -> None:
    result = profiled(t5(), tmp_path, num_beams=3)
    figures = opened(result).text("#places")
    for part in (f"KV cache, at {NEW} tokens", "a token of each of 2 sequences of 3 beams", "tokens"):
        assert part.lower() in figures.lower()


def test_states_do_not_grow(tmp_path: Path) -> None:
    """A model of which every second layer has a state in the place of keys."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, conv_L_cache=3,
        layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    model = transformers.Lfm2ForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    cache, each = cache_of(profiled(model, tmp_path)), 2 * 2 * HEAD_DIM * FLOAT
    rows = {row["kind"]: row for row in cache["layers"]}
    assert (rows["state"]["count"], rows["state"]["bytes"]) == (2, 2 * 32 * 3 * FLOAT)
    assert (rows["full"]["count"], rows["full"]["bytes"]) == (2, each * 2 * TOKENS)
    assert cache["bytes_per_token"] == 2 * 2 * each
    assert longer(cache)[4096] == 2 * (each * 2 * 4096 + 2 * 32 * 3 * FLOAT)


def test_a_prompt_in_chunks_is_one_prefill(tmp_path: Path) -> None:
    cache = cache_of(profiled(llama(2), tmp_path, prefill_chunk_size=5, disable_compile=True))
    assert cache["bytes_after_prefill"] == 2 * 2 * HEAD_DIM * FLOAT * 4 * 2 * PROMPT


def test_of_several_requests_the_largest_is_told(tmp_path: Path) -> None:
    model = llama()
    with profiler(model, tmp_path) as prof:
        for length in (3, PROMPT, 7):
            model.generate(IDS[:, :length], **GREEDY)
    cache = cache_of(result_of(prof))
    assert (cache["requests"], cache["tokens"]) == (3, TOKENS)


def test_a_rollout_in_training_has_one(tmp_path: Path) -> None:
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profiler(model, tmp_path) as prof:
        for _ in range(3):
            ids = model.generate(IDS, **GREEDY)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    cache = cache_of(result_of(prof))
    assert (cache["tokens"], cache["bytes"]) == (TOKENS, 2 * 4 * HEAD_DIM * FLOAT * 4 * 2 * TOKENS)


def test_a_draft_has_a_cache_of_its_own(tmp_path: Path) -> None:
    target, draft = llama(), llama(num_hidden_layers=1)
    alone = target.generate(IDS[:1], assistant_model=draft, **GREEDY)
    with profiler({"target": target, "draft": draft}, tmp_path) as prof:
        assert torch.equal(target.generate(IDS[:1], assistant_model=draft, **GREEDY), alone)
    caches = {one["root"]: one for one in result_of(prof).run["kv_cache"]}
    each = 2 * 4 * HEAD_DIM * FLOAT
    assert {name: one["layers"][0]["count"] for name, one in caches.items()} == {"target": 4, "draft": 1}
    assert all(one["bytes"] == each * one["layers"][0]["count"] * one["tokens"] for one in caches.values())
    assert caches["target"]["bytes_after_prefill"] >= each * 4 * PROMPT


# --- what cannot be read ------------------------------------------------------------------------


class _WithMore(DynamicLayer):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.more = torch.zeros(3)
        return super().update(*args, **kwargs)


def test_a_layer_that_is_not_known_is_said_and_not_counted(tmp_path: Path) -> None:
    model = llama()
    with profiler(model, tmp_path) as prof:
        model.generate(IDS, past_key_values=transformers.Cache(layer_class_to_replicate=_WithMore), **GREEDY)
    (cache,) = result_of(prof).run["kv_cache"]
    assert (cache["bytes"], cache["bytes_per_token"]) == (None, None)
    assert "_WithMore" in cache["problem"] and "more" in cache["problem"]
    assert "not known" in line(result_of(prof)) and "_WithMore" in line(result_of(prof))


@pytest.mark.parametrize("cache", [object(), [], {"layers": 3}, SimpleNamespace(layers=[object()])])
def test_no_cache_of_any_class_makes_a_call_fail(cache: object) -> None:
    caches = RequestCaches()
    caches.call("m", "prefill", {"past_key_values": cache}, 3)(cache)
    assert all(one["bytes"] in (None, 0) for one in caches.describe(1))


def test_tuples_of_older_models() -> None:
    caches = RequestCaches()
    cross = (torch.zeros(2, 3, 9, 8), torch.zeros(2, 3, 9, 8))
    for phase, tokens in (("prefill", 4), ("decode", 1)):
        own = torch.zeros(2, 3, 4 if phase == "prefill" else 5, 8)
        layer = (own, own.clone(), *cross)
        caches.call("m", phase, {}, tokens)(SimpleNamespace(past_key_values=(layer, layer)))
    (found,) = caches.describe(1)
    each = 2 * 2 * 3 * 8 * FLOAT  # of a token of both sequences
    assert [(row["attention"], row["count"], row["bytes"]) for row in found["layers"]] == [
        ("self", 2, each * 5), ("cross", 2, each * 9)
    ]  # fmt: skip
    assert found["bytes_after_prefill"] == 2 * each * (4 + 9) and found["bytes_per_token"] == 2 * each


# --- nothing stays ------------------------------------------------------------------------------


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """All that are made."""
    made: list[weakref.ref[Any]] = []
    original = DynamicCache.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(DynamicCache, "__init__", init)
    yield made


def test_a_cache_lives_as_long_as_without_us(caches: list[weakref.ref[Any]], tmp_path: Path) -> None:
    """Reference counts alone free it when its request ends: no cycle of ours waits for the collector."""
    model = llama()
    gc.collect()
    gc.disable()
    try:
        with profiler(model, tmp_path):
            model.generate(IDS, **GREEDY)
            assert [one() for one in caches] == [None]
    finally:
        gc.enable()


def test_a_request_that_fails_leaves_nothing(caches: list[weakref.ref[Any]], tmp_path: Path) -> None:
    model = llama()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    hook = model.model.layers[1].register_forward_hook(fail)
    with profiler(model, tmp_path) as prof:
        with suppress(ZeroDivisionError):
            model.generate(IDS, **GREEDY)
        hook.remove()
        gc.collect()
        assert [one() for one in caches] == [None]
        model.generate(IDS[:, :3], **GREEDY)
    # What the failed one held after its last whole call is still told.
    assert cache_of(result_of(prof))["bytes"] == 2 * 4 * HEAD_DIM * FLOAT * 4 * 2 * (PROMPT + 1)


def test_no_value_is_read() -> None:
    """On the meta device there are none: a read would raise, and be said."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 3, 4, 8, device="meta"), torch.zeros(2, 3, 4, 8, device="meta"), 0)
    caches = RequestCaches()
    caches.call("m", "prefill", {"past_key_values": cache}, 4)(None)
    (found,) = caches.describe(1)
    assert found["problem"] is None and found["bytes"] == 2 * 2 * 3 * 4 * 8 * FLOAT
    assert found["layers"][0]["held_bytes"] == found["bytes"]
