"""Models whose tokens all see each other: BERT and ViT. Both conventions of attention are the same for them."""

from __future__ import annotations

from collections.abc import Sequence

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.model_families.decoder_fields import HEADS, HIDDEN, LAYERS, UNCOUNTED, VOCABULARY, head_width
from profiler_wrapper.live.model_families.decoders import label_count
from profiler_wrapper.live.model_families.fields import Fields, whole_number
from profiler_wrapper.live.model_families.layers import HeadAttention, Mlp
from profiler_wrapper.live.model_families.registry import register_family
from profiler_wrapper.live.model_families.work import Batch, Work


def encoder(work: Work, fields: Fields, hidden: int, mlp_width: int, *, causal: bool = False) -> None:
    """Blocks of attention and an MLP of two matrices."""
    layers, heads = fields.whole(*LAYERS), fields.whole(*HEADS)
    attention = HeadAttention(heads=heads, key_heads=heads, width=head_width(fields, heads))
    attention.add(work, hidden, causal=causal, times=layers)
    Mlp(width=mlp_width, gated=False).add(work, hidden, times=layers)


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
