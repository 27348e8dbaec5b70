"""The families: decoders, encoders, and the diffusion Transformers of diffusers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from profiler_wrapper.config_flops.fields import (
    HEADS,
    HIDDEN,
    LAYERS,
    UNCOUNTED,
    VOCABULARY,
    Dialect,
    HeadAttention,
    Mlp,
    blocks_of,
    head_width,
)
from profiler_wrapper.config_flops.registry import Batch, Fields, Work, register_family, whole_number
from profiler_wrapper.errors import WrongUse

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


def encoder(work: Work, fields: Fields, hidden: int, mlp_width: int, *, causal: bool = False) -> None:
    """Blocks of attention and an MLP of two matrices."""
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
    encoder(
        work, fields, hidden, fields.whole("intermediate_size", "ffn_hidden_size"), causal=fields.flag("is_decoder")
    )
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
    batch = batch.or_of_length(1 + patches(fields, "image_size", "patch_size"))
    work = Work(batch)
    hidden = fields.whole(*HIDDEN)
    channels = fields.whole("num_channels")
    work.linear(
        "embedding", channels * height * width, hidden, rows=batch.tokens - batch.sequences, input_gradient=False
    )
    encoder(work, fields, hidden, fields.whole("intermediate_size", "ffn_hidden_size"))
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


def patches(fields: Fields, image: str, patch: str) -> int:
    """How many patches an image of the config's size has."""
    (height, width), (patch_height, patch_width) = sides(fields, image), sides(fields, patch)
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
        raise WrongUse(f"a DiT with norm_type={fields.get('norm_type')!r} has other products than those counted here")
    batch = batch.or_of_length(patches(fields, "sample_size", "patch_size"))
    work = Work(batch)
    hidden, layers = _width(fields), fields.whole(*LAYERS)
    channels, patch = fields.whole("in_channels"), _patch_area(fields)
    work.linear("embedding", channels * patch, hidden, input_gradient=False)
    _timestep(work, _SINE_WIDTH, hidden, hidden, times=layers + 1)
    work.linear("modulation", hidden, _MODULATIONS * hidden, rows=batch.sequences, times=layers)
    _blocks(work, fields, hidden)
    work.linear("modulation", hidden, 2 * hidden, rows=batch.sequences)
    work.linear("head", hidden, fields.whole("out_channels", default=channels) * patch)
    return work


def _cogvideox(fields: Fields, batch: Batch) -> Work:
    text = fields.whole("max_text_seq_length")
    patch, frames_of_patch = _patch_area(fields), fields.whole("patch_size_t", default=1)
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


def _patch_area(fields: Fields) -> int:
    height, width = sides(fields, "patch_size")
    return height * width


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
        raise WrongUse(f"activation_fn={activation!r} of the config is not known: one of {', '.join(_GATED)}")
    Mlp(4 * hidden, gated=_GATED[activation]).add(work, hidden, times=layers)
