"""The blocks of a decoder as its config tells them, under the names of Hugging Face or of Megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from profiler_wrapper.config_flops.registry import Fields, Work, whole_number
from profiler_wrapper.errors import WrongUse

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
    """The window of each layer."""
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
            raise WrongUse(f'moe_layer_freq={frequency!r} of the config is no list such as "[0]*3+[1]*58"')
        frequency = [digit == "1" for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]
    if not isinstance(frequency, Sequence):
        every = whole_number("moe_layer_freq of the config", frequency)
        return [index % every == 0 for index in range(layers)]
    if len(frequency) != layers:
        raise WrongUse(f"the config has {layers} layers, but a moe_layer_freq for {len(frequency)}")
    return [bool(entry) for entry in frequency]
