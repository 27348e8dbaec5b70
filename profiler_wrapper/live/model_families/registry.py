"""The families whose FLOPs are known, and which of them a config is of."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.model_families.fields import Fields
from profiler_wrapper.live.model_families.work import Batch, Work

Formula = Callable[[Fields, Batch], Work]

_CLASS_NAME = re.compile(r"(?P<stem>\w+?)(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model|Config)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A formula, and how "auto" knows its models.

    Attributes:
        model_types: Hugging Face's `model_type`s; the classes of these are known by them too.
        class_names: full names of model classes.
        marks: groups of field names; a config without a type that has all of one group is of this family.
    """

    name: str
    formula: Formula
    model_types: tuple[str, ...]
    class_names: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...]


FAMILIES: dict[str, Family] = {}


def register_family(
    name: str,
    *,
    model_types: Sequence[str] = (),
    class_names: Sequence[str] = (),
    marks: Sequence[Sequence[str]] = (),
) -> Callable[[Formula], Formula]:
    """Makes a function of `Fields` and `Batch`, which returns `Work`, the formula of the family `name`.

    A family registered later stands before earlier ones, and takes the place of one of the same name.
    """

    def register(formula: Formula) -> Formula:
        FAMILIES.pop(name, None)
        FAMILIES[name] = Family(
            name=name,
            formula=formula,
            model_types=tuple(model_types),
            class_names=tuple(class_names),
            marks=tuple(tuple(group) for group in marks),
        )
        return formula

    return register


def family_of(fields: Fields, name: str | None) -> Family:
    """The family called `name`, or of that model_type; for None or "auto", the one the config is of.

    Raises WrongUse where none is.
    """
    if name is not None and name != "auto":
        if name in FAMILIES:
            return FAMILIES[name]
        types = {kind: family for family in FAMILIES.values() for kind in family.model_types}
        if name in types:
            fields.taken_as = name
            return types[name]
        close = difflib.get_close_matches(str(name), [*FAMILIES, *types], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise WrongUse(f"no family {name!r} is registered.{hint} Registered: {_known()}")
    if fields.model_type is not None:
        return _by_model_type(fields.model_type)
    for class_name in fields.class_names:
        found = _by_class(class_name)
        if found is not None:
            return found
    return _by_marks(fields)


def _by_model_type(model_type: str) -> Family:
    for family in reversed(FAMILIES.values()):
        if model_type in family.model_types:
            return family
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise WrongUse(
        f"model_type={model_type!r} is of no registered family. If it has the same products as one of {_known()}, "
        'say so (family="llama"); else register its formula (register_family), or measure the FLOPs of a step'
    )


def _by_class(class_name: str) -> Family | None:
    match = _CLASS_NAME.fullmatch(class_name)
    stem = match["stem"].lower() if match else None
    for family in reversed(FAMILIES.values()):
        if class_name in family.class_names or stem in {kind.replace("_", "") for kind in family.model_types}:
            return family
    return None


def _by_marks(fields: Fields) -> Family:
    found = [
        family
        for family in reversed(FAMILIES.values())
        if any(all(fields.has(name) for name in group) for group in family.marks)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        found_text = "fields of several families: " + ", ".join(sorted(family.name for family in found))
    else:
        found_text = "no model_type, nor a class or fields that tell its family"
    raise WrongUse(f"the config has {found_text}. Say which it is of with family=..., one of {_known()}")


def _known() -> str:
    return ", ".join(sorted(FAMILIES))
