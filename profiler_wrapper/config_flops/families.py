"""The families: decoders, encoders and the diffusion Transformers of diffusers, from the fields of their configs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from profiler_wrapper.config_flops.model_flops import Batch, Fields, Work, register_family, whole_number
from profiler_wrapper.errors import WrongUse, shown

# --------------------------------------------------------------------------------------------------
# The parts of a Transformer's block, and the products that each of them has.


class HeadAttention(NamedTuple):
    """Attention whose keys and values may serve several heads of queries each (GQA)."""

    heads: int
    key_heads: int  # heads of keys and of values
    width: int  # of a head; heads x width need not be the width of the model
    gate: bool = False  # the output is multiplied by a projection of the input as wide as all queries

    def add(self, work: Work, hidden: int, *, causal: bool, window: int | None = None, times: int = 1) -> None:
        queries, keys = self.heads * self.width, self.key_heads * self.width
        into = queries + 2 * keys + (queries if self.gate else 0)
        work.linear("attention_projections", hidden, into + queries, times=times)  # in, and back out
        work.attention(self.heads, self.width, causal=causal, window=window, times=times)


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from one narrow projection."""

    heads: int
    query_rank: int | None  # width of the narrow projection of queries; None: they have none
    key_rank: int  # of keys and values
    # plain_width, rotary_width: of a head's query and key, without and with positions; the rotary key is shared
    # by all heads
    plain_width: int
    rotary_width: int
    value_width: int  # of a head's value

    def add(self, work: Work, hidden: int, *, causal: bool, window: int | None = None, times: int = 1) -> None:
        width = self.plain_width + self.rotary_width
        part = "attention_projections"
        if self.query_rank is None:
            work.linear(part, hidden, self.heads * width, times=times)
        else:
            work.linear(part, hidden, self.query_rank, times=times)
            work.linear(part, self.query_rank, self.heads * width, times=times)
        work.linear(part, hidden, self.key_rank + self.rotary_width, times=times)
        work.linear(part, self.key_rank, self.heads * (self.plain_width + self.value_width), times=times)
        work.linear(part, self.heads * self.value_width, hidden, times=times)
        work.attention(self.heads, width, self.value_width, causal=causal, window=window, times=times)


class Mlp(NamedTuple):
    """Two matrices, or three where one gates another (SwiGLU, GeGLU); or a mixture of experts that drops no token."""

    width: int  # of the MLP, or of each expert
    gated: bool
    routed: int = 0  # experts that a router chooses among; 0: there is no mixture
    chosen: int = 1  # experts that each token goes through
    shared_width: int = 0  # of the experts that all tokens share, together; 0: none
    shared_gate: bool = False  # a product of the input with one vector weighs their output

    def add(self, work: Work, hidden: int, *, times: int = 1) -> None:
        matrices = (3 if self.gated else 2) * times
        if not self.routed:
            work.linear("mlp", hidden, self.width, times=matrices)
            return
        work.linear("router", hidden, self.routed, times=times)
        work.linear("experts", hidden, self.width, times=matrices * self.chosen)
        if self.shared_width:
            work.linear("shared_experts", hidden, self.shared_width, times=matrices)
            if self.shared_gate:
                work.linear("shared_experts", hidden, 1, times=times)


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
    "is_encoder_decoder",
    "add_cross_attention",
    "text_config",
    "vision_config",
    "decoder_num_layers",
    "use_bidirectional_attention",
    "is_hybrid_model",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "experimental_attention_variant",
    "linear_attention_type",
    "moe_latent_size",
    "index_topk",
    "num_kv_shared_layers",
)
# Model types whose window is every layer's, and those whose heads are of a width of their own.
_ALL_IN_WINDOW = {"mistral", "mixtral", "phi3", "qwen3_moe"}
_OWN_HEAD_WIDTH = {"gemma", "gemma2", "gemma3_text", "qwen3"}


class Block(NamedTuple):
    attention: HeadAttention | LatentAttention
    mlp: Mlp
    window: int | None  # tokens that a query sees, itself the last


class Dialect(NamedTuple):
    """What a family's configs leave unsaid."""

    gated: bool  # the MLP has three matrices where the config does not say
    key_heads_as_heads: bool = False  # as many heads of keys as of queries where the config has no field for it
    key_heads: tuple[str, ...] = KEY_HEADS  # the fields that are read; none: as many as of queries
    mlp_width: tuple[str, ...] = MLP_WIDTH
    mlp_four_times: bool = False  # the MLP is four times as wide as the model where the config does not say
    experts: bool = False  # there are experts, and the config has to say how many
    experts_as_mlp: bool = False  # they are as wide as the MLP where the config does not say
    latent: bool = False  # DeepSeek's: latent attention, dense layers first, shared experts


def blocks_of(fields: Fields, dialect: Dialect) -> list[Block]:
    """One entry for each layer. Raises WrongUse for what is missing or not counted here."""
    fields.refuse(*UNCOUNTED)
    layers = fields.whole(*LAYERS)
    attention = _attention(fields, dialect)
    windows = _windows(fields, layers)
    sparse = _sparse(fields, dialect, layers)
    gated = fields.flag(*GATED, default=dialect.gated)
    mlps = {True: _experts, False: _dense}  # what of these the layers have is read, and no field of the other
    mlp_of = {has_experts: mlps[has_experts](fields, dialect, gated) for has_experts in sorted(set(sparse))[::-1]}
    return [Block(attention, mlp_of[has_experts], window) for has_experts, window in zip(sparse, windows, strict=True)]


# --- attention ----------------------------------------------------------------------------------


def _attention(fields: Fields, dialect: Dialect) -> HeadAttention | LatentAttention:
    heads = fields.whole(*HEADS)
    # Megatron's arguments have a rank also where the attention is not latent.
    if fields.flag("multi_latent_attention", default=dialect.latent or fields.get("kv_lora_rank") is not None):
        if not fields.has("q_lora_rank"):  # which may be None
            raise fields.missing("q_lora_rank")
        is_megatrons = fields.get("qk_pos_emb_head_dim") is not None and fields.get("qk_nope_head_dim") is None
        return LatentAttention(
            heads=heads,
            query_rank=fields.whole("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
            key_rank=fields.whole("kv_lora_rank"),
            # Hugging Face's own qk_head_dim is the sum of both.
            plain_width=fields.whole("qk_nope_head_dim", *(["qk_head_dim"] if is_megatrons else [])),
            rotary_width=fields.whole("qk_rope_head_dim", "qk_pos_emb_head_dim"),
            value_width=fields.whole("v_head_dim"),
        )
    return HeadAttention(
        heads=heads,
        key_heads=_key_heads(fields, dialect, heads),
        width=head_width(fields, heads),
        gate=fields.flag("attention_output_gate"),
    )


def _key_heads(fields: Fields, dialect: Dialect, heads: int) -> int:
    of_megatron = fields.has("group_query_attention")  # without it, the number of groups is not used
    if (of_megatron and not fields.flag("group_query_attention")) or not dialect.key_heads:
        return heads
    may_be_missing = dialect.key_heads_as_heads or any(fields.has(name) for name in dialect.key_heads)
    key_heads = fields.whole(*dialect.key_heads, default=heads if may_be_missing else None)
    if heads % key_heads:
        raise WrongUse(f"the config has {heads} heads of queries, which {key_heads} heads of keys cannot share")
    return key_heads


def head_width(fields: Fields, heads: int) -> int:
    """Of a head: as the config says, or the model's width divided among them."""
    hidden = fields.whole(*HIDDEN)
    if fields.model_type in _OWN_HEAD_WIDTH:
        return fields.whole(*HEAD_WIDTH)
    if fields.get(*HEAD_WIDTH) is None and hidden % heads:
        raise WrongUse(f"the config's hidden size {hidden} is no multiple of its {heads} heads, and it has no head_dim")
    return fields.whole(*HEAD_WIDTH, default=hidden // heads)


def _windows(fields: Fields, layers: int) -> list[int | None]:
    types = fields.get("layer_types")
    slides = fields.flag("use_sliding_window", default=True)
    width = fields.whole("sliding_window", default=0, least=0) if slides else 0
    if types is not None:
        return _windows_of_types(types, layers, width)
    if fields.get("window_size"):
        return _windows_of_megatron(fields, layers)
    if not width:
        return [None] * layers
    if fields.model_type in _ALL_IN_WINDOW:
        return [width] * layers
    if fields.model_type != "qwen2_moe" and fields.get("max_window_layers") is not None:
        first = fields.whole("max_window_layers", least=0)
        return [width if index >= first else None for index in range(layers)]
    raise WrongUse(
        f"the config has sliding_window={width}, but not which layers have it: give layer_types, a list of "
        '"sliding_attention" and "full_attention", or sliding_window=None'
    )


def _windows_of_types(types: Sequence[str], layers: int, width: int) -> list[int | None]:
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise WrongUse(f"the config has layers of type {', '.join(map(repr, unknown))}, which no formula here counts")
    if len(types) != layers:
        raise WrongUse(f"the config has {layers} layers, but layer_types for {len(types)}")
    return [width if width and kind == "sliding_attention" else None for kind in types]


def _windows_of_megatron(fields: Fields, layers: int) -> list[int | None]:
    """(tokens before the query, tokens after it), -1 for all, and every n-th layer without, or a list."""
    before = whole_number("window_size[0] of the config", fields.get("window_size")[0], least=-1)
    skip = fields.get("window_attn_skip_freq")
    if skip is None:
        windowed = [True] * layers
    elif isinstance(skip, Sequence):
        windowed = [bool(entry) for entry in skip]
    else:
        every = whole_number("window_attn_skip_freq of the config", skip)
        windowed = [(index + 1) % every != 0 for index in range(layers)]
    if len(windowed) != layers:
        raise WrongUse(f"the config has {layers} layers, but a window_attn_skip_freq for {len(windowed)}")
    return [before + 1 if before >= 0 and has else None for has in windowed]


# --- MLP and experts ----------------------------------------------------------------------------


def _dense(fields: Fields, dialect: Dialect, gated: bool) -> Mlp:
    four_times = dialect.mlp_four_times and not gated
    default = 4 * fields.whole(*HIDDEN) if four_times else None
    return Mlp(fields.whole(*dialect.mlp_width, default=default), gated)


def _experts(fields: Fields, dialect: Dialect, gated: bool) -> Mlp:
    as_mlp = dialect.experts_as_mlp or fields.has("ffn_hidden_size")  # as Megatron has it
    width = fields.whole(*EXPERT_WIDTH, *(MLP_WIDTH if as_mlp else ()))
    routed, chosen = fields.whole(*EXPERTS), fields.whole(*CHOSEN)
    if chosen > routed:
        raise WrongUse(f"the config has {routed} experts, of which a token cannot go through {chosen}")
    # The shared ones by their width, or as a number of experts of the width of others.
    if fields.get(*SHARED_WIDTH) is not None or fields.model_type == "qwen2_moe":
        shared_width = fields.whole(*SHARED_WIDTH, least=0)
    else:
        needed = dialect.latent and not any(fields.has(name) for name in SHARED_WIDTH)
        shared_width = width * fields.whole("n_shared_experts", default=None if needed else 0, least=0)
    gate = fields.flag("moe_shared_expert_gate", default=fields.get("shared_expert_intermediate_size") is not None)
    return Mlp(width, gated, routed, chosen, shared_width, gate)


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
    return [
        pattern[index] and index >= first and (index + 1) % step == 0 and index not in dense for index in range(layers)
    ]


_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def _pattern(frequency: object, layers: int) -> list[bool]:
    """Megatron's moe_layer_freq: every n-th layer from the first, a list of 0 and 1, or such a list written out."""
    if frequency is None:
        return [True] * layers
    if isinstance(frequency, str):
        text = re.sub(r"[\s()]", "", frequency)
        terms = [_TERM.fullmatch(term) for term in text.split("+")]
        if text.isdigit():
            return _pattern(int(text), layers)
        if not all(terms):
            raise WrongUse(f'moe_layer_freq={shown(frequency)} of the config is no list such as "[0]*3+[1]*58"')
        frequency = [digit == "1" for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]
    if not isinstance(frequency, Sequence):
        every = whole_number("moe_layer_freq of the config", frequency)
        return [index % every == 0 for index in range(layers)]
    if len(frequency) != layers:
        raise WrongUse(f"the config has {layers} layers, but a moe_layer_freq for {len(frequency)}")
    return [bool(entry) for entry in frequency]


# --------------------------------------------------------------------------------------------------
# Models that predict the next token: GPT, LLaMA, Qwen, Mixtral, Aquila, DeepSeek, and Megatron's.

_LLAMA = Dialect(gated=True, key_heads_as_heads=True)
_WITH_KEY_HEADS = Dialect(gated=True)  # the config has a number of heads of keys
_WITH_EXPERTS = Dialect(gated=True, experts=True)
# By the model_type; of others it is the family's.
_DIALECTS = {
    "gpt2": Dialect(gated=False, key_heads=(), mlp_width=("n_inner",), mlp_four_times=True),
    "gpt_neox": Dialect(gated=False, key_heads=(), mlp_width=("intermediate_size",)),
    **dict.fromkeys(("mistral", "gemma", "gemma2", "gemma3_text"), _WITH_KEY_HEADS),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _WITH_EXPERTS),
}


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
    ("n_embd", "n_layer", "n_head"),
    ("num_layers", "swiglu"),
    ("num_layers", "gated_linear_unit"),
)
_register_decoder(
    "llama",
    _LLAMA,
    ("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
    ("num_key_value_heads", "intermediate_size", "rms_norm_eps"),
)
_register_decoder("aquila", _LLAMA, ("aquila",))
_register_decoder("qwen", _WITH_KEY_HEADS, ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"))
_register_decoder(  # experts as wide as the config's MLP where no width of theirs is given
    "mixtral",
    Dialect(gated=True, experts=True, experts_as_mlp=True),
    ("mixtral",),
    ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
)
_register_decoder(  # latent attention, dense blocks first, then experts and shared ones; modules for further tokens
    "deepseek",
    Dialect(gated=True, experts=True, latent=True),
    ("deepseek_v2", "deepseek_v3"),
    ("kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"),
)


# --------------------------------------------------------------------------------------------------
# Models whose tokens all see each other: BERT and ViT. Both conventions of attention are the same for them.


def encoder(work: Work, fields: Fields, hidden: int, *, causal: bool = False) -> None:
    """Blocks of attention and an MLP of two matrices."""
    mlp_width = fields.whole("intermediate_size", "ffn_hidden_size")
    layers, heads = fields.whole(*LAYERS), fields.whole(*HEADS)
    HeadAttention(heads, heads, head_width(fields, heads)).add(work, hidden, causal=causal, times=layers)
    Mlp(mlp_width, gated=False).add(work, hidden, times=layers)


# --- BERT ---------------------------------------------------------------------------------------


@register_family("bert", model_types=("bert",), marks=(("type_vocab_size", "hidden_size", "intermediate_size"),))
def bert(fields: Fields, batch: Batch) -> Work:
    """Without a class in the config, as trained: with the head that fills in masked words, at every token.

    Megatron's bert_binary_head adds the pooler and the prediction of the next sentence.
    """
    fields.refuse(*UNCOUNTED)
    work = Work(batch)
    hidden = fields.whole(*HIDDEN)
    encoder(work, fields, hidden, causal=fields.flag("is_decoder"))
    _bert_head(work, fields, hidden)
    return work


def _bert_head(work: Work, fields: Fields, hidden: int) -> None:
    default = "BertForPreTraining" if fields.flag("bert_binary_head") else "BertForMaskedLM"
    name = fields.architecture or default
    words = {"BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel"}
    per_token = {"BertForTokenClassification", "BertForQuestionAnswering"}
    per_sequence = {  # outputs over the pooled first token
        "BertForPreTraining": 2,
        "BertForNextSentencePrediction": 2,
        "BertForMultipleChoice": 1,
        "BertModel": 0,
    }
    if name == "BertForSequenceClassification":
        per_sequence[name] = label_count(fields)
    if not {name} & (words | per_token | per_sequence.keys()):
        raise WrongUse(f"the head of {name} is not known: give the class of one that is, architectures=[...]")
    if name in words:
        work.linear("head", hidden, hidden)
        work.linear("head", hidden, fields.whole(*VOCABULARY))
    if name in per_token:
        work.linear("head", hidden, label_count(fields))
    if name in per_sequence:
        work.linear("head", hidden, hidden + per_sequence[name], rows=work.batch.sequences)


# --- ViT ----------------------------------------------------------------------------------------


@register_family("vit", model_types=("vit",), marks=(("image_size", "patch_size", "num_channels"),))
def vit(fields: Fields, batch: Batch) -> Work:
    """Patches by a convolution, a class token, and a classifier of it.

    The sequence is the class token and the patches; without a length given, those of the config's image size.
    The patches come from the data, so their gradient is not computed.
    """
    height, width = sides(fields, "patch_size")
    batch = batch.or_of_length(1 + patches(fields, "image_size"))
    work = Work(batch)
    hidden = fields.whole(*HIDDEN)
    channels = fields.whole("num_channels")
    work.linear(
        "embedding", channels * height * width, hidden, rows=batch.tokens - batch.sequences, input_gradient=False
    )
    encoder(work, fields, hidden)
    name = fields.architecture or "ViTForImageClassification"
    if name == "ViTForImageClassification":
        work.linear("head", hidden, label_count(fields), rows=batch.sequences)
    elif name == "ViTModel":
        work.linear("head", hidden, fields.whole("pooler_output_size", default=hidden), rows=batch.sequences)
    else:
        raise WrongUse(f"the head of {name} is not known: give the class of one that is, architectures=[...]")
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
_MODULATIONS = 6  # shift, scale and gate of the attention and of the MLP
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
    batch = batch.or_of_length(patches(fields, "sample_size"))
    work = Work(batch)
    hidden, layers = _width(fields), fields.whole(*LAYERS)
    channels, patch = fields.whole("in_channels"), prod(sides(fields, "patch_size"))
    work.linear("embedding", channels * patch, hidden, input_gradient=False)
    _timestep(work, _SINE_WIDTH, hidden, hidden, times=layers + 1)
    work.linear("modulation", hidden, _MODULATIONS * hidden, rows=batch.sequences, times=layers)
    _blocks(work, fields, hidden)
    work.linear("modulation", hidden, 2 * hidden, rows=batch.sequences)
    work.linear("head", hidden, fields.whole("out_channels", default=channels) * patch)
    return work


def _cogvideox(fields: Fields, batch: Batch) -> Work:
    text = fields.whole("max_text_seq_length")
    patch, frames_of_patch = prod(sides(fields, "patch_size")), fields.whole("patch_size_t", default=1)
    batch = batch.or_of_length(text + _video_tokens(fields, frames_of_patch))
    work = Work(batch)
    hidden, layers, time_width = _width(fields), fields.whole(*LAYERS), fields.whole("time_embed_dim")
    texts = batch.sequences * text
    if batch.tokens <= texts:
        raise WrongUse(f"sequences of {batch.tokens // batch.sequences} tokens have none but the {text} of the text")
    videos = batch.tokens - texts
    in_channels, volume = fields.whole("in_channels"), patch * frames_of_patch
    work.linear("embedding", in_channels * volume, hidden, rows=videos, input_gradient=False)
    work.linear("embedding", fields.whole("text_embed_dim"), hidden, rows=texts, input_gradient=False)
    _timestep(work, hidden, time_width, time_width)
    offset = fields.whole("ofs_embed_dim", default=0, least=0)
    if offset:
        _timestep(work, offset, offset, offset)
    work.linear("modulation", time_width, _MODULATIONS * hidden, rows=batch.sequences, times=2 * layers)
    _blocks(work, fields, hidden)
    work.linear("modulation", time_width, 2 * hidden, rows=batch.sequences)
    work.linear("head", hidden, fields.whole("out_channels") * volume, rows=videos)
    return work


def _width(fields: Fields) -> int:
    return fields.whole(*HEADS) * fields.whole("attention_head_dim")


def _video_tokens(fields: Fields, frames_of_patch: int) -> int:
    """Frames are compressed in time but for the first, and so many make a patch."""
    frames = (fields.whole("sample_frames") - 1) // fields.whole("temporal_compression_ratio") + 1
    side, other = sides(fields, "patch_size")
    of_frame = (fields.whole("sample_height") // side) * (fields.whole("sample_width") // other)
    return -(-frames // frames_of_patch) * of_frame


def _timestep(work: Work, sines: int, inner: int, outer: int, *, times: int = 1) -> None:
    """Two layers over the sines of the timestep, which come from the data."""
    rows = work.batch.sequences
    work.linear("conditioning", sines, inner, rows=rows, times=times, input_gradient=False)
    work.linear("conditioning", inner, outer, rows=rows, times=times)


def _blocks(work: Work, fields: Fields, hidden: int) -> None:
    layers, heads = fields.whole(*LAYERS), fields.whole(*HEADS)
    width = fields.whole("attention_head_dim")
    HeadAttention(heads, heads, width).add(work, hidden, causal=False, times=layers)
    activation = fields.get("activation_fn", default="gelu-approximate")
    if activation not in _GATED:
        raise WrongUse(f"activation_fn={shown(activation)} of the config is not known: one of {', '.join(_GATED)}")
    Mlp(4 * hidden, gated=_GATED[activation]).add(work, hidden, times=layers)
