"""FLOPs from configs against what runs: small real models, counted by torch in a forward and a backward pass.

`FlopCounterMode` is right where attention is done in pieces ("eager", or the math kernel) and experts one by one:
of a fused attention on a CPU it counts 0, of another one's backward the scores that are computed again too, and of
grouped products of experts nothing. Rotary angles, which some releases of transformers get from a product, are of
no weight and of no attention, and are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from profiler_wrapper.config_flops.model_flops import model_flops
from trained_models import trained

pytestmark = pytest.mark.full
BATCH, TOKENS = 2, 24
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 112, "use_cache": False}
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "experts_implementation": "eager",
}
LATENT: dict[str, Any] = {
    **SHAPE,
    "intermediate_size": 112,
    "num_key_value_heads": 4,
    "use_cache": False,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "experts_implementation": "eager",
}

# Config class -> its fields, by the family that is to be found.
DECODERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "llama": [
        ("LlamaConfig", GROUPED),
        ("LlamaConfig", {**GROUPED, "head_dim": 24}),
        ("MistralConfig", {**GROUPED, "sliding_window": 8}),
        ("GemmaConfig", {**GROUPED, "head_dim": 32}),
        ("Gemma2Config", {**GROUPED, "head_dim": 32, "sliding_window": 8}),
        ("Gemma3TextConfig", {**GROUPED, "head_dim": 32, "sliding_window": 8}),
        ("Phi3Config", GROUPED),
        ("Olmo2Config", GROUPED),
        ("GraniteConfig", GROUPED),
    ],
    "qwen": [
        ("Qwen2Config", GROUPED),
        ("Qwen2Config", {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3Config", {**GROUPED, "head_dim": 24}),
        ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}),
        ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 24, "mlp_only_layers": [1]}),
    ],
    "mixtral": [
        (
            "MixtralConfig",
            {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        )
    ],
    "gpt": [
        ("GPT2Config", SHAPE),
        ("GPT2Config", {**SHAPE, "n_inner": 100}),
        ("GPTNeoXConfig", {**SHAPE, "intermediate_size": 112}),
    ],
    "deepseek": [
        ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
        ("DeepseekV3Config", {**LATENT, "q_lora_rank": 32}),
    ],
}
CONFIGS = [(family, name, fields) for family, cases in DECODERS.items() for name, fields in cases]


def squared(output: Any) -> torch.Tensor:
    """A loss that every tensor of the output has a part in."""
    tensors = [value for value in output.to_tuple() if isinstance(value, torch.Tensor)]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def counted(model: nn.Module, loss: Callable[..., torch.Tensor] = squared, **batch: Any) -> int:
    """FLOPs of a forward and a backward pass by torch's counter, without those of rotary angles."""
    model.train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as mode:
        loss(model(**batch)).backward()
    angles = sum(sum(flops.values()) for name, flops in mode.get_flop_counts().items() if name.endswith("rotary_emb"))
    return int(mode.get_total_flops()) - angles


def ids() -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (BATCH, TOKENS))


def causal_model(config: Any) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


@pytest.mark.parametrize(("family", "name", "fields"), CONFIGS, ids=[f"{n}-{i}" for i, (_, n, _) in enumerate(CONFIGS)])
def test_a_decoder_needs_what_torch_counts(family: str, name: str, fields: dict[str, Any]) -> None:
    import transformers

    config = getattr(transformers, name)(**fields)
    found = model_flops(config, BATCH, TOKENS)
    assert found.family == family
    assert found.total == counted(causal_model(config), input_ids=ids())
    assert found.backward == 2 * found.forward


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("LlamaForSequenceClassification", 5),
        ("LlamaForTokenClassification", 5),
        ("LlamaForQuestionAnswering", None),
        ("LlamaModel", None),
        ("GPT2ForSequenceClassification", 5),
    ],
)
def test_the_class_tells_a_decoders_head(name: str, classes: int | None) -> None:
    import transformers

    llama = name.startswith("Llama")
    config = getattr(transformers, "LlamaConfig" if llama else "GPT2Config")(
        **(GROUPED if llama else SHAPE), num_labels=classes or 2
    )
    model = getattr(transformers, name)(config)
    expected = counted(model, input_ids=ids())
    assert model_flops(model, BATCH, TOKENS).total == expected
    assert model_flops(config, BATCH, TOKENS, architectures=[name]).total == expected
    assert model_flops({**config.to_dict(), "architectures": [name]}, BATCH, TOKENS).total == expected


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
        "BertModel",
    ],
)
def test_bert_needs_what_torch_counts_with_each_of_its_heads(name: str) -> None:
    import transformers

    labels = 2 if name == "BertForQuestionAnswering" else 5  # a start and an end
    model = getattr(transformers, name)(transformers.BertConfig(**SHAPE, intermediate_size=112, num_labels=labels))
    found = model_flops(model, BATCH, TOKENS)
    assert found.family == "bert"
    assert found.total == counted(model, input_ids=ids())


def test_bert_without_a_class_has_the_head_that_fills_in_words() -> None:
    import transformers

    config = transformers.BertConfig(**SHAPE, intermediate_size=112)
    assert model_flops(config, 2, 8) == model_flops(config, 2, 8, architectures=["BertForMaskedLM"])


@pytest.mark.parametrize("name", ["ViTForImageClassification", "ViTModel"])
def test_vit_needs_what_torch_counts_without_gradients_of_pixels(name: str) -> None:
    import transformers

    fields = {key: SHAPE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(
        **fields, intermediate_size=112, image_size=(20, 16), patch_size=4, num_labels=5, attn_implementation="eager"
    )
    model = getattr(transformers, name)(config)
    found = model_flops(model, BATCH)
    assert (found.family, found.tokens) == ("vit", BATCH * (1 + 5 * 4))
    assert found.total == counted(model, pixel_values=torch.randn(BATCH, 3, 20, 16))
    assert found.backward == 2 * found.forward - found.parts["embedding"]


def test_dit_needs_what_torch_counts() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=12,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    steps = torch.arange(BATCH)
    expected = counted(
        model,
        lambda output: output.sample.square().mean(),
        hidden_states=torch.randn(BATCH, 4, 12, 12),
        timestep=steps,
        class_labels=steps,
    )
    for config in (model, model.config, dict(model.config)):
        found = model_flops(config, BATCH)
        assert (found.family, found.tokens) == ("dit", BATCH * 36)
        assert found.total == expected


@pytest.mark.parametrize(
    "more", [{}, {"patch_size_t": 2, "ofs_embed_dim": 16, "use_rotary_positional_embeddings": True}], ids=["1.0", "1.5"]
)
def test_cogvideox_needs_what_torch_counts(more: dict[str, Any]) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=12,
        num_layers=2,
        sample_width=8,
        sample_height=12,
        sample_frames=13,
        patch_size=2,
        max_text_seq_length=8,
        **more,
    )
    expected = counted(
        model,
        lambda output: output.sample.square().mean(),
        hidden_states=torch.randn(BATCH, 4, 4, 12, 8),
        encoder_hidden_states=torch.randn(BATCH, 8, 12),
        timestep=torch.arange(BATCH),
        **({"ofs": torch.ones(BATCH)} if more else {}),
    )
    found = model_flops(model, BATCH)
    assert found.tokens == BATCH * (8 + (2 if more else 4) * 6 * 4)
    assert found.total == expected


def test_multi_token_prediction_is_a_projection_a_block_and_the_head_once_more() -> None:
    """As DeepSeek-V3 describes it; transformers builds none of it for training, so a block is put in its place."""
    import transformers

    config = transformers.DeepseekV3Config(**LATENT, q_lora_rank=32)
    deeper = transformers.DeepseekV3Config(**{**LATENT, "num_hidden_layers": 4}, q_lora_rank=32)
    rows, hidden = BATCH * TOKENS, SHAPE["hidden_size"]
    x = torch.randn(rows, 2 * hidden, requires_grad=True)
    with FlopCounterMode(display=False) as mode:
        y = nn.Linear(2 * hidden, hidden)(x)
        nn.Linear(hidden, SHAPE["vocab_size"])(y).sum().backward()
    expected = counted(causal_model(deeper), input_ids=ids()) + mode.get_total_flops()
    for name in ("mtp_num_layers", "num_nextn_predict_layers"):
        assert model_flops(config, BATCH, TOKENS, **{name: 1}).total == expected  # type: ignore[arg-type]
    plain = {**LATENT, "q_lora_rank": 32, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    assert model_flops(plain, BATCH, TOKENS).total == expected
    assert model_flops(config, BATCH, TOKENS).total < expected


def test_a_wrapped_model_is_the_model() -> None:
    import transformers

    peft = pytest.importorskip("peft")
    model = causal_model(transformers.LlamaConfig(**GROUPED))
    expected = model_flops(model, BATCH, TOKENS)
    assert model_flops(torch.compile(model), BATCH, TOKENS) == expected
    assert model_flops(nn.DataParallel(model), BATCH, TOKENS) == expected
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert model_flops(adapted, BATCH, TOKENS) == expected


def test_sequences_end_to_end_need_what_each_alone_does() -> None:
    """One row of three texts against three models' runs, none of which sees the others."""
    import transformers

    config = transformers.LlamaConfig(**GROUPED)
    model = causal_model(config)
    lengths = [5, 24, 11]
    expected = sum(counted(model, input_ids=ids()[:1, :length]) for length in lengths)
    assert model_flops(config, 1, 40, sequence_lengths=lengths).total == expected


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert", "vit"])
def test_a_profile_counts_as_many_in_both_conventions(name: str) -> None:
    """But for the scores that the backward of a fused attention computes again."""
    case, rows = trained(name).case, trained(name).result.flops
    tokens = 16 if "input_ids" in case.batch(0) else None

    def by_config(convention: Any) -> int:
        return model_flops(case.model, 2, tokens, convention=convention).total

    assert sum(row.flops_per_step - row.repeated_flops_per_step for row in rows) == by_config("full")
    causal = sum(row.causal_flops_per_step - row.causal_repeated_flops_per_step for row in rows)
    assert causal == by_config("causal")
