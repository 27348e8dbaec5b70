"""FLOPs of published models at the sizes their makers gave, derived by hand, and by other people's formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from profiler_wrapper.config_flops.model_flops import model_flops

# --- the table ----------------------------------------------------------------------------------
#
# By hand, a sequence of T tokens: every weight W of a matrix that a token goes through costs 6 FLOPs (a
# multiply-add forward, two backward), so 6·T·W; attention has 2 products forward and 4 backward of T x T x
# (heads·width) in each of L layers, so 12·L·heads·width·T² for all pairs, and half of that for causal ones.
#
#   Llama-3-8B      a layer: 4096·(4096 + 2·1024 + 4096) + 3·4096·14336           =    218,103,808
#                   W = 32 layers + head 4096·128256                              =  7,504,658,432
#   Llama-3-70B     a layer: 8192·(8192 + 2·1024 + 8192) + 3·8192·28672           =    855,638,016
#                   W = 80 layers + head 8192·128256                              = 69,501,714,432
#   Mixtral-8x7B    a layer: 41,943,040 + router 4096·8 + 2 experts·3·4096·14336  =    394,297,344
#                   W = 32 layers + head 4096·32000                               = 12,748,587,008
#   Qwen2-72B       a layer: 8192·(8192 + 2·1024 + 8192) + 3·8192·29568           =    877,658,112
#                   W = 80 layers + head 8192·152064                              = 71,458,357,248
#   GPT-3 175B      a layer: 4·12288² + 2·12288·49152                             =  1,811,939,328
#                   W = 96 layers + head 12288·50257                              = 174,563,733,504


class Published(NamedTuple):
    """One row: the config as its maker published it, and what follows by hand."""

    config: dict[str, Any]
    weights: int  # W, that a token is multiplied with
    parameters: int  # published
    others: int  # parameters that multiply no token: input embedding, norms, biases, positions, experts not chosen
    flops: dict[int, tuple[int, int]]  # tokens of one sequence -> (full, causal), forward and backward
    rounding: int = 0  # of the published number of parameters


# Shape: "The Llama 3 Herd of Models", arXiv:2407.21783, table 3; vocabulary and parameters: config.json and weights
# of huggingface.co/meta-llama/Meta-Llama-3-8B.
LLAMA_8B = Published(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    7_504_658_432,
    8_030_261_248,
    128256 * 4096 + 65 * 4096,
    {4096: (210_822_764_691_456, 197_628_625_158_144)},
)
# The same sources; huggingface.co/meta-llama/Meta-Llama-3-70B.
LLAMA_70B = Published(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    69_501_714_432,
    70_553_706_496,
    128256 * 8192 + 161 * 8192,
    {4096: (1_840_015_529_213_952, 1_774_044_831_547_392)},
)
# "Mixtral of Experts", arXiv:2401.04088, table 1; parameters: weights of huggingface.co/mistralai/Mixtral-8x7B-v0.1.
MIXTRAL = Published(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    12_748_587_008,
    46_702_792_704,
    32000 * 4096 + 65 * 4096 + 32 * 6 * 3 * 4096 * 14336,
    {4096: (339_697_553_375_232, 326_503_413_841_920)},
)
# "Qwen2 Technical Report", arXiv:2407.10671, table 1; padded vocabulary and parameters: config.json and weights of
# huggingface.co/Qwen/Qwen2-72B.
QWEN2_72B = Published(
    {
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 80,
        "vocab_size": 152064,
    },
    71_458_357_248,
    72_706_203_648,
    152064 * 8192 + 161 * 8192 + 80 * (8192 + 2 * 1024),
    {4096: (1_888_101_983_059_968, 1_822_131_285_393_408)},
)
# "Language Models are Few-Shot Learners", arXiv:2005.14165, table 2.1 and, 174,600 M parameters, table D.1.
GPT3 = Published(
    {
        "model_type": "gpt2",
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "vocab_size": 50257,
    },
    174_563_733_504,
    174_600_000_000,
    2048 * 12288 + 96 * 9 * 12288 + 193 * 2 * 12288,  # positions, biases, norms; the head is the input embedding
    {
        2048: (2_204_412_785_197_056, 2_174_725_971_247_104),
        4096: (4_527_572_826_193_920, 4_408_825_570_394_112),
    },
    rounding=50_000_000,
)
TABLE = {
    "Llama-3-8B": LLAMA_8B,
    "Llama-3-70B": LLAMA_70B,
    "Mixtral-8x7B": MIXTRAL,
    "Qwen2-72B": QWEN2_72B,
    "GPT-3 175B": GPT3,
}
ROWS = [(name, tokens) for name, row in TABLE.items() for tokens in row.flops]


@pytest.mark.parametrize(("name", "tokens"), ROWS)
def test_totals_are_those_derived_by_hand(name: str, tokens: int) -> None:
    row = TABLE[name]
    full, causal = row.flops[tokens]
    assert model_flops(row.config, 1, tokens).total == full
    assert model_flops(row.config, 1, tokens, convention="causal").total == causal
    assert model_flops(row.config, 1, tokens, backward=False).total == full // 3
    assert model_flops(row.config, 16, tokens).total == 16 * full


@pytest.mark.parametrize(("name", "tokens"), ROWS)
def test_totals_are_six_flops_a_parameter_and_token_and_attention(name: str, tokens: int) -> None:
    """6N + 12·L·H·Q·T of torchtitan, N being the published parameters that multiply a token."""
    row = TABLE[name]
    multiplying = row.parameters - row.others
    assert abs(multiplying - row.weights) <= row.rounding
    layers, heads = shape_of(row.config)
    by_parameters = (6 * multiplying + 12 * layers * heads * 128 * tokens) * tokens
    assert abs(by_parameters - row.flops[tokens][0]) <= 6 * row.rounding * tokens


def shape_of(config: dict[str, Any]) -> tuple[int, int]:
    """Layers and heads, each 128 wide in all these models."""
    return (
        config.get("num_hidden_layers") or config["n_layer"],
        config.get("num_attention_heads") or config["n_head"],
    )


def test_gpt3_took_what_its_paper_says() -> None:
    """Table D.1: 3.14e23 FLOPs for 300 billion tokens, attention left out, which is 2.8 % more in full."""
    whole = model_flops(GPT3.config, 1, 2048)
    attention = 3 * whole.parts["attention_scores"]
    sequences = 300e9 / 2048
    assert (whole.total - attention) * sequences == pytest.approx(3.14e23, rel=0.002)
    assert attention / (whole.total - attention) == pytest.approx(0.0277, abs=1e-4)


def test_mixtral_has_the_active_parameters_of_its_paper() -> None:
    """13 billion for each token, with the input embedding."""
    per_token = (model_flops(MIXTRAL.config, 1, 1, backward=False).total - 4 * 32 * 4096) // 2
    assert per_token + 32000 * 4096 == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize(("tokens", "more"), [(4096, 0.067), (32768, 0.364)])
def test_the_conventions_differ_by_the_length(tokens: int, more: float) -> None:
    full = model_flops(LLAMA_8B.config, 1, tokens).total
    causal = model_flops(LLAMA_8B.config, 1, tokens, convention="causal").total
    assert full / causal - 1 == pytest.approx(more, abs=5e-4)


# --- Megatron-LM's formula, written anew ----------------------------------------------------------


def megatron(args: dict[str, Any], batch: int) -> float:
    """What `num_floating_point_operations` counts for a Transformer: half of the attention, and no router.

    A table of widths in the place of its sums of factors; six FLOPs for each weight and token.
    """
    hidden, tokens = args["hidden_size"], args["seq_length"]
    matrices = 3 if args["swiglu"] else 2
    further = args.get("mtp_num_layers") or 0
    if args.get("multi_latent_attention"):
        heads, rank = args["num_attention_heads"], args["kv_lora_rank"]
        queries = heads * (args["qk_head_dim"] + args["qk_pos_emb_head_dim"])
        values = heads * args["v_head_dim"]
        narrow = args["q_lora_rank"]
        weights = (
            (hidden * queries if narrow is None else narrow * (hidden + queries))
            + hidden * (rank + args["qk_pos_emb_head_dim"])
            + rank * (heads * args["qk_head_dim"] + values)
            + values * hidden
        )
        pairs = (queries + values) * tokens / 2
    else:
        groups = args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"]
        queries = args["num_attention_heads"] * args["kv_channels"]
        weights = hidden * (2 * queries + 2 * groups * args["kv_channels"])
        pairs = queries * tokens
    layers = args["num_layers"]
    frequency = args.get("moe_layer_freq", 1)
    sparse = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(layers)]
    sparse = sparse if args.get("num_experts") else [0] * layers
    sparse = [*sparse, *sparse[-1:] * further]
    expert = args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]
    shared = args.get("moe_shared_expert_intermediate_size") or 0
    per_token = sum(
        weights
        + pairs
        + matrices * hidden * (expert * args["moe_router_topk"] + shared if has else args["ffn_hidden_size"])
        for has in sparse
    )
    per_token += further * 2 * hidden * hidden + (1 + further) * hidden * args["padded_vocab_size"]
    return 6 * batch * tokens * per_token


GQA = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "swiglu": True,
    "num_experts": None,
    "moe_router_topk": 2,
    "padded_vocab_size": 128256,
    "vocab_size": 128000,
    "seq_length": 8192,
    "multi_latent_attention": False,
    "kv_lora_rank": 32,  # the arguments have it also where it means nothing
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "no groups": {**GQA, "group_query_attention": False, "num_query_groups": 1},
    "wide heads": {**GQA, "kv_channels": 192},
    "no gate": {**GQA, "swiglu": False},
    "experts": {**GQA, "num_experts": 8, "moe_layer_freq": 1},
    "experts in every second layer": {
        **GQA,
        "num_experts": 16,
        "moe_layer_freq": 2,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 4096,
    },
    "latent attention": {
        **GQA,
        "num_layers": 61,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "num_attention_heads": 128,
        "group_query_attention": False,
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "padded_vocab_size": 129280,
        "mtp_num_layers": 1,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_megatron_counts_as_many_in_the_causal_convention_but_for_the_router(name: str) -> None:
    args = ARGUMENTS[name]
    found = model_flops(args, 4, args["seq_length"], convention="causal")
    assert found.family == "gpt"
    assert found.total - 3 * found.parts.get("router", 0) == megatron(args, 4)
    assert ("router" in found.parts) == bool(args["num_experts"])


# --- others -------------------------------------------------------------------------------------


# "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 4.2: 671 B parameters, 37 B of them for each token.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}


def test_deepseek_v3_has_the_active_parameters_of_its_report() -> None:
    def per_token(**fields: Any) -> int:
        found = model_flops(DEEPSEEK_V3, 1, 4096, backward=False, **fields)
        return (found.total - found.parts["attention_scores"]) // (2 * 4096)

    # A layer's attention: 7168·1536 + 1536·24576 + 7168·576 + 512·32768 + 16384·7168 = 187,105,280
    block = 187_105_280 + 7168 * 256 + 9 * 3 * 7168 * 2048
    weights = 61 * 187_105_280 + 3 * 3 * 7168 * 18432 + 58 * (block - 187_105_280) + 7168 * 129280
    assert per_token(num_nextn_predict_layers=0) == weights
    assert weights == pytest.approx(37e9, rel=0.015)
    assert per_token() - weights == block + 2 * 7168 * 7168 + 7168 * 129280


def test_vit_and_dit_have_the_multiply_adds_of_their_makers() -> None:
    """Both are given in "GFLOPs" of one multiply-add each, for one forward pass.

    ViT-B/16 at 224 pixels, 17.56: docs.pytorch.org/vision, vit_b_16. DiT-XL/2 at 256 pixels, so 32 of the latent
    image, 118.64: arXiv:2212.09748, table 4.
    """
    vit = {
        "model_type": "vit",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "num_labels": 1000,
    }
    assert model_flops(vit, 1, backward=False).total / 2e9 == pytest.approx(17.56, rel=0.002)
    dit = {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "sample_size": 32,
        "patch_size": 2,
    }
    assert model_flops(dit, 1, backward=False).total / 2e9 == pytest.approx(118.64, rel=0.002)
