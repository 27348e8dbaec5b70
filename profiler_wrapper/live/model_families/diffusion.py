"""Diffusion Transformers as diffusers builds them: DiT and CogVideoX. No token is hidden from another."""

from __future__ import annotations

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.model_families.decoder_fields import HEADS, LAYERS
from profiler_wrapper.live.model_families.encoders import patches, sides
from profiler_wrapper.live.model_families.fields import Fields
from profiler_wrapper.live.model_families.layers import HeadAttention, Mlp
from profiler_wrapper.live.model_families.registry import register_family
from profiler_wrapper.live.model_families.work import Batch, Work

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
    HeadAttention(heads=heads, key_heads=heads, width=width).add(work, hidden, causal=False, times=layers)
    activation = fields.get("activation_fn", default="gelu-approximate")
    if activation not in _GATED:
        raise WrongUse(f"activation_fn={activation!r} of the config is not known: one of {', '.join(_GATED)}")
    Mlp(width=4 * hidden, gated=_GATED[activation]).add(work, hidden, times=layers)
