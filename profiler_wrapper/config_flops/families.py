"""FLOPs of a step by family, from the fields of a config: one formula for decoders, and those of BERT, ViT and DiT.

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
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from profiler_wrapper.config_flops.model_flops import Batch, Fields, Work, register_family, whole_number
from profiler_wrapper.errors import WrongUse, listed, shown

# --- The names under which configs of Hugging Face and Megatron have a field ---

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_query_groups")
HEAD_WIDTH = ("head_dim", "kv_channels")
MLP_WIDTH = ("intermediate_size", "ffn_hidden_size", "n_inner")
VOCABULARY = ("padded_vocab_size", "vocab_size")
GATED = ("swiglu", "gated_linear_unit")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts")
CHOSEN = ("num_experts_per_tok", "moe_router_topk")
EXPERT_WIDTH = ("moe_intermediate_size", "moe_ffn_hidden_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
# What another formula would be needed for, where it is set.
UNCOUNTED = (
    *("is_encoder_decoder", "add_cross_attention", "text_config", "vision_config", "decoder_num_layers"),
    *("use_bidirectional_attention", "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
    *("experimental_attention_variant", "linear_attention_type", "moe_latent_size", "index_topk"),
    "num_kv_shared_layers",
)
# Model types whose window is every layer's, and those whose heads are of a width of their own.
_ALL_IN_WINDOW = {"mistral", "mixtral", "phi3", "qwen3_moe"}
_OWN_HEAD_WIDTH = {"gemma", "gemma2", "gemma3_text", "qwen3"}


class Dialect(NamedTuple):
    """What a family's configs leave unsaid."""

    gated: bool = True  # the MLP has three matrices where the config does not say (SwiGLU, GeGLU)
    grouped: bool = True  # heads of queries share heads of keys and values, as the config says (GQA)
    key_heads_as_heads: bool = False  # as many heads of keys as of queries where the config has no field for it
    mlp_width: tuple[str, ...] = MLP_WIDTH  # the fields that are read
    mlp_four_times: bool = False  # the MLP is four times as wide as the model where the config does not say
    experts: bool = False  # there are experts, and the config has to say how many
    experts_as_mlp: bool = False  # they are as wide as the MLP where the config does not say
    latent: bool = False  # DeepSeek's: latent attention, dense layers first, shared experts


# --- attention ----------------------------------------------------------------------------------


class Attention(NamedTuple):
    """Projections, and the scores of each of `heads`, `width` wide, with sums of values of `value_width`."""

    weights: int  # of the projections; each token is multiplied with all
    heads: int
    width: int
    value_width: int

    def add(self, work: Work, *, causal: bool, window: int | None = None, times: int = 1) -> None:
        work.linear("attention_projections", 1, self.weights, times=times)
        work.attention(self.heads, self.width, self.value_width, causal=causal, window=window, times=times)


def _grouped_attention(hidden: int, heads: int, key_heads: int, width: int, *, gate: bool = False) -> Attention:
    """Queries, keys and values, and back; `gate`: one more projection, as wide as the queries, multiplies the output.

    heads x width need not be the width of the model.
    """
    return Attention(hidden * width * ((3 if gate else 2) * heads + 2 * key_heads), heads, width, width)


def _latent_attention(fields: Fields, hidden: int, heads: int) -> Attention:
    """Queries from a narrow projection or from none, keys and values from one, and a rotary key shared by all heads."""
    if not fields.has("q_lora_rank"):  # which may be None
        raise fields.missing("q_lora_rank")
    # Hugging Face's own qk_head_dim is the sum of both.
    is_megatrons = fields.get("qk_pos_emb_head_dim") is not None and fields.get("qk_nope_head_dim") is None
    narrow = fields.whole("q_lora_rank") if fields.get("q_lora_rank") is not None else None
    key_rank = fields.whole("kv_lora_rank")
    plain = fields.whole("qk_nope_head_dim", *(["qk_head_dim"] if is_megatrons else []))
    rotary = fields.whole("qk_rope_head_dim", "qk_pos_emb_head_dim")
    value = fields.whole("v_head_dim")
    queries = heads * (plain + rotary)
    into = hidden * queries if narrow is None else narrow * (hidden + queries)
    keys = hidden * (key_rank + rotary) + key_rank * heads * (plain + value)
    return Attention(into + keys + heads * value * hidden, heads, plain + rotary, value)


def _attention(fields: Fields, dialect: Dialect, hidden: int) -> Attention:
    heads = fields.whole(*HEADS)
    # Megatron's arguments have a rank also where the attention is not latent.
    if fields.flag("multi_latent_attention", default=dialect.latent or fields.get("kv_lora_rank") is not None):
        return _latent_attention(fields, hidden, heads)
    key_heads, width = _key_heads(fields, dialect, heads), _head_width(fields, heads)
    return _grouped_attention(hidden, heads, key_heads, width, gate=fields.flag("attention_output_gate"))


def _key_heads(fields: Fields, dialect: Dialect, heads: int) -> int:
    of_megatron = fields.has("group_query_attention")  # without it, the number of groups is not used
    if (of_megatron and not fields.flag("group_query_attention")) or not dialect.grouped:
        return heads
    may_be_missing = dialect.key_heads_as_heads or any(fields.has(name) for name in KEY_HEADS)
    key_heads = fields.whole(*KEY_HEADS, default=heads if may_be_missing else None)
    if heads % key_heads:
        raise WrongUse(f"the config has {heads} heads of queries, which {key_heads} heads of keys cannot share")
    return key_heads


def _head_width(fields: Fields, heads: int) -> int:
    """Of a head: as the config says, or the model's width divided among them."""
    hidden = fields.whole(*HIDDEN)
    own = fields.model_type in _OWN_HEAD_WIDTH
    if not own and fields.get(*HEAD_WIDTH) is None and hidden % heads:
        raise WrongUse(f"the config's hidden size {hidden} is no multiple of its {heads} heads, and it has no head_dim")
    return fields.whole(*HEAD_WIDTH, default=None if own else hidden // heads)


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """For each layer how many tokens a query sees, itself the last; None: all."""
    types = fields.get("layer_types")
    slides = fields.flag("use_sliding_window", default=True)
    width = fields.whole("sliding_window", default=0, least=0) if slides else 0
    if types is not None:
        if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
            raise WrongUse(f"the config has layers of type {listed(unknown)}, which no formula here counts")
        has = [kind == "sliding_attention" for kind in _one_a_layer(layers, "layer_types", types)]
    elif fields.get("window_size"):  # Megatron's: tokens before the query and after it, -1 for all
        width = whole_number("window_size[0] of the config", fields.get("window_size")[0], least=-1) + 1
        skip = fields.get("window_attn_skip_freq")  # every n-th layer has none, or a list
        if skip is None or isinstance(skip, Sequence):
            has = [True] * layers if skip is None else _one_a_layer(layers, "a window_attn_skip_freq", skip)
        else:
            every = whole_number("window_attn_skip_freq of the config", skip)
            has = [(index + 1) % every != 0 for index in range(layers)]
    elif not width or fields.model_type in _ALL_IN_WINDOW:
        has = [True] * layers
    elif fields.model_type != "qwen2_moe" and fields.get("max_window_layers") is not None:
        first = fields.whole("max_window_layers", least=0)
        has = [index >= first for index in range(layers)]
    else:
        raise WrongUse(
            f"the config has sliding_window={width}, but not which layers have it: give layer_types, a list of "
            '"sliding_attention" and "full_attention", or sliding_window=None'
        )
    return [width if width and one else None for one in has]


def _one_a_layer(layers: int, name: str, entries: Sequence[Any]) -> list[Any]:
    if len(entries) != layers:
        raise WrongUse(f"the config has {layers} layers, but {name} for {len(entries)}")
    return list(entries)


# --- MLP and experts: the outputs of each part, as wide an input each as the model -----------------


def _dense(fields: Fields, dialect: Dialect, matrices: int, hidden: int) -> dict[str, int]:
    default = 4 * hidden if dialect.mlp_four_times and matrices == 2 else None
    return {"mlp": matrices * fields.whole(*dialect.mlp_width, default=default)}


def _experts(fields: Fields, dialect: Dialect, matrices: int, hidden: int) -> dict[str, int]:
    """A router, the chosen experts, and those that all tokens share; a product with one vector may weigh the latter."""
    as_mlp = dialect.experts_as_mlp or fields.has("ffn_hidden_size")  # as Megatron has it
    width = fields.whole(*EXPERT_WIDTH, *(MLP_WIDTH if as_mlp else ()))
    routed, chosen = fields.whole(*EXPERTS), fields.whole(*CHOSEN)
    if chosen > routed:
        raise WrongUse(f"the config has {routed} experts, of which a token cannot go through {chosen}")
    # The shared ones by their width, or as a number of experts of the width of others.
    if fields.get(*SHARED_WIDTH) is not None or fields.model_type == "qwen2_moe":
        shared = fields.whole(*SHARED_WIDTH, least=0)
    else:
        needed = dialect.latent and not any(fields.has(name) for name in SHARED_WIDTH)
        shared = width * fields.whole("n_shared_experts", default=None if needed else 0, least=0)
    gate = fields.flag("moe_shared_expert_gate", default=fields.get("shared_expert_intermediate_size") is not None)
    parts = {"router": routed, "experts": matrices * width * chosen}
    return {**parts, "shared_experts": matrices * shared + gate} if shared else parts


def _sparse(fields: Fields, dialect: Dialect, layers: int) -> list[bool]:
    """For each layer whether it has experts in the place of an MLP. Every rule that the config has must hold."""
    if not fields.whole(*EXPERTS, default=None if dialect.experts else 0, least=0):
        return [False] * layers
    frequency = fields.get("moe_layer_freq")
    pattern = _pattern(frequency, layers)
    in_pattern = not dialect.latent or isinstance(frequency, Sequence)  # which layers are dense
    first = fields.whole("first_k_dense_replace", default=0 if in_pattern else None, least=0)
    step = fields.whole("decoder_sparse_step", default=1)
    dense = set(fields.get("mlp_only_layers", default=()))
    return [has and i >= first and (i + 1) % step == 0 and i not in dense for i, has in enumerate(pattern)]


_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def _pattern(frequency: object, layers: int) -> list[bool]:
    """Megatron's moe_layer_freq: every n-th layer from the first, a list of 0 and 1, or such a list written out."""
    if isinstance(frequency, str):
        text = re.sub(r"[\s()]", "", frequency)
        terms = [_TERM.fullmatch(term) for term in text.split("+")]
        if text.isdigit():
            frequency = int(text)
        elif not all(terms):
            raise WrongUse(f'moe_layer_freq={shown(frequency)} of the config is no list such as "[0]*3+[1]*58"')
        else:
            frequency = [digit == "1" for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]
    if isinstance(frequency, Sequence):
        return [bool(entry) for entry in _one_a_layer(layers, "a moe_layer_freq", frequency)]
    every = 1 if frequency is None else whole_number("moe_layer_freq of the config", frequency)
    return [index % every == 0 for index in range(layers)]


# --- the whole decoder --------------------------------------------------------------------------


def decoder(fields: Fields, batch: Batch, dialect: Dialect) -> Work:
    """Blocks, and a head over every token; each module that predicts a further token has a block and the head too."""
    work = Work(batch)
    hidden = fields.whole(*HIDDEN)
    fields.refuse(*UNCOUNTED)
    layers = fields.whole(*LAYERS)
    attention = _attention(fields, dialect, hidden)
    windows, sparse = _windows(fields, layers), _sparse(fields, dialect, layers)
    matrices = 3 if fields.flag(*GATED, default=dialect.gated) else 2
    # What of these the layers have is read, and no field of the other.
    experts = _experts(fields, dialect, matrices, hidden) if any(sparse) else {}
    dense = _dense(fields, dialect, matrices, hidden) if not all(sparse) else {}
    further = _further_tokens(fields)
    for window, times in Counter([*windows, *windows[-1:] * further]).items():
        attention.add(work, causal=True, window=window, times=times)
    for has_experts, times in Counter([*sparse, *sparse[-1:] * further]).items():
        for part, outputs in (experts if has_experts else dense).items():
            work.linear(part, hidden, outputs, times=times)
    if further:
        work.linear("mtp_projections", 2 * hidden, hidden, times=further)
    if outputs := _outputs(fields):
        work.linear("head", hidden, outputs, times=1 + further)
    return work


def _further_tokens(fields: Fields) -> int:
    """Modules of multi-token prediction (DeepSeek-V3, arXiv:2412.19437).

    Transformers' own models name them in their configs, but have none when they are trained.
    """
    others = ("num_nextn_predict_layers", "num_mtp_layers")
    known = not fields.of_transformers or fields.given(*others)
    return fields.whole("mtp_num_layers", *(others if known else ()), default=0, least=0)


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
    raise _unknown_head(architecture)


def _unknown_head(name: str) -> WrongUse:
    return WrongUse(f"the head of {name} is not known: give the class of one that is, architectures=[...]")


def label_count(fields: Fields) -> int:
    """Classes that a classifier tells apart: Hugging Face's num_labels, else the names of id2label, else 2."""
    return fields.whole("num_labels", default=len(fields.get("id2label", default=())) or 2)


_LLAMA = Dialect(key_heads_as_heads=True)
_DIALECTS = {  # by the model_type; of others it is the family's
    "gpt2": Dialect(gated=False, grouped=False, mlp_width=("n_inner",), mlp_four_times=True),
    "gpt_neox": Dialect(gated=False, grouped=False, mlp_width=("intermediate_size",)),
    **dict.fromkeys(("mistral", "gemma", "gemma2", "gemma3_text"), Dialect()),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), Dialect(experts=True)),
}


def _register_decoder(name: str, dialect: Dialect, model_types: Sequence[str], *marks: Sequence[str]) -> None:
    @register_family(name, model_types=model_types, marks=marks)
    def formula(fields: Fields, batch: Batch) -> Work:
        if name == fields.model_type == "qwen" and fields.has("no_bias"):
            raise WrongUse(
                "the config is of Qwen 1, whose MLP has half of intermediate_size: no formula here counts it"
            )
        return decoder(fields, batch, _DIALECTS.get(fields.model_type or "", dialect))


_register_decoder(  # also what Megatron's arguments or TransformerConfig tell: GQA, SwiGLU, experts, MLA, MTP
    "gpt",
    Dialect(gated=False, key_heads_as_heads=True, mlp_four_times=True),
    ("gpt2", "gpt_neox"),
    *(("n_embd", "n_layer", "n_head"), ("num_layers", "swiglu"), ("num_layers", "gated_linear_unit")),
)
_register_decoder(
    "llama",
    _LLAMA,
    ("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
    ("num_key_value_heads", "intermediate_size", "rms_norm_eps"),
)
_register_decoder("aquila", _LLAMA, ("aquila",))
_register_decoder("qwen", Dialect(), ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"))
_register_decoder(
    "mixtral",
    Dialect(experts=True, experts_as_mlp=True),
    ("mixtral",),
    ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
)
_register_decoder(
    "deepseek",
    Dialect(experts=True, latent=True),
    ("deepseek_v2", "deepseek_v3"),
    ("kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"),
)


# --------------------------------------------------------------------------------------------------
# Models whose tokens all see each other: BERT, ViT and DiT. Both conventions of attention are the same for them.


def _encoder(work: Work, fields: Fields, hidden: int, width: int, mlp: int, *, causal: bool = False) -> None:
    """Blocks of attention with heads of `width`, and of an MLP whose matrices have `mlp` outputs together."""
    layers, heads = fields.whole(*LAYERS), fields.whole(*HEADS)
    _grouped_attention(hidden, heads, heads, width).add(work, causal=causal, times=layers)
    work.linear("mlp", hidden, mlp, times=layers)


@register_family("bert", model_types=("bert",), marks=(("type_vocab_size", "hidden_size", "intermediate_size"),))
def bert(fields: Fields, batch: Batch) -> Work:
    """Without a class in the config, as trained: with the head that fills in masked words, at every token.

    Megatron's bert_binary_head adds the pooler and the prediction of the next sentence.
    """
    fields.refuse(*UNCOUNTED)
    work = Work(batch)
    hidden, mlp = fields.whole(*HIDDEN), 2 * fields.whole(*MLP_WIDTH[:2])
    width = _head_width(fields, fields.whole(*HEADS))
    _encoder(work, fields, hidden, width, mlp, causal=fields.flag("is_decoder"))
    name = fields.architecture or ("BertForPreTraining" if fields.flag("bert_binary_head") else "BertForMaskedLM")
    words = {"BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel"}
    per_token = {"BertForTokenClassification", "BertForQuestionAnswering"}
    # Outputs over the pooled first token; None: one for each class.
    pooled: dict[str, int | None] = dict.fromkeys(("BertForPreTraining", "BertForNextSentencePrediction"), 2)
    pooled |= {"BertForMultipleChoice": 1, "BertForSequenceClassification": None, "BertModel": 0}
    if name not in words | per_token | pooled.keys():
        raise _unknown_head(name)
    if name in words:
        work.linear("head", hidden, hidden + fields.whole(*VOCABULARY))
    if name in per_token:
        work.linear("head", hidden, label_count(fields))
    if name in pooled:
        outputs = pooled[name]
        outputs = label_count(fields) if outputs is None else outputs
        work.linear("head", hidden, hidden + outputs, rows=work.batch.sequences)
    return work


# --- ViT ----------------------------------------------------------------------------------------


@register_family("vit", model_types=("vit",), marks=(("image_size", "patch_size", "num_channels"),))
def vit(fields: Fields, batch: Batch) -> Work:
    """Patches by a convolution, a class token, and a classifier of it.

    The sequence is the class token and the patches; without a length given, those of the config's image size.
    The patches come from the data, so their gradient is not computed.
    """
    height, width = sides(fields, "patch_size")
    work = Work(batch.or_of_length(1 + patches(fields, "image_size")))
    hidden, rows = fields.whole(*HIDDEN), work.batch.tokens - work.batch.sequences
    pixels = fields.whole("num_channels") * height * width
    work.linear("embedding", pixels, hidden, rows=rows, input_gradient=False)
    mlp = 2 * fields.whole(*MLP_WIDTH[:2])
    _encoder(work, fields, hidden, _head_width(fields, fields.whole(*HEADS)), mlp)
    name = fields.architecture or "ViTForImageClassification"
    if name not in ("ViTForImageClassification", "ViTModel"):
        raise _unknown_head(name)
    outputs = fields.whole("pooler_output_size", default=hidden) if name == "ViTModel" else label_count(fields)
    work.linear("head", hidden, outputs, rows=work.batch.sequences)
    return work


def sides(fields: Fields, *names: str) -> tuple[int, int]:
    """Height and width of what may be given as one number."""
    value = fields.get(*names)
    if value is None:
        raise fields.missing(*names)
    both = value if isinstance(value, Sequence) and len(value) == 2 else (value, value)
    height, width = (whole_number(f"{names[0]} of the config", side) for side in both)
    return height, width


def patches(fields: Fields, image: str) -> int:
    """How many patches an image of the config's size has."""
    (height, width), (patch_height, patch_width) = sides(fields, image), sides(fields, "patch_size")
    return (height // patch_height) * (width // patch_width)


_SINE_WIDTH = 256  # numbers that DiT makes of a timestep (arXiv:2212.09748, and diffusers)
_GATED = {"geglu": True, "swiglu": True, "gelu": False, "gelu-approximate": False, "linear-silu": False}


@register_family(
    "dit",
    class_names=("DiTTransformer2DModel", "CogVideoXTransformer3DModel"),
    marks=(("num_embeds_ada_norm", "attention_head_dim"), ("sample_frames", "text_embed_dim", "attention_head_dim")),
)
def dit(fields: Fields, batch: Batch) -> Work:
    """The sequence is the patches of a latent image; of CogVideoX, the text and the patches of a latent video.

    Without a length given, it is that of the config's sample size. What comes from the data (patches, text,
    the sines of a timestep) has no gradient. Modulation has one row for each sample, not for each token.
    """
    return _dit(fields, batch) if fields.get("sample_frames") is None else _cogvideox(fields, batch)


def _dit(fields: Fields, batch: Batch) -> Work:
    """In diffusers each block embeds the timestep by itself, and the first block's embedding runs again at the end."""
    if fields.get("norm_type", default="ada_norm_zero") != "ada_norm_zero":
        raise WrongUse(f"a DiT with norm_type={shown(fields.get('norm_type'))} has other products than counted here")
    work = Work(batch.or_of_length(patches(fields, "sample_size")))
    hidden, layers = fields.whole(*HEADS) * fields.whole("attention_head_dim"), fields.whole(*LAYERS)
    channels, patch = fields.whole("in_channels"), prod(sides(fields, "patch_size"))
    work.linear("embedding", channels * patch, hidden, input_gradient=False)
    _timestep(work, _SINE_WIDTH, hidden, times=layers + 1)
    _modulated_blocks(work, fields, hidden, modulations=layers)
    work.linear("head", hidden, fields.whole("out_channels", default=channels) * patch)
    return work


def _cogvideox(fields: Fields, batch: Batch) -> Work:
    """Frames are compressed in time but for the first, and some of them make a patch."""
    text, frames_of_patch = fields.whole("max_text_seq_length"), fields.whole("patch_size_t", default=1)
    side, other = sides(fields, "patch_size")
    frames = (fields.whole("sample_frames") - 1) // fields.whole("temporal_compression_ratio") + 1
    of_frame = (fields.whole("sample_height") // side) * (fields.whole("sample_width") // other)
    work = Work(batch.or_of_length(text - (-frames // frames_of_patch) * of_frame))
    hidden, layers = fields.whole(*HEADS) * fields.whole("attention_head_dim"), fields.whole(*LAYERS)
    time_width, tokens, sequences = fields.whole("time_embed_dim"), work.batch.tokens, work.batch.sequences
    texts = sequences * text
    if tokens <= texts:
        raise WrongUse(f"sequences of {tokens // sequences} tokens have none but the {text} of the text")
    volume = side * other * frames_of_patch
    work.linear("embedding", fields.whole("in_channels") * volume, hidden, rows=tokens - texts, input_gradient=False)
    work.linear("embedding", fields.whole("text_embed_dim"), hidden, rows=texts, input_gradient=False)
    _timestep(work, hidden, time_width)
    if offset := fields.whole("ofs_embed_dim", default=0, least=0):
        _timestep(work, offset, offset)
    _modulated_blocks(work, fields, hidden, modulations=2 * layers, width=time_width)
    work.linear("head", hidden, fields.whole("out_channels") * volume, rows=tokens - texts)
    return work


def _timestep(work: Work, sines: int, width: int, *, times: int = 1) -> None:
    """Two layers over the sines of the timestep, which come from the data."""
    rows = work.batch.sequences
    work.linear("conditioning", sines, width, rows=rows, times=times, input_gradient=False)
    work.linear("conditioning", width, width, rows=rows, times=times)


def _modulated_blocks(work: Work, fields: Fields, hidden: int, *, modulations: int, width: int | None = None) -> None:
    """Shift, scale and gate of attention and MLP from the timestep's embedding, `width` wide; at the end two more."""
    activation = fields.get("activation_fn", default="gelu-approximate")
    if activation not in _GATED:
        raise WrongUse(f"activation_fn={shown(activation)} of the config is not known: one of {', '.join(_GATED)}")
    work.linear("modulation", width or hidden, (6 * modulations + 2) * hidden, rows=work.batch.sequences)
    matrices = 3 if _GATED[activation] else 2
    _encoder(work, fields, hidden, fields.whole("attention_head_dim"), 4 * hidden * matrices)
