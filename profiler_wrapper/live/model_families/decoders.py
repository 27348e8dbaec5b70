"""Models that predict the next token: GPT, LLaMA, Qwen, Mixtral, Aquila, DeepSeek, and Megatron's."""

from __future__ import annotations

from collections import Counter

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.model_families.decoder_fields import HIDDEN, VOCABULARY, Dialect, blocks_of
from profiler_wrapper.live.model_families.fields import Fields
from profiler_wrapper.live.model_families.registry import register_family
from profiler_wrapper.live.model_families.work import Batch, Work

_LLAMA = Dialect(gated=True, key_heads_as_heads=True)


def decoder(fields: Fields, batch: Batch, dialect: Dialect) -> Work:
    """Blocks, and a head over every token; each module that predicts a further token has a block and the head too."""
    work = Work(batch)
    hidden = fields.whole(*HIDDEN)
    blocks = blocks_of(fields, dialect)
    further = _further_tokens(fields)
    for block, times in Counter([*blocks, *blocks[-1:] * further]).items():
        block.attention.add(work, hidden, causal=True, window=block.window, times=times)
        block.mlp.add(work, hidden, times=times)
    if further:
        work.linear("mtp_projections", 2 * hidden, hidden, times=further)
    outputs = _outputs(fields)
    if outputs:
        work.linear("head", hidden, outputs, times=1 + further)
    return work


def _further_tokens(fields: Fields) -> int:
    """Modules of multi-token prediction (DeepSeek-V3, arXiv:2412.19437).

    Transformers' own models name them in their configs, but have none when they are trained.
    """
    names = ["mtp_num_layers"]
    others = ["num_nextn_predict_layers", "num_mtp_layers"]
    if not fields.of_transformers or fields.given(*others):
        names += others
    return fields.whole(*names, default=0, least=0)


def _outputs(fields: Fields) -> int:
    """How many numbers the head gives for each token."""
    architecture = fields.architecture
    if architecture is None or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return fields.whole(*VOCABULARY)
    if architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return label_count(fields)
    if architecture.endswith("ForQuestionAnswering"):
        return 2
    if architecture.endswith("Model") and not architecture.endswith("DoubleHeadsModel"):
        return 0
    raise WrongUse(f"the head of {architecture} is not known: give the class of one that is, architectures=[...]")


def label_count(fields: Fields) -> int:
    """Classes that a classifier tells apart: Hugging Face's num_labels, else the names of id2label, else 2."""
    return fields.whole("num_labels", default=len(fields.get("id2label", default=())) or 2)


@register_family(
    "gpt",
    model_types=("gpt2", "gpt_neox"),
    marks=(("n_embd", "n_layer", "n_head"), ("num_layers", "swiglu"), ("num_layers", "gated_linear_unit")),
)
def gpt(fields: Fields, batch: Batch) -> Work:
    """GPT-2, GPT-3, and what Megatron's arguments or TransformerConfig tell: GQA, SwiGLU, experts, MLA, MTP."""
    dialect = {
        "gpt2": Dialect(gated=False, key_heads=(), mlp_width=("n_inner",), mlp_four_times=True),
        "gpt_neox": Dialect(gated=False, key_heads=(), mlp_width=("intermediate_size",)),
    }.get(fields.model_type or "", Dialect(gated=False, key_heads_as_heads=True, mlp_four_times=True))
    return decoder(fields, batch, dialect)


@register_family(
    "llama",
    model_types=("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
    marks=(("num_key_value_heads", "intermediate_size", "rms_norm_eps"),),
)
def llama(fields: Fields, batch: Batch) -> Work:
    """Gated MLP; keys and values of fewer heads."""
    has_own = fields.model_type in ("mistral", "gemma", "gemma2", "gemma3_text")  # a number of heads of keys
    return decoder(fields, batch, Dialect(gated=True) if has_own else _LLAMA)


@register_family("aquila", model_types=("aquila",))
def aquila(fields: Fields, batch: Batch) -> Work:
    """Has LLaMA's products."""
    return decoder(fields, batch, _LLAMA)


@register_family("qwen", model_types=("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"))
def qwen(fields: Fields, batch: Batch) -> Work:
    """Qwen1.5, 2, 2.5 and 3, dense or with experts, shared ones of them."""
    if fields.model_type == "qwen" and fields.has("no_bias"):
        raise WrongUse("the config is of Qwen 1, whose MLP has half of intermediate_size: no formula here counts it")
    has_experts = fields.model_type in ("qwen2_moe", "qwen3_moe")
    return decoder(fields, batch, Dialect(gated=True, experts=has_experts))


@register_family(
    "mixtral", model_types=("mixtral",), marks=(("num_local_experts", "num_experts_per_tok", "intermediate_size"),)
)
def mixtral(fields: Fields, batch: Batch) -> Work:
    """Experts as wide as the config's MLP where no width of theirs is given."""
    return decoder(fields, batch, Dialect(gated=True, experts=True, experts_as_mlp=True))


@register_family(
    "deepseek",
    model_types=("deepseek_v2", "deepseek_v3"),
    marks=(("kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"),),
)
def deepseek(fields: Fields, batch: Batch) -> Work:
    """Latent attention, dense blocks first, then experts and shared ones; modules for further tokens."""
    return decoder(fields, batch, Dialect(gated=True, experts=True, latent=True))
