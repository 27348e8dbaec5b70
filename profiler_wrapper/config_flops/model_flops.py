"""FLOPs of a training step from a model's config, without running it.

`model_flops(config, batch_size, seq_length)` takes a Hugging Face or diffusers config, a model that has one,
Megatron's arguments, or a mapping of plain fields. Two FLOPs for each multiply-add of matrix products,
convolutions and attention; no norms, softmax, activations or losses; nothing computed again. These are the
FLOPs of the formulas in `analysis`, by which a recorded step is counted.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

from profiler_wrapper.errors import WrongUse, first_few, shown

__all__ = ["Batch", "Fields", "ModelFlops", "Work", "families", "model_flops", "register_family"]

_CLASS_NAME = re.compile(r"(?P<stem>\w*?)(?P<head>For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model|Config)")
_ABSENT: Any = object()


class Fields:
    """Read the fields of a config, a mapping or an object, under whichever of their names it has them.

    Those `given` as keywords stand before the config's own, whichever of their names they come under; the `assumed`
    stand for what it leaves unsaid. A field that is None counts as absent.
    """

    def __init__(self, config: object, given: Mapping[str, object] | None = None) -> None:
        self.config, self.class_name = _config_of(config)
        self.given = dict(given or {})
        self.taken_as: str | None = None  # a model_type that stands before the config's
        self.assumed: Mapping[str, Any] = {}  # by the first of a field's names; a value, or a function of the fields
        self.read: set[str] = set()  # names asked for
        self._look = self.config.get if isinstance(self.config, Mapping) else partial(getattr, self.config)

    @property
    def model_type(self) -> str | None:
        """Hugging Face's name of the architecture."""
        found = self.get("model_type")
        return self.taken_as or (found if isinstance(found, str) and found else None)

    @property
    def architecture(self) -> str | None:
        """The model's class, such as `LlamaForCausalLM`; None where nothing tells."""
        named, own_type = self.get("architectures"), self.get("model_type")
        if "architectures" not in self.given and isinstance(own_type, str) and own_type:
            named = self.class_name or named
        return named if isinstance(named, str) or not named else str(named[0])

    def head(self, *known: str) -> str:
        """Return how the name of the model's class ends, which tells its head; without a class the first of the known.

        Raises WrongUse for one that is not known.
        """
        found = _CLASS_NAME.fullmatch(self.architecture or known[0])
        if found is None or found["head"] not in known:
            raise WrongUse(
                f"the head of {self.architecture} is not known: give the class of one that is, architectures=[...]"
            )
        return found["head"]

    def has(self, *names: str) -> bool:
        """Return whether one of the fields is there, even if None."""
        self.read.update(names)
        return any(name in self.given or self._look(name, _ABSENT) is not _ABSENT for name in names)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of the fields that is there and not None; else the default, or what is assumed."""
        self.read.update(names)
        look = self._look if self.given.keys().isdisjoint(names) else self.given.get
        for value in (*(look(name, None) for name in names), default):
            if value is not None:
                return value
        assumed = self.assumed.get(names[0])
        return assumed(self) if callable(assumed) else assumed

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`. Raises WrongUse where there is none, by default or assumed."""
        value = self.get(*names, default=default)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise WrongUse(f"the config has no {names[0]}{others}: give it as a keyword, {names[0]}=...")
        return whole_number(f"{names[0]} of the config", value, least=least)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """Return whether a field is true."""
        return bool(self.get(*names, default=default))


def whole_number(what: str, value: object, *, least: int = 1) -> int:
    """Return `value` as an int of at least `least`; integral floats pass, as files of numbers write them."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, bool) or not isinstance(number, SupportsIndex) or operator.index(number) < least:
        raise WrongUse(f"{what} must be a whole number of at least {least}, found {shown(value)}")
    return operator.index(number)


Convention = Literal["full", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of a step.

    Attributes:
        sequences: how many: texts, images or videos.
        lengths: tokens of a sequence -> how many have as many; None where only the config tells (images).
        convention: "causal" leaves out the pairs of tokens that a causal mask or a window hides.
    """

    sequences: int
    lengths: Mapping[int, int] | None
    convention: Convention = "full"

    @property
    def tokens(self) -> int:
        """Of all sequences. Raises WrongUse where no length is known."""
        if self.lengths is None:
            raise WrongUse("the length of the sequences is missing: give seq_length or sequence_lengths")
        return sum(length * count for length, count in self.lengths.items())

    def or_of_length(self, tokens: int) -> Batch:
        """Return the batch with sequences of `tokens` tokens where it does not say how long they are."""
        return self if self.lengths is not None else replace(self, lengths={tokens: self.sequences})

    def twice_the_pairs(self, *, causal: bool, window: int | None = None) -> int:
        """Return two times the pairs of query and key that count; twice, so that half of an odd number stays whole.

        Of L tokens L², and L²/2 under a causal mask, the diagonal being counted half; of a window of W < L
        tokens in it, LW - W²/2.
        """
        hidden = causal and self.convention == "causal"
        twice = 0
        for length, count in (self.lengths or {}).items():
            seen = length if window is None or not hidden else min(length, window)
            twice += (2 * length * seen - seen**2 * hidden) * count
        return twice


class Work:
    """Collect the FLOPs of one forward pass and of its backward by part of the model, two for each multiply-add."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.tokens = batch, batch.tokens
        self.forward: Counter[str] = Counter(embedding=0)  # a lookup multiplies nothing, and is listed to say so
        self.backward: Counter[str] = Counter(embedding=0)

    def linear(
        self,
        part: str,
        inputs: int,
        outputs: int,
        *,
        rows: int | None = None,
        times: int = 1,
        input_gradient: bool = True,
    ) -> None:
        """Add `times` products of (rows, inputs) and (inputs, outputs); by default a row for each token.

        Backward has two products as big, for the gradients of the weight and of the input; one where the
        input comes from the data and autograd leaves its gradient out.
        """
        flops = 2 * (self.tokens if rows is None else rows) * inputs * outputs * times
        self.forward[part] += flops
        self.backward[part] += 2 * flops if input_gradient else flops

    def attention(
        self,
        heads: int,
        width: int,
        value_width: int | None = None,
        *,
        causal: bool,
        window: int | None = None,
        times: int = 1,
    ) -> None:
        """Add scores of each query and key, `width` wide, and their sums of values, for each of `heads`.

        Backward has four products instead of two. What a fused kernel computes again is not the model's.
        """
        pairs = self.batch.twice_the_pairs(causal=causal, window=window)
        flops = pairs * heads * (width + (width if value_width is None else value_width)) * times
        self.forward["attention_scores"] += flops
        self.backward["attention_scores"] += 2 * flops


Formula = Callable[[Fields, Batch], Work]


class Family(NamedTuple):
    """A formula, and how "auto" knows its models."""

    name: str
    formula: Formula
    model_types: Sequence[str]  # Hugging Face's `model_type`s; the classes of these are known by them too
    class_names: Sequence[str]  # full names of model classes
    # groups of field names; a config without a type that has all of one group is of this family
    marks: Sequence[Sequence[str]]


FAMILIES: dict[str, Family] = {}


def register_family(
    name: str, *, model_types: Sequence[str] = (), class_names: Sequence[str] = (), marks: Sequence[Sequence[str]] = ()
) -> Callable[[Formula], Formula]:
    """Make a function of `Fields` and `Batch`, which returns `Work`, the formula of the family `name`::

        @register_family("mine", model_types=("mine",))
        def mine(fields: Fields, batch: Batch) -> Work:
            work = Work(batch)
            hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
            work.linear("mlp", hidden, 4 * hidden, times=2 * layers)
            work.attention(fields.whole("num_attention_heads"), 64, causal=True, times=layers)
            work.linear("head", hidden, fields.whole("vocab_size"))
            return work

    A family registered later stands before earlier ones, and takes the place of one of the same name.
    """

    def register(formula: Formula) -> Formula:
        FAMILIES.pop(name, None)
        FAMILIES[name] = Family(name, formula, model_types, class_names, marks)
        return formula

    return register


def family_of(fields: Fields, name: str | None) -> Family:
    """Return the family called `name`, or of that model_type; for None or "auto", the one the config is of.

    Raises WrongUse where none is.
    """
    of_type = {kind: family for family in FAMILIES.values() for kind in family.model_types}
    if name is not None and name != "auto":
        fields.taken_as = None if name in FAMILIES else name
        if found := FAMILIES.get(name) or of_type.get(name):
            return found
        close = difflib.get_close_matches(str(name), [*FAMILIES, *of_type], n=1)
        hint = f" Did you mean {shown(close[0])}?" if close else ""
        raise WrongUse(f"no family {shown(name)} is registered.{hint} Registered: {', '.join(families())}")
    if (model_type := fields.model_type) is not None:
        if found := of_type.get(model_type) or FAMILIES.get(model_type):
            return found
        raise WrongUse(
            f"model_type={shown(model_type)} is of no registered family. If it has the same products as one of "
            f"{', '.join(families())}, "
            'say so (family="llama"); else register its formula (register_family), or measure the FLOPs of a step'
        )
    of_class = {one: family for family in FAMILIES.values() for one in family.class_names}
    of_stem = {kind.replace("_", ""): family for kind, family in of_type.items()}
    for class_name in (fields.get("_class_name"), fields.class_name, fields.architecture, type(fields.config).__name__):
        match = _CLASS_NAME.fullmatch(str(class_name))
        if found := of_class.get(str(class_name)) or of_stem.get(match["stem"].lower() if match else ""):
            return found
    marked = [family for family in FAMILIES.values() if any(all(map(fields.has, group)) for group in family.marks)]
    if len(marked) == 1:
        return marked[0]
    several = f"fields of several families: {', '.join(sorted(family.name for family in marked))}"
    has = several if marked else "no model_type, nor a class or fields that tell its family"
    raise WrongUse(f"the config has {has}. Say which it is of with family=..., one of {', '.join(families())}")


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
    """Count the FLOPs of a step of the config's model by its family's formula.

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
            attention goes by the sum of L², the rest by the sum of L. Then batch_size and seq_length, the rows and
            their length, are optional; the sequences must fit into them.
        fields: fields that the config does not have, or has otherwise: vocab_size=32000, mtp_num_layers=0,
            architectures=["BertForSequenceClassification"] (the class, which tells the head).

    Raises:
        WrongUse: the family is not known, a field is missing, a field asks for what no formula counts, or a
            keyword is no field of the family. Nothing is ever replaced by a guess.
    """
    if convention not in get_args(Convention):
        raise WrongUse(f'convention must be "full" or "causal", found {shown(convention)}')
    read = Fields(config, fields)
    found = family_of(read, family)
    work = found.formula(read, _batch(batch_size, seq_length, sequence_lengths, convention))
    if unread := sorted(fields.keys() - read.read):
        raise WrongUse(f"{first_few(unread, 8)}: the formula of the family {shown(found.name)} reads no such field")
    return ModelFlops(
        family=found.name,
        convention=convention,
        sequences=work.batch.sequences,
        tokens=work.batch.tokens,
        parts=dict(work.forward),
        backward_parts=dict(work.backward) if backward else {},
    )


def families() -> tuple[str, ...]:
    """Return the names that `model_flops(family=...)` knows."""
    return tuple(sorted(FAMILIES))


def _config_of(config: Any) -> tuple[object, str | None]:
    """Return the config of what may be a model, wrapped or not, and the model's class."""
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
