"""Kinds of layers by class name and path, as real models spell them."""

from __future__ import annotations

import pytest

from profiler_wrapper.trace.marks import KINDS, kind_of, looks_like_block

CASES = {
    "attention": [
        ("LlamaAttention", "model.layers.0.self_attn"),
        ("GPT2Attention", "transformer.h.0.attn"),
        ("BertSelfOutput", "bert.encoder.layer.0.attention.output"),
        ("T5LayerCrossAttention", "decoder.block.0.layer.1"),
        ("MultiheadAttention", "self_attn"),
        ("STDiT3SelfThing", "spatial_blocks.0.attn"),
        ("MHA", "mixer"),
    ],
    "mlp": [
        ("LlamaMLP", "model.layers.0.mlp"),
        ("BertIntermediate", "bert.encoder.layer.0.intermediate"),
        ("BertOutput", "bert.encoder.layer.0.output"),
        ("FeedForward", "transformer_blocks.0.ff"),
        ("MixtralSparseMoeBlock", "model.layers.0.mlp"),
        ("DeepseekV3MoE", "model.layers.1.mlp"),
        ("T5DenseGatedActDense", "layer.1.DenseReluDense"),
        ("Mlp", "blocks.0.mlp"),
        ("Sequential", "transformer.layers.0.mlp"),
        ("SwiGLU", "feed_forward"),
    ],
    "norm": [
        ("LlamaRMSNorm", "model.layers.0.input_layernorm"),
        ("LayerNorm", "transformer.ln_f"),
        ("FP32LayerNorm", "blocks.0.norm1"),
        ("GroupNorm", "group_norm"),
        ("BatchNorm2d", "bn1"),
        ("LayerNorm2d", "norm"),
        ("FusedThing", "final_layernorm"),
    ],
    "embedding": [
        ("Embedding", "transformer.wte"),
        ("LlamaRotaryEmbedding", "model.rotary_emb"),
        ("BertEmbeddings", "bert.embeddings"),
        ("PatchEmbed", "pos_embed"),
        ("CogVideoXPatchEmbed", "patch_embed"),
        ("HunyuanVideoTokenRefiner", "context_embedder"),
        ("PixArtAlphaTextProjection", "caption_projection"),
        ("Timesteps", "time_proj"),
    ],
    "head": [
        ("Linear", "lm_head"),
        ("Linear", "score"),
        ("Linear", "classifier"),
        ("Linear", "proj_out"),
        ("Linear", "output"),
        ("BertOnlyMLMHead", "cls"),
        ("T2IFinalLayer", "final_layer"),
        ("ClassifierHead", "head"),
    ],
    "router": [
        ("MixtralTopKRouter", "model.layers.0.mlp.gate"),
        ("Linear", "model.layers.0.mlp.gate"),
        ("Linear", "model.layers.0.mlp.shared_expert_gate"),
        ("MoEGate", "gate"),
    ],
    "expert": [
        ("MixtralExperts", "model.layers.0.mlp.experts"),
        ("Qwen2MoeMLP", "model.layers.0.mlp.experts.3"),
    ],
    "adapter": [
        ("Linear", "model.layers.0.self_attn.q_proj.lora_A.default"),
        ("LoRALinearLayer", "to_q"),
        ("IPAdapterPlus", "encoder"),
    ],
    "modulation": [
        ("AdaLayerNorm", "norm_out"),
        ("CogVideoXLayerNormZero", "transformer_blocks.0.norm1"),
        ("AdaLayerNormContinuous", "norm_out"),
        ("HunyuanVideoAdaNorm", "norm_out"),
        ("Sequential", "blocks.0.adaLN_modulation"),
        ("Modulation", "img_mod"),
    ],
    "conv": [("Conv2d", "patch_embed.proj"), ("CogVideoXCausalConv3d", "conv_in")],
    "other": [
        ("Conv1D", "transformer.h.0.attn.c_attn"),
        ("Linear", "model.layers.0.self_attn.q_proj"),
        ("Linear", "model.layers.0.mlp.gate_proj"),
        ("Dropout", "attn_dropout"),
        ("Identity", "blocks.0.attn.q_norm"),
        ("AdaptiveAvgPool2d", "pool"),
        ("SiLU", "act"),
        ("LlamaForCausalLM", ""),
        ("GPT2LMHeadModel", ""),
        ("ViTModel", "vit"),
        ("CrossAttnDownBlock2D", "down_blocks.0"),
        ("CogVideoXTransformer3DModel", ""),
        ("", ""),
    ],
}


@pytest.mark.parametrize(
    ("kind", "class_name", "path"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_kind(kind: str, class_name: str, path: str) -> None:
    assert kind_of(class_name, path) == kind


def test_all_kinds_but_block_are_covered() -> None:
    assert {*CASES, "block"} == set(KINDS)


@pytest.mark.parametrize("name", ["CogVideoXBlock", "LlamaDecoderLayer", "BasicTransformerBlock", "WanAttentionBlock"])
def test_classes_that_call_themselves_blocks(name: str) -> None:
    assert looks_like_block(name)


@pytest.mark.parametrize("name", ["LlamaMLP", "MixtralSparseMoeBlock", "LoRALinearLayer", "T2IFinalLayer", "Model"])
def test_classes_that_do_not(name: str) -> None:
    assert not looks_like_block(name)
