"""Coordinates in a device mesh: their names, and what a user says of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from profiler_wrapper.errors import WrongUse

# What the dimensions of a mesh are called, and what they are called in the names of directories.
DIMENSIONS = {
    "dp": "dp",
    "ddp": "dp",
    "fsdp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "data": "dp",
    "data_parallel": "dp",
    "tp": "tp",
    "tensor": "tp",
    "tensor_parallel": "tp",
    "model": "tp",
    "pp": "pp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "pipe": "pp",
    "cp": "cp",
    "context": "cp",
    "context_parallel": "cp",
    "ep": "ep",
    "expert": "ep",
    "expert_parallel": "ep",
}
WRITTEN_ALWAYS = ("dp", "tp", "pp")  # where there is a mesh: also those of size 1


def given_coordinates(given: object) -> dict[str, int]:
    """What a user says: `{"dp": 1, "pp": 0}`, by the same names as a mesh's.

    Raises:
        WrongUse: it is no mapping, names a dimension that is unknown or named twice, or a place is no number from 0.
    """
    if not isinstance(given, Mapping):
        raise WrongUse(f"coordinates={given!r} are none. Give something like {{'dp': 1, 'tp': 0, 'pp': 0}}.")
    found: dict[str, int] = {}
    for name, place in given.items():
        known = DIMENSIONS.get(str(name).lower())
        if known is None:
            raise WrongUse(f"coordinates={given!r}: {name!r} is no dimension. Name dp, tp, pp, cp or ep.")
        if known in found:
            raise WrongUse(f"coordinates={given!r}: {known} is in it twice. Give one number for it.")
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise WrongUse(f"coordinates={given!r}: {name}={place!r} is no place. Give a number from 0.")
        found[known] = place
    return in_order(found)


def in_order(found: Mapping[str, int]) -> dict[str, int]:
    """Coordinates as they are written: dp, tp and pp always, then what else there is."""
    if not found:
        return {}
    return {name: found.get(name, 0) for name in (*WRITTEN_ALWAYS, *sorted(set(found) - set(WRITTEN_ALWAYS)))}
