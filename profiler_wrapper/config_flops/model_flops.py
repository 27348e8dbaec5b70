"""FLOPs of a training step from a model's config, without running it.

`model_flops(config, batch_size, seq_length)` takes a Hugging Face or diffusers config, a model that has one,
Megatron's arguments, or a mapping of plain fields. Two FLOPs for each multiply-add of matrix products,
convolutions and attention; no norms, softmax, activations or losses; nothing computed again. These are the
FLOPs of the formulas in `analysis`, by which a recorded step is counted.

A family is added by one function::

    @register_family("mine", model_types=("mine",))
    def mine(fields: Fields, batch: Batch) -> Work:
        work = Work(batch)
        hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
        work.linear("mlp", hidden, 4 * hidden, times=2 * layers)
        work.attention(fields.whole("num_attention_heads"), 64, causal=True, times=layers)
        work.linear("head", hidden, fields.whole("vocab_size"))
        return work
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from profiler_wrapper.config_flops.registry import (
    FAMILIES,
    Batch,
    Convention,
    Fields,
    Work,
    family_of,
    register_family,
    whole_number,
)
from profiler_wrapper.errors import WrongUse

__all__ = ["Batch", "Fields", "ModelFlops", "Work", "families", "model_flops", "register_family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one step; `int()` and `float()` give the total.

    Attributes:
        forward, backward: of all sequences; backward is 0 where none was asked for.
        parts: those of forward: attention_projections, attention_scores, mlp, router, experts, shared_experts,
            mtp_projections, embedding (a lookup has none), conditioning, modulation, head; those that there are.
        backward_parts: those of backward, under the same names.
        family, convention: by whose formula, and how attention counts.
        sequences, tokens: what it is for.
    """

    family: str
    convention: Convention
    sequences: int
    tokens: int
    parts: Mapping[str, int]
    backward_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def forward(self) -> int:
        return sum(self.parts.values())

    @property
    def backward(self) -> int:
        return sum(self.backward_parts.values())

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __int__(self) -> int:
        return self.total

    def __float__(self) -> float:
        return float(self.total)


def model_flops(
    config: object,
    batch_size: int | None = None,
    seq_length: int | None = None,
    *,
    convention: Convention = "full",
    backward: bool = True,
    family: str | None = None,
    sequence_lengths: Iterable[int] | None = None,
    **fields: object,
) -> ModelFlops:
    """FLOPs of a step of the config's model, by its family's formula.

    Attention counts by one of two conventions. "full", as torch does, takes each query with each key.
    "causal" leaves out what a causal mask hides: exactly half of the L² pairs, as Megatron-LM and a profile of
    ours count, and what lies outside of a sliding window of W tokens (LW - W²/2 pairs are left). A model
    without such a mask (BERT, ViT, DiT) has as many in both.

    Backward has twice the forward's FLOPs, but for a product of what comes from the data: autograd leaves out
    the gradient of the pixels of a ViT's patches. All weights are taken to be trained. Experts drop no token.

    Args:
        config: whose fields are read under the names of Hugging Face, diffusers or Megatron.
        batch_size: sequences (texts, images, videos) of the step.
        seq_length: tokens of each; for images and videos that of the config's sample size by default.
        backward: with the backward pass.
        family: one of `families()`, or a model_type of Hugging Face's that one of them has ("gpt2", "qwen3_moe"),
            whatever the config's is; None or "auto": by the config's model_type, class or fields.
        sequence_lengths: real tokens of each sequence, where several are packed into a row or rows are padded:
            attention goes by the sum of L², the rest by the sum of L. Beside it batch_size and seq_length, the
            rows and their length, are optional; the sequences must fit into them.
        fields: fields that the config does not have, or has otherwise: vocab_size=32000, mtp_num_layers=0,
            architectures=["BertForSequenceClassification"] (the class, which tells the head).

    Raises:
        WrongUse: the family is not known, a field is missing, a field asks for what no formula counts, or a
            keyword is no field of the family. Nothing is ever replaced by a guess.
    """
    if convention not in get_args(Convention):
        raise WrongUse(f'convention must be "full" or "causal", found {convention!r}')
    plain, class_name = _config_of(config)
    read = Fields(plain, fields, class_name=class_name)
    found = family_of(read, family)
    work = found.formula(read, _batch(batch_size, seq_length, sequence_lengths, convention))
    if unread := read.unread():
        raise WrongUse(f"{', '.join(unread)}: the formula of the family {found.name!r} reads no such field")
    return ModelFlops(
        family=found.name,
        convention=convention,
        sequences=work.batch.sequences,
        tokens=work.batch.tokens,
        parts=dict(work.forward),
        backward_parts=dict(work.backward) if backward else {},
    )


def families() -> tuple[str, ...]:
    """The names that `model_flops(family=...)` knows."""
    return tuple(sorted(FAMILIES))


def _config_of(config: Any) -> tuple[object, str | None]:
    """The config of what may be a model, wrapped or not, and the model's class."""
    if isinstance(config, Mapping) or not callable(getattr(config, "named_modules", None)):
        return config, None
    model = config
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None)) is not None:
        model = inner  # compiled, data-parallel: some of these show the attributes of the model inside
    if callable(getattr(model, "get_base_model", None)):  # adapters around it
        model = model.get_base_model()
    found = getattr(model, "config", None)
    if found is None:
        raise WrongUse(f"{type(config).__name__} has no config: give its fields as a mapping")
    return found, type(model).__name__.removeprefix("FSDP")  # as fully_shard renames classes


def _batch(
    batch_size: int | None, seq_length: int | None, sequence_lengths: Iterable[int] | None, convention: Convention
) -> Batch:
    rows = None if batch_size is None else whole_number("batch_size", batch_size)
    length = None if seq_length is None else whole_number("seq_length", seq_length)
    if sequence_lengths is None:
        if rows is None:
            raise WrongUse("the number of sequences is missing: give batch_size or sequence_lengths")
        return Batch(sequences=rows, lengths=None if length is None else {length: rows}, convention=convention)
    lengths = Counter(whole_number("each of sequence_lengths", tokens, least=0) for tokens in sequence_lengths)
    del lengths[0]  # a row of padding
    if not lengths:
        raise WrongUse("sequence_lengths has no sequence with a token")
    if length is not None and max(lengths) > length:
        raise WrongUse(f"sequence_lengths has a sequence of {max(lengths)} tokens, more than seq_length={length}")
    tokens = sum(length_ * count for length_, count in lengths.items())
    if rows is not None and length is not None and tokens > rows * length:
        raise WrongUse(f"sequence_lengths add up to {tokens} tokens, more than {rows} rows of {length} hold")
    return Batch(sequences=lengths.total(), lengths=dict(lengths), convention=convention)
