"""FLOPs of a step by family, from the fields of a config: one formula for the layers of all, and what is around them.

A decoder's products are those of "Attention Is All You Need" (arXiv:1706.03762), with grouped keys (GQA,
arXiv:2305.13245), gated MLPs (arXiv:2002.05202), experts (Mixtral, arXiv:2401.04088; shared ones and latent
attention: DeepSeek-V2, arXiv:2405.04434) and further tokens (DeepSeek-V3, arXiv:2412.19437); Megatron-LM's
`num_floating_point_operations` counts the same, but no router. BERT: arXiv:1810.04805, ViT: arXiv:2010.11929, DiT:
arXiv:2212.09748, CogVideoX: arXiv:2408.06072, with the heads of transformers and the blocks of diffusers.

`torch.utils.flop_counter` on the meta device gives the same for what it can run, and is no substitute: it needs torch
and a model that can be built, so no Megatron arguments and no plain fields; and routers read their data, which meta
tensors lack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from profiler_wrapper.config_flops.model_flops import Batch, Fields, Work, register_family, whole_number
from profiler_wrapper.errors import WrongUse, listed, shown

# The names under which configs of Hugging Face and Megatron have a field.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_query_groups")
HEAD_WIDTH = ("head_dim", "kv_channels")
MLP_WIDTH = ("intermediate_size", "ffn_hidden_size", "n_inner")
VOCABULARY = ("padded_vocab_size", "vocab_size")
LABELS = ("num_labels",)
GATED = ("swiglu", "gated_linear_unit")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts")
CHOSEN = ("num_experts_per_tok", "moe_router_topk")
EXPERT_WIDTH = ("moe_intermediate_size", "moe_ffn_hidden_size", "ffn_hidden_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
# What another formula would be needed for, where it is set.
UNCOUNTED = (
    *("is_encoder_decoder", "add_cross_attention", "text_config", "vision_config", "decoder_num_layers"),
    *("use_bidirectional_attention", "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
    *("experimental_attention_variant", "linear_attention_type", "moe_latent_size", "index_topk"),
    "num_kv_shared_layers",
)


def layers(work: Work, fields: Fields, *, causal: bool = False, further: int = 0) -> None:
    """Add attention and MLP or experts of all layers, and of the last one `further` times more."""
    for name in UNCOUNTED:
        if (value := fields.get(name)) not in (None, 0, ""):
            raise WrongUse(
                f"the config has {name}={shown(value)}, which no registered formula counts: "
                "register one (register_family), or measure the FLOPs of a step"
            )
    hidden, count = fields.whole(*HIDDEN), fields.whole(*LAYERS)
    # Megatron's arguments have a rank also where the attention is not latent.
    attention = _latent_attention if fields.flag("multi_latent_attention") else _grouped_attention
    weights, *scores = attention(fields, hidden)
    windows, sparse = _windows(fields, count), _sparse(fields, count)
    work.linear("attention_projections", 1, weights, times=count + further)
    for window, times in Counter([*windows, *windows[-1:] * further]).items():
        work.attention(*scores, causal=causal, window=window, times=times)
    matrices = 3 if fields.flag(*GATED) else 2
    for has_experts, times in Counter([*sparse, *sparse[-1:] * further]).items():
        parts = _experts(fields, matrices) if has_experts else {"mlp": matrices * fields.whole(*MLP_WIDTH)}
        for part, outputs in parts.items():
            work.linear(part, hidden, outputs, times=times)


def _grouped_attention(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    """Return weights of the projections, and number of heads, their width and that of values; keys have fewer heads."""
    heads = key_heads = fields.whole(*HEADS)
    if fields.flag("group_query_attention"):
        key_heads = fields.whole(*KEY_HEADS, default=heads if fields.has(*KEY_HEADS) else None)
    if heads % key_heads:
        raise WrongUse(f"the config has {heads} heads of queries, which {key_heads} heads of keys cannot share")
    width = fields.whole(*HEAD_WIDTH)
    as_queries = 3 if fields.flag("attention_output_gate") else 2  # queries, output and its gate
    return hidden * width * (as_queries * heads + 2 * key_heads), heads, width, width


def _latent_attention(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    """Return the same for queries and keys from narrow projections, and a rotary key that all heads share."""
    heads, key_rank = fields.whole(*HEADS), fields.whole("kv_lora_rank")
    plain = fields.whole("qk_nope_head_dim", "qk_head_dim")  # Hugging Face's own qk_head_dim is the sum of both
    rotary = fields.whole("qk_rope_head_dim", "qk_pos_emb_head_dim")
    value = fields.whole("v_head_dim")
    queries = heads * (plain + rotary)
    narrow = fields.whole("q_lora_rank", default=0 if fields.has("q_lora_rank") else None, least=0)
    into = narrow * (hidden + queries) if narrow else hidden * queries
    keys = hidden * (key_rank + rotary) + key_rank * heads * (plain + value)
    return into + keys + heads * value * hidden, heads, plain + rotary, value


def _windows(fields: Fields, count: int) -> list[int | None]:
    """Return for each layer how many tokens a query sees, itself the last; None: all."""
    slides = fields.flag("use_sliding_window", default=True)
    width = fields.whole("sliding_window", default=0, least=0) if slides else 0
    if (types := fields.get("layer_types")) is not None:
        if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
            raise WrongUse(f"the config has layers of type {listed(unknown)}, which no formula here counts")
        has = _one_a_layer("layer_types", [kind == "sliding_attention" for kind in types], count)
    elif window := fields.get("window_size"):  # Megatron's: tokens before the query and after it, -1 for all
        width = whole_number("window_size[0] of the config", window[0], least=-1) + 1
        has = _by_frequency(fields, "window_attn_skip_freq", count, lambda index, every: (index + 1) % every != 0)
    elif not width or fields.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        has = [True] * count
    elif fields.model_type != "qwen2_moe" and fields.get("max_window_layers") is not None:
        first = fields.whole("max_window_layers", least=0)
        has = [index >= first for index in range(count)]
    else:
        raise WrongUse(
            f"the config has sliding_window={width}, but not which layers have it: give layer_types, a list of "
            '"sliding_attention" and "full_attention", or sliding_window=None'
        )
    return [width if width and one else None for one in has]


def _one_a_layer(name: str, entries: Sequence[object], count: int) -> list[bool]:
    if len(entries) != count:
        raise WrongUse(f"the config has {count} layers, but {name} for {len(entries)}")
    return [bool(entry) for entry in entries]


_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def _by_frequency(fields: Fields, name: str, count: int, rule: Callable[[int, int], bool]) -> list[bool]:
    """Return which layers have what a field of Megatron's is about: all, where the field is absent.

    It is a number, for a `rule` of a layer's index and that number; a list of 0 and 1; or either written out, such as
    "[0]*3+[1]*58".
    """
    found = fields.get(name)
    if isinstance(found, str):
        text = re.sub(r"[\s()]", "", found)
        terms = [_TERM.fullmatch(term) for term in text.split("+")]
        if not text.isdigit() and not all(terms):
            raise WrongUse(f'{name}={shown(found)} of the config is no list such as "[0]*3+[1]*58"')
        digits = [digit == "1" for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]
        found = digits or int(text)
    if isinstance(found, Sequence):
        return _one_a_layer(f"a {name}", found, count)
    every = None if found is None else whole_number(f"{name} of the config", found)
    return [every is None or rule(index, every) for index in range(count)]


def _sparse(fields: Fields, count: int) -> list[bool]:
    """Return for each layer whether it has experts in the place of an MLP: every rule that the config has must hold."""
    if not fields.whole(*EXPERTS, least=0):
        return [False] * count
    has = _by_frequency(fields, "moe_layer_freq", count, lambda index, every: index % every == 0)
    in_list = isinstance(fields.get("moe_layer_freq"), Sequence)  # which layers are dense
    first = fields.whole("first_k_dense_replace", default=0 if in_list else None, least=0)
    step, dense = fields.whole("decoder_sparse_step", default=1), set(fields.get("mlp_only_layers", default=()))
    return [one and i >= first and (i + 1) % step == 0 and i not in dense for i, one in enumerate(has)]


def _experts(fields: Fields, matrices: int) -> dict[str, int]:
    """Return the outputs of a router, the chosen experts, and those that all tokens share, with a gate of one."""
    routed, chosen = fields.whole(*EXPERTS), fields.whole(*CHOSEN)
    if chosen > routed:
        raise WrongUse(f"the config has {routed} experts, of which a token cannot go through {chosen}")
    parts = {"router": routed, "experts": matrices * fields.whole(*EXPERT_WIDTH) * chosen}
    shared = fields.whole(*SHARED_WIDTH, least=0)
    gate = fields.flag("moe_shared_expert_gate", default=fields.has("shared_expert_intermediate_size"))
    if shared:
        parts["shared_experts"] = matrices * shared + gate
    return parts


def _even_width(fields: Fields) -> int:
    hidden, heads = fields.whole(*HIDDEN), fields.whole(*HEADS)
    if hidden % heads:
        raise WrongUse(f"the config's hidden size {hidden} is no multiple of its {heads} heads, and it has no head_dim")
    return hidden // heads


def _shared_width(fields: Fields) -> int:
    number = fields.whole("n_shared_experts", default=0 if fields.has(*SHARED_WIDTH) else None, least=0)
    return number * fields.whole(*EXPERT_WIDTH)


_ASSUMED: dict[str, Any] = {  # of a config that does not say it
    "num_key_value_heads": lambda fields: fields.whole(*HEADS),
    "head_dim": _even_width,
    "group_query_attention": True,
    "multi_latent_attention": lambda fields: fields.get("kv_lora_rank") is not None,
    "intermediate_size": lambda fields: None if fields.flag(*GATED) else 4 * fields.whole(*HIDDEN),
    "swiglu": True,  # the MLP has three matrices: SwiGLU, GeGLU
    "num_experts": 0,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": _shared_width,
    "first_k_dense_replace": 0,
    "num_labels": lambda fields: len(fields.get("id2label", default=())) or 2,
}


_ALWAYS = {  # model_type, or else family -> the fields that its configs always have, so that nothing is assumed
    "gpt_neox": "intermediate_size",
    **dict.fromkeys(("mistral", "qwen"), "num_key_value_heads"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "qwen3"), "num_key_value_heads head_dim"),
    "qwen2_moe": "num_key_value_heads num_experts shared_expert_intermediate_size",
    **dict.fromkeys(("qwen3_moe", "mixtral"), "num_key_value_heads num_experts"),
    "deepseek": "num_experts n_shared_experts first_k_dense_replace",
}


def _assumed(always: str, **others: Any) -> dict[str, Any]:
    """Return what is assumed where configs `always` have some fields, and others are assumed to be otherwise."""
    return {name: value for name, value in {**_ASSUMED, **others}.items() if name not in always.split()}


def _register_decoder(name: str, model_types: Sequence[str], *marks: Sequence[str], **assumed: Any) -> None:
    """Register a family of decoders: layers, and a head over every token."""

    @register_family(name, model_types=model_types, marks=marks)
    def decoder(fields: Fields, batch: Batch) -> Work:
        if name == "qwen" and fields.has("no_bias"):
            raise WrongUse(
                "the config is of Qwen 1, whose MLP has half of intermediate_size: no formula here counts it"
            )
        fields.assumed = _assumed(_ALWAYS.get(fields.model_type or name, _ALWAYS.get(name, "")), **assumed)
        # Transformers' configs name modules for further tokens, which their models do not have in training.
        is_built = type(fields.config).__module__.startswith("transformers.")
        others = () if is_built and fields.given.keys().isdisjoint(FURTHER_TOKENS) else FURTHER_TOKENS
        further = fields.whole("mtp_num_layers", *others, default=0, least=0)
        work, hidden = Work(batch), fields.whole(*HIDDEN)
        layers(work, fields, causal=True, further=further)
        if further:
            work.linear("mtp_projections", 2 * hidden, hidden, times=further)
        outputs = _HEADS[fields.head(*_HEADS)]
        if outputs:
            outputs = outputs if isinstance(outputs, int) else fields.whole(*outputs)
            work.linear("head", hidden, outputs, times=1 + further)
        return work


_HEADS: dict[str, Sequence[str] | int] = {  # how a class's name ends -> its head's outputs, or the field that says them
    **dict.fromkeys(("ForCausalLM", "LMHeadModel"), VOCABULARY),
    **dict.fromkeys(("ForSequenceClassification", "ForTokenClassification"), LABELS),
    "ForQuestionAnswering": 2,
    "Model": 0,
}

_register_decoder(  # also what Megatron's arguments or TransformerConfig tell: GQA, SwiGLU, experts, MLA, MTP
    "gpt",
    ("gpt2", "gpt_neox"),
    *(("n_embd", "n_layer", "n_head"), ("num_layers", "swiglu"), ("num_layers", "gated_linear_unit")),
    swiglu=False,
)
_register_decoder(
    "llama",
    ("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
    ("num_key_value_heads", "intermediate_size", "rms_norm_eps"),
)
_register_decoder("aquila", ("aquila",))
_register_decoder("qwen", ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"))
_register_decoder(
    "mixtral",
    ("mixtral",),
    ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    moe_intermediate_size=lambda fields: fields.whole(*MLP_WIDTH),
)
_register_decoder(
    "deepseek",
    ("deepseek_v2", "deepseek_v3"),
    ("kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"),
    multi_latent_attention=True,
)

_ENCODER = _assumed("intermediate_size", swiglu=False, group_query_attention=False)  # of BERT, ViT and DiT


@register_family("bert", model_types=("bert",), marks=(("type_vocab_size", "hidden_size", "intermediate_size"),))
def bert(fields: Fields, batch: Batch) -> Work:
    """Count BERT, without a class in the config as trained: with the head that fills in masked words at every token.

    Megatron's bert_binary_head adds the pooler and the prediction of the next sentence.
    """
    work, fields.assumed = Work(batch), _ENCODER
    layers(work, fields, causal=fields.flag("is_decoder"))
    hidden = fields.whole(*HIDDEN)
    words = ("ForPreTraining", "ForMaskedLM", "LMHeadModel")
    classes = ("ForTokenClassification", "ForQuestionAnswering")
    pooled = {"ForPreTraining": 2, "ForNextSentencePrediction": 2, "ForMultipleChoice": 1, "Model": 0}
    trained = "ForPreTraining" if fields.flag("bert_binary_head") else "ForMaskedLM"
    head = fields.head(trained, *words, *classes, *pooled, "ForSequenceClassification")
    if head in words:
        work.linear("head", hidden, hidden + fields.whole(*VOCABULARY))
    elif head in classes:
        work.linear("head", hidden, fields.whole(*LABELS))
    elif head == "ForSequenceClassification":
        pooled[head] = fields.whole(*LABELS)
    if head in pooled:
        work.linear("head", hidden, hidden + pooled[head], rows=batch.sequences)
    return work


@register_family("vit", model_types=("vit",), marks=(("image_size", "patch_size", "num_channels"),))
def vit(fields: Fields, batch: Batch) -> Work:
    """Count ViT: patches by a convolution, a class token, and a classifier of it.

    The sequence is the class token and the patches; without a length given, those of the config's image size.
    The patches come from the data, so their gradient is not computed.
    """
    (height, width), (patch_height, patch_width) = _sides(fields, "image_size"), _sides(fields, "patch_size")
    work = Work(batch.or_of_length(1 + (height // patch_height) * (width // patch_width)))
    fields.assumed = _ENCODER
    hidden, pixels = fields.whole(*HIDDEN), fields.whole("num_channels") * patch_height * patch_width
    work.linear("embedding", pixels, hidden, rows=work.tokens - batch.sequences, input_gradient=False)
    layers(work, fields)
    has_pooler = fields.head("ForImageClassification", "Model") == "Model"
    outputs = fields.whole("pooler_output_size", default=hidden) if has_pooler else fields.whole(*LABELS)
    work.linear("head", hidden, outputs, rows=batch.sequences)
    return work


def _sides(fields: Fields, name: str) -> tuple[int, int]:
    """Return height and width of what may be given as one number."""
    value = fields.get(name)
    if not isinstance(value, Sequence) or len(value) != 2:
        return fields.whole(name), fields.whole(name)
    return whole_number(f"{name} of the config", value[0]), whole_number(f"{name} of the config", value[1])


_SINE_WIDTH = 256  # numbers that DiT makes of a timestep (arXiv:2212.09748, and diffusers)
_IS_GATED = {"geglu": True, "swiglu": True, "gelu": False, "gelu-approximate": False, "linear-silu": False}


@register_family(
    "dit",
    class_names=("DiTTransformer2DModel", "CogVideoXTransformer3DModel"),
    marks=(("num_embeds_ada_norm", "attention_head_dim"), ("sample_frames", "text_embed_dim", "attention_head_dim")),
)
def dit(fields: Fields, batch: Batch) -> Work:
    """Count DiT: the sequence is the patches of a latent image; of CogVideoX, the text and those of a latent video.

    Without a length given, it is that of the config's sample size. What comes from the data (patches, text,
    the sines of a timestep) has no gradient. Modulation has one row for each sample, not for each token.
    """
    if fields.get("norm_type", default="ada_norm_zero") != "ada_norm_zero":
        raise WrongUse(f"a DiT with norm_type={shown(fields.get('norm_type'))} has other products than counted here")
    activation = fields.get("activation_fn", default="gelu-approximate")
    if activation not in _IS_GATED:
        raise WrongUse(f"activation_fn={shown(activation)} of the config is not known: one of {', '.join(_IS_GATED)}")
    is_video = fields.get("sample_frames") is not None
    if is_video:
        height, width = fields.whole("sample_height"), fields.whole("sample_width")
        text, depth = fields.whole("max_text_seq_length"), fields.whole("patch_size_t", default=1)
        # Frames are compressed in time but for the first, and some of them make a patch.
        frames = (fields.whole("sample_frames") - 1) // fields.whole("temporal_compression_ratio") + 1
    else:
        height, width = _sides(fields, "sample_size")
        text, depth, frames = 0, 1, 1
    patch_height, patch_width = _sides(fields, "patch_size")
    of_frame = (height // patch_height) * (width // patch_width)
    work = Work(batch.or_of_length(text - (-frames // depth) * of_frame))
    texts = batch.sequences * text
    patches = work.tokens - texts
    if patches <= 0:
        raise WrongUse(f"sequences of {work.tokens // batch.sequences} tokens have none but the {text} of the text")
    channels, pixels = fields.whole("in_channels"), patch_height * patch_width * depth
    heads, count = fields.whole(*HEADS), fields.whole(*LAYERS)
    hidden = heads * fields.whole("attention_head_dim")
    work.linear("embedding", channels * pixels, hidden, rows=patches, input_gradient=False)
    if is_video:
        work.linear("embedding", fields.whole("text_embed_dim"), hidden, rows=texts, input_gradient=False)
    _modulate(work, fields, hidden, is_video=is_video)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": heads, "num_layers": count}
    blocks = Fields({**sizes, "swiglu": _IS_GATED[activation]})
    blocks.assumed = _ENCODER
    layers(work, blocks)
    out_channels = fields.whole("out_channels", default=None if is_video else channels)
    work.linear("head", hidden, out_channels * pixels, rows=patches)
    return work


def _modulate(work: Work, fields: Fields, hidden: int, *, is_video: bool) -> None:
    """Add what embeds a timestep, and from that shift, scale and gate of attention and MLP, and two more at the end.

    Each block of DiT in diffusers embeds the timestep by itself, and the first one's embedding runs again at the end.
    """
    count, rows = fields.whole(*LAYERS), work.batch.sequences
    if is_video:
        width, modulations = fields.whole("time_embed_dim"), 2 * count
        offset = fields.whole("ofs_embed_dim", default=0, least=0)
        embeddings = [(hidden, width, 1), (offset, offset, 1)]
    else:
        width, modulations = hidden, count
        embeddings = [(_SINE_WIDTH, hidden, count + 1)]
    for sines, outputs, times in embeddings:
        work.linear("conditioning", sines, outputs, rows=rows, times=times, input_gradient=False)
        work.linear("conditioning", outputs, outputs, rows=rows, times=times)
    work.linear("modulation", width, (6 * modulations + 2) * hidden, rows=rows)
