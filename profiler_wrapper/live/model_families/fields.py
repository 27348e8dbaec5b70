"""A config's fields under whichever of their names it has them: Hugging Face's, diffusers' or Megatron's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from profiler_wrapper.errors import WrongUse

_MISSING: Any = object()


class Fields:
    """Reads one config: the entries of a mapping, else the attributes of an object.

    Fields given beside it stand before those of the config, whichever of their names they come under.
    A field that is None counts as absent.
    """

    def __init__(
        self, config: object, given: Mapping[str, object] | None = None, *, class_name: str | None = None
    ) -> None:
        self._config = config
        self._entries = config if isinstance(config, Mapping) else None
        self._given = dict(given or {})
        self._class_name = class_name
        self.taken_as: str | None = None  # a model_type that stands before the config's
        self.read: set[str] = set()  # names asked for

    @property
    def of_transformers(self) -> bool:
        """Whether it is a config object of Hugging Face's transformers, so of a model that they build."""
        return type(self._config).__module__.startswith("transformers.")

    @property
    def model_type(self) -> str | None:
        """Hugging Face's name of the architecture."""
        return self.taken_as or self._own_type

    @property
    def _own_type(self) -> str | None:
        found = self.get("model_type")
        return found if isinstance(found, str) and found else None

    @property
    def architecture(self) -> str | None:
        """The model's class, which tells its head: `LlamaForCausalLM`; None where nothing tells."""
        told = self.get("architectures")
        if "architectures" not in self._given and self._class_name is not None and self._own_type is not None:
            return self._class_name
        if isinstance(told, str):
            return told
        return str(told[0]) if isinstance(told, Sequence) and told else None

    @property
    def class_names(self) -> list[str]:
        """What the model or its config call themselves."""
        names = [self.get("_class_name"), self._class_name, self.architecture, type(self._config).__name__]
        return [name for name in names if isinstance(name, str)]

    def has(self, name: str) -> bool:
        """Whether the field is there, even if None."""
        self.read.add(name)
        return name in self._given or self._of_config(name) is not _MISSING

    def given(self, *names: str) -> bool:
        """Whether one of the fields was given beside the config."""
        self.read.update(names)
        return not self._given.keys().isdisjoint(names)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of the fields that is there and not None."""
        look = self._given.get if self.given(*names) else self._of_config
        for name in names:
            value = look(name)
            if value is not None and value is not _MISSING:
                return value
        return default

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. Raises WrongUse without one and without a default."""
        value = self.get(*names, default=default)
        if value is None:
            raise self.missing(*names)
        return whole_number(f"{names[0]} of the config", value, least=least)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self.get(*names, default=default))

    def missing(self, *names: str) -> WrongUse:
        """What to raise where none of the fields is there."""
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        return WrongUse(f"the config has no {names[0]}{others}: give it as a keyword, {names[0]}=...")

    def refuse(self, *names: str) -> None:
        """Raises WrongUse where one of the fields is set: no formula here counts what it does."""
        for name in names:
            value = self.get(name)
            if value is not None and value is not False and value != 0 and value != "":
                raise WrongUse(
                    f"the config has {name}={_short(value)}, which no registered formula counts: "
                    "register one (register_family), or measure the FLOPs of a step"
                )

    def unread(self) -> list[str]:
        """Fields given beside the config that nothing asked for."""
        return sorted(self._given.keys() - self.read)

    def _of_config(self, name: str) -> Any:
        if self._entries is not None:
            return self._entries.get(name, _MISSING)
        return getattr(self._config, name, _MISSING)


def whole_number(what: str, value: object, *, least: int = 1) -> int:
    """`value` as an int of at least `least`; integral floats pass, as files of numbers write them."""
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise WrongUse(f"{what} must be a whole number of at least {least}, found {_short(value)}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
