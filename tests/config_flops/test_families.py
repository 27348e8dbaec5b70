"""FLOPs from a config: what its fields mean, what holds for every family, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.config_flops.model_flops import (
    FAMILIES,
    Batch,
    Fields,
    Work,
    families,
    model_flops,
    register_family,
)
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.monitor.config import MODEL_TYPES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
QWEN_MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    **QWEN_MOE,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96}
BERT: dict[str, Any] = {**LLAMA, "model_type": "bert"}
VIT: dict[str, Any] = {**LLAMA, "model_type": "vit", "image_size": 20, "patch_size": 4, "num_channels": 3}
DIT: dict[str, Any] = {
    "_class_name": "DiTTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 3,
    "sample_size": 12,
    "patch_size": 2,
}
MEGATRON: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 112,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "swiglu": True,
    "padded_vocab_size": 96,
}
DECODERS = [LLAMA, QWEN_MOE, MIXTRAL, DEEPSEEK, GPT2, MEGATRON, {**LLAMA, "model_type": "aquila"}]
ENCODERS = [BERT, VIT, DIT]
LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=6)


# --- numbers ------------------------------------------------------------------------------------


def test_parts_of_a_llama_are_its_matrices() -> None:
    found = model_flops(LLAMA, 2, 10, backward=False)
    tokens, layers = 20, 4
    assert found.parts == {
        "embedding": 0,
        "attention_projections": 2 * tokens * 64 * (64 + 2 * 32 + 64) * layers,
        "attention_scores": 2 * 2 * (2 * 10 * 10 * 64) * layers,
        "mlp": 2 * tokens * 3 * 64 * 112 * layers,
        "head": 2 * tokens * 64 * 96,
    }
    assert (found.sequences, found.tokens, found.family, found.convention) == (2, 20, "llama", "full")
    assert (found.backward, found.backward_parts, found.forward) == (0, {}, sum(found.parts.values()))


def test_parts_of_experts_are_the_chosen_ones_and_the_router() -> None:
    found = model_flops({**QWEN_MOE, "shared_expert_intermediate_size": 56, "mlp_only_layers": [0]}, 1, 10)
    assert found.parts["router"] == 2 * 10 * 64 * 6 * 3
    assert found.parts["experts"] == 2 * 10 * 3 * 64 * 40 * 3 * 3
    assert found.parts["shared_experts"] == 2 * 10 * (3 * 64 * 56 + 64) * 3
    assert found.parts["mlp"] == 2 * 10 * 3 * 64 * 112


@pytest.mark.parametrize("config", DECODERS)
def test_backward_is_twice_the_forward(config: dict[str, Any]) -> None:
    found = model_flops(config, 2, 10)
    assert found.backward_parts == {part: 2 * flops for part, flops in found.parts.items()}
    assert int(found) == float(found) == found.total == 3 * found.forward


@pytest.mark.parametrize(("config", "unknown"), [(VIT, {"embedding"}), (DIT, {"embedding", "conditioning"})])
def test_what_comes_from_the_data_has_no_gradient(config: dict[str, Any], unknown: set[str]) -> None:
    found = model_flops(config, 2)
    assert {part for part, flops in found.parts.items() if found.backward_parts[part] != 2 * flops} == unknown
    assert found.backward_parts["embedding"] == found.parts["embedding"] > 0


@given(st.sampled_from([*DECODERS, *ENCODERS]), st.integers(1, 64), st.integers(2, 300), st.booleans())
def test_flops_are_linear_in_the_batch(config: dict[str, Any], sequences: int, tokens: int, causal: bool) -> None:
    convention: Any = "causal" if causal else "full"
    one = model_flops(config, 1, tokens, convention=convention)
    many = model_flops(config, sequences, tokens, convention=convention)
    assert many.parts == {part: sequences * flops for part, flops in one.parts.items()}
    assert many.total == sequences * one.total


@given(st.sampled_from(DECODERS), LENGTHS)
def test_causal_leaves_out_exactly_half_of_a_decoders_pairs(config: dict[str, Any], lengths: list[int]) -> None:
    full = model_flops(config, sequence_lengths=lengths)
    causal = model_flops(config, sequence_lengths=lengths, convention="causal")
    assert 2 * causal.parts["attention_scores"] == full.parts["attention_scores"]
    assert full.total - causal.total == 3 * causal.parts["attention_scores"] > 0


@pytest.mark.parametrize("config", ENCODERS)
def test_without_a_causal_mask_the_conventions_are_the_same(config: dict[str, Any]) -> None:
    assert model_flops(config, 2, 16).parts == model_flops(config, 2, 16, convention="causal").parts


def test_bert_as_a_decoder_has_a_causal_mask() -> None:
    causal = model_flops(BERT, 2, 16, is_decoder=True, convention="causal")
    assert 2 * causal.parts["attention_scores"] == model_flops(BERT, 2, 16).parts["attention_scores"]


# --- sequences end to end -----------------------------------------------------------------------


@given(st.sampled_from([*DECODERS, BERT]), LENGTHS, st.booleans())
def test_packed_sequences_are_the_sum_of_each(config: dict[str, Any], lengths: list[int], causal: bool) -> None:
    convention: Any = "causal" if causal else "full"
    packed = model_flops(config, sequence_lengths=lengths, convention=convention)
    alone = [model_flops(config, 1, length, convention=convention) for length in lengths]
    assert packed.total == sum(found.total for found in alone)
    assert (packed.tokens, packed.sequences) == (sum(lengths), len(lengths))


def test_rows_of_one_length_are_a_batch() -> None:
    assert model_flops(LLAMA, sequence_lengths=[16] * 8) == model_flops(LLAMA, 8, 16)
    assert model_flops(LLAMA, 4, 32, sequence_lengths=iter([16] * 8)) == model_flops(LLAMA, 8, 16)


def test_padding_is_no_token() -> None:
    assert model_flops(LLAMA, 3, 16, sequence_lengths=[16, 7, 0]) == model_flops(LLAMA, sequence_lengths=[7, 16])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give batch_size or sequence_lengths"),
        ({"batch_size": 2}, "give seq_length or sequence_lengths"),
        ({"batch_size": 0, "seq_length": 8}, "batch_size must be a whole number of at least 1, found 0"),
        ({"batch_size": 2, "seq_length": 8.5}, "seq_length must be a whole number"),
        ({"batch_size": True, "seq_length": 8}, "batch_size must be a whole number"),
        ({"batch_size": 2, "seq_length": "8"}, "seq_length must be a whole number of at least 1, found '8'"),
        ({"sequence_lengths": []}, "no sequence with a token"),
        ({"sequence_lengths": [4, -1]}, "each of sequence_lengths must be a whole number of at least 0, found -1"),
        ({"seq_length": 8, "sequence_lengths": [9]}, "a sequence of 9 tokens, more than seq_length=8"),
        ({"batch_size": 2, "seq_length": 8, "sequence_lengths": [8, 8, 1]}, "17 tokens, more than 2 rows of 8 hold"),
        ({"batch_size": 2, "seq_length": 8, "convention": "half"}, "found 'half'"),
    ],
)
def test_wrong_batches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        model_flops(LLAMA, **arguments)


# --- windows ------------------------------------------------------------------------------------


def pairs_in_window(length: int, window: int) -> float:
    """Of each query the keys up to itself, at most `window`, those at both ends of the window counted half."""
    seen = sum(min(query + 1, window) for query in range(length))
    return seen - min(length, window) / 2


@given(st.integers(1, 200), st.integers(1, 250))
def test_a_window_leaves_its_pairs(length: int, window: int) -> None:
    batch = Batch(sequences=1, lengths={length: 1}, convention="causal")
    assert batch.twice_the_pairs(causal=True, window=window) == 2 * pairs_in_window(length, window)


def scores(config: dict[str, Any], **more: Any) -> int:
    return model_flops(config, 1, 100, **more).parts["attention_scores"]


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 10}, 4),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "mistral", "sliding_window": 100}, 0),
        ({"model_type": "qwen2", "sliding_window": 10, "use_sliding_window": False, "max_window_layers": 3}, 0),
        ({"model_type": "qwen2", "sliding_window": 10, "use_sliding_window": True, "max_window_layers": 3}, 1),
        (
            {
                "model_type": "gemma2",
                "head_dim": 16,
                "sliding_window": 10,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            2,
        ),
        ({"window_size": (9, 0)}, 4),
        ({"window_size": (-1, 0)}, 0),
        ({"window_size": [9, 0], "window_attn_skip_freq": 3}, 3),
        ({"window_size": (9, 0), "window_attn_skip_freq": [1, 0, 0, 0]}, 1),
        ({"window_size": (9, 0), "window_attn_skip_freq": "[1]+[0]*3"}, 1),
    ],
)
def test_layers_with_a_window_have_fewer_pairs_in_the_causal_convention(fields: dict[str, Any], layers: int) -> None:
    config = {**LLAMA, **fields}
    per_layer = scores(LLAMA) // 4
    assert scores(config) == 4 * per_layer
    window = 2 * 64 * (2 * 100 * 10 - 100)
    assert scores(config, convention="causal") == (4 - layers) * per_layer // 2 + layers * window


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 10}, "sliding_window=10, but not which layers"),
        ({"layer_types": ["full_attention"]}, "4 layers, but layer_types for 1"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention'"),
        ({"window_size": (9, 0), "window_attn_skip_freq": [1]}, "4 layers, but a window_attn_skip_freq for 1"),
    ],
)
def test_windows_that_do_not_say_where_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        model_flops({**LLAMA, **fields}, 1, 100)


# --- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_object", [False, True])
def test_megatrons_names_mean_what_hugging_faces_do(as_object: bool) -> None:
    config = SimpleNamespace(**MEGATRON) if as_object else MEGATRON
    found = model_flops(config, 2, 16)
    assert found.family == "gpt"
    assert found.parts == model_flops(LLAMA, 2, 16).parts
    assert model_flops(config, 2, 16, family="llama").parts == found.parts
    moe = {**MEGATRON, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 40}
    assert model_flops(moe, 2, 16).parts == model_flops(QWEN_MOE, 2, 16).parts
    as_wide = {**MEGATRON, "num_experts": 8, "moe_router_topk": 2}
    assert model_flops(as_wide, 2, 16).parts == model_flops(MIXTRAL, 2, 16).parts


def test_megatrons_arguments_have_more_than_they_use() -> None:
    """Ranks without latent attention, a model_type of its own, and what other kinds of models would have."""
    more = {
        "model_type": object(),
        "multi_latent_attention": False,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": None,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "mtp_num_layers": None,
        "window_size": None,
        "is_hybrid_model": False,
        "hybrid_override_pattern": None,
        "num_channels": 3,
        "bert_binary_head": True,
    }
    assert model_flops(SimpleNamespace(**MEGATRON, **more), 2, 16).parts == model_flops(LLAMA, 2, 16).parts
    bert = model_flops(SimpleNamespace(**MEGATRON, **more), 2, 16, family="bert")
    assert bert.parts["head"] == 2 * 32 * 64 * (64 + 96) + 2 * 2 * 64 * (64 + 2)
    assert bert.parts["mlp"] == 2 * 32 * 3 * 64 * 112 * 4  # swiglu is read for every family
    alone = model_flops(MEGATRON, 2, 16, group_query_attention=False)
    assert alone.parts["attention_projections"] == 2 * 32 * 4 * 64 * 64 * 4
    gated = model_flops(MEGATRON, 2, 16, attention_output_gate=True)
    assert gated.parts["attention_projections"] == 2 * 32 * 4 * 64 * 64 * 4


def test_megatrons_model_config_lacks_the_vocabulary_and_says_so() -> None:
    config = {key: value for key, value in MEGATRON.items() if key not in ("swiglu", "padded_vocab_size")}
    config |= {"gated_linear_unit": True, "num_moe_experts": None}
    del config["group_query_attention"]
    with pytest.raises(WrongUse, match=r"no padded_vocab_size \(or vocab_size\): give it as a keyword"):
        model_flops(config, 2, 16)
    assert model_flops(config, 2, 16, vocab_size=96).parts == model_flops(LLAMA, 2, 16).parts


@pytest.mark.parametrize("frequency", [2, "2", [1, 0, 1, 0], "[1,0]*2", "([1]*1+[0]*1)*1 + [1, 0]"])
def test_every_second_layer_has_experts_however_it_is_written(frequency: Any) -> None:
    config = {**MEGATRON, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 40}
    if frequency == "([1]*1+[0]*1)*1 + [1, 0]":
        with pytest.raises(WrongUse, match="is no list such as"):
            model_flops(config, 1, 10, moe_layer_freq=frequency)
        return
    found = model_flops(config, 1, 10, moe_layer_freq=frequency)
    assert found.parts["router"] == 2 * 10 * 64 * 6 * 2
    assert found.parts["mlp"] == 2 * 10 * 3 * 64 * 112 * 2


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, 4),
        ({"decoder_sparse_step": 2}, 2),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 1),
        ({"mlp_only_layers": [0, 2, 3]}, 1),
        ({"first_k_dense_replace": 3}, 1),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 1),
        ({"num_experts": 0}, 0),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], sparse: int) -> None:
    found = model_flops({**QWEN_MOE, **fields}, 1, 10)
    assert found.parts.get("router", 0) == 2 * 10 * 64 * 6 * sparse
    assert found.parts.get("mlp", 0) == 2 * 10 * 3 * 64 * 112 * (4 - sparse)


def test_given_fields_stand_before_the_configs_under_any_name() -> None:
    assert model_flops(LLAMA, 1, 8, num_layers=2) == model_flops({**LLAMA, "num_hidden_layers": 2}, 1, 8)
    assert model_flops(LLAMA, 1, 8, num_query_groups=None) == model_flops({**LLAMA, "num_key_value_heads": 4}, 1, 8)
    with pytest.raises(WrongUse, match="num_layer: the formula of the family 'llama' reads no such field"):
        model_flops(LLAMA, 1, 8, num_layer=2)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("config", [LLAMA, BERT, VIT])
def test_a_missing_field_is_named(config: dict[str, Any], name: str) -> None:
    with pytest.raises(WrongUse, match=f"the config has no {name}"):
        model_flops({key: value for key, value in config.items() if key != name}, 1, 8)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "vocab_size"),
        (MIXTRAL, "num_key_value_heads"),
        ({**LLAMA, "model_type": "qwen2"}, "num_key_value_heads"),
        (QWEN_MOE, "moe_intermediate_size"),
        (QWEN_MOE, "num_experts_per_tok"),
        (
            {**QWEN_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size",
        ),
        *[(DEEPSEEK, name) for name in ("v_head_dim", "kv_lora_rank", "q_lora_rank", "first_k_dense_replace")],
        (DEEPSEEK, "n_shared_experts"),
        *[(config, "num_experts") for config in (QWEN_MOE, DEEPSEEK)],
        (MIXTRAL, "num_local_experts"),
        ({**LLAMA, "model_type": "mistral"}, "num_key_value_heads"),
        ({**LLAMA, "model_type": "gemma", "head_dim": 32}, "head_dim"),
        ({**LLAMA, "model_type": "gpt_neox"}, "intermediate_size"),
        (VIT, "patch_size"),
        (DIT, "attention_head_dim"),
    ],
)
def test_what_other_models_of_the_family_have_otherwise_is_never_guessed(config: dict[str, Any], name: str) -> None:
    model_flops(config, 1, 8)
    with pytest.raises(WrongUse, match=name):
        model_flops({key: value for key, value in config.items() if key != name}, 1, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size of the config must be a whole number of at least 1, found 'wide'"),
        ({"intermediate_size": [112] * 4}, "intermediate_size of the config must be a whole number"),
        ({"num_attention_heads": 6}, "64 is no multiple of its 6 heads"),
        ({"num_key_value_heads": 3}, "4 heads of queries, which 3 heads of keys cannot share"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True, which no registered formula counts"),
        ({"hybrid_override_pattern": "M*-M*-"}, "hybrid_override_pattern='M"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8}, "4 experts, of which"),
        ({"architectures": ["LlamaForMagic"]}, "the head of LlamaForMagic is not known"),
    ],
)
def test_what_no_formula_counts_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        model_flops({**LLAMA, **fields}, 1, 8)


# --- families -----------------------------------------------------------------------------------


def without_type(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**{key: value for key, value in config.items() if key != "model_type"}, **more}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (without_type(LLAMA, architectures=["LlamaForCausalLM"]), "llama"),
        (without_type(LLAMA, architectures=["AquilaForCausalLM"]), "aquila"),
        (without_type(QWEN_MOE, architectures=["Qwen3MoeForCausalLM"]), "qwen"),
        (without_type(LLAMA, rms_norm_eps=1e-5), "llama"),
        (without_type(GPT2), "gpt"),
        (without_type(MIXTRAL), "mixtral"),
        (without_type(DEEPSEEK, n_routed_experts=6), "deepseek"),
        (without_type(BERT, type_vocab_size=2), "bert"),
        (without_type(VIT), "vit"),
        (DIT, "dit"),
        ({**without_type(DIT, _class_name=None), "num_embeds_ada_norm": 1000}, "dit"),
        (type("Qwen2Config", (), without_type(LLAMA))(), "qwen"),
    ],
)
def test_the_family_is_known_by_class_or_fields(config: Any, family: str) -> None:
    for asked in (None, "auto"):
        assert model_flops(config, 1, 16, family=asked).family == family


@pytest.mark.parametrize(
    ("config", "family", "message"),
    [
        (LLAMA, "lama", "no family 'lama' is registered. Did you mean 'llama'"),
        ({**LLAMA, "model_type": "mamba"}, None, "model_type='mamba' is of no registered family"),
        ({**LLAMA, "model_type": "llama4_text"}, "auto", "model_type='llama4_text' is of no registered family"),
        (without_type(LLAMA, architectures=["Llama4ForCausalLM"]), None, "no model_type, nor a class or fields"),
        (without_type(LLAMA), None, "no model_type, nor a class or fields"),
        (without_type(MIXTRAL, rms_norm_eps=1e-5), None, "fields of several families: llama, mixtral"),
        ({}, None, "family=..., one of aquila, bert"),
    ],
)
def test_an_unknown_family_is_never_replaced(config: Any, family: str | None, message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        model_flops(config, 1, 16, family=family)


@pytest.mark.parametrize(
    ("config", "name", "family"),
    [
        (GPT2, "gpt", "gpt"),
        (without_type(LLAMA, num_experts=0), "qwen", "qwen"),
        (DEEPSEEK, "deepseek", "deepseek"),
        (MIXTRAL, "mixtral", "mixtral"),
        (without_type(DIT, _class_name=None), "dit", "dit"),
    ],
)
def test_the_name_of_a_family_is_a_model_type_too(config: dict[str, Any], name: str, family: str) -> None:
    named = model_flops({**config, "model_type": name}, 2, 16)
    assert named == model_flops(config, 2, 16, family=family)
    assert named.family == family


@pytest.mark.parametrize("config", [GPT2, QWEN_MOE, LLAMA, DEEPSEEK, MIXTRAL, BERT, VIT])
def test_a_model_type_is_taken_as_the_family_whatever_the_config_is_called(config: dict[str, Any]) -> None:
    expected = model_flops(config, 2, 26)
    for named in (without_type(config), {**config, "model_type": "my_own"}):
        assert model_flops(named, 2, 26, family=config["model_type"]) == expected


def test_a_type_asked_for_has_its_own_width_of_the_mlp() -> None:
    plain = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    found = model_flops(plain, 1, 8, family="gpt2")
    assert found.parts["mlp"] == 2 * (2 * 8 * 64 * 256) * 2  # four times the width, there and back, in 2 layers


def test_the_first_qwen_is_refused() -> None:
    with pytest.raises(WrongUse, match="half of intermediate_size"):
        model_flops({**LLAMA, "model_type": "qwen", "no_bias": True}, 1, 16)


def test_a_monitor_takes_every_family() -> None:
    assert set(families()) == {*MODEL_TYPES} - {"auto"}


def test_the_families() -> None:
    assert set(families()) == {"gpt", "llama", "qwen", "mixtral", "aquila", "bert", "vit", "dit", "deepseek"}


@pytest.fixture
def _families_as_before() -> Iterator[None]:
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.usefixtures("_families_as_before")
def test_a_family_is_one_function_and_its_registration() -> None:
    @register_family("mine", model_types=("mine_v2",))
    def mine(fields: Fields, batch: Batch) -> Work:
        work = Work(batch)
        hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
        work.linear("mlp", hidden, 4 * hidden, times=2 * layers)
        work.attention(2, 8, causal=True, times=layers)
        return work

    found = model_flops({"model_type": "mine_v2", "hidden_size": 16, "num_hidden_layers": 3}, 2, 10)
    assert found.family == "mine"
    assert found.parts["mlp"] == 2 * 20 * 16 * 64 * 2 * 3
    assert found.parts["attention_scores"] == 2 * 2 * 2 * 10 * 10 * 16 * 3
    assert "mine" in families()


@pytest.mark.usefixtures("_families_as_before")
def test_a_family_registered_later_stands_before() -> None:
    @register_family("mine", model_types=("llama",))
    def mine(fields: Fields, batch: Batch) -> Work:
        return Work(batch)

    assert model_flops(LLAMA, 1, 8).family == "mine"
    assert model_flops(LLAMA, 1, 8, family="llama").family == "llama"


class Model:
    """What a model looks like from outside, without torch."""

    def __init__(self, config: object) -> None:
        self.config = config

    def named_modules(self) -> None: ...


class LlamaForSequenceClassification(Model):
    """Its class tells its head."""


class FSDPBertForMaskedLM(Model):
    """The name that `fully_shard` gives the class."""


class Wrapper(Model):
    """As DistributedDataParallel and torch.compile do."""

    def __init__(self, model: Model) -> None:
        self.module = model


def test_a_model_has_its_config_and_its_head() -> None:
    config = SimpleNamespace(**LLAMA, num_labels=3)
    model = LlamaForSequenceClassification(config)
    found = model_flops(model, 2, 10)
    assert found.parts["head"] == 2 * 20 * 64 * 3
    assert model_flops(Wrapper(model), 2, 10) == found
    assert model_flops(FSDPBertForMaskedLM(SimpleNamespace(**BERT)), 2, 10) == model_flops(BERT, 2, 10)
    assert model_flops(config, 2, 10, architectures=["LlamaForSequenceClassification"]) == found
    assert "head" not in model_flops(config, 2, 10, architectures=["LlamaModel"]).parts
    with pytest.raises(WrongUse, match="Model has no config"):
        model_flops(Model(None), 2, 10)


def test_labels_are_counted_by_their_names_where_a_file_has_no_number() -> None:
    config = {**LLAMA, "architectures": ["LlamaForTokenClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert model_flops(config, 1, 10).parts["head"] == 2 * 10 * 64 * 3


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from profiler_wrapper.config_flops.model_flops import model_flops; "
        f"model_flops({LLAMA!r}, 1, 8); "
        "sys.exit(bool({'torch', 'transformers', 'diffusers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
