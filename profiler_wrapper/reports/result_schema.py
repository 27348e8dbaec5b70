"""The JSON Schema of `result.json`, which ships beside this file."""

from __future__ import annotations

from importlib.resources import files

SCHEMA_FILE = "result_schema.json"


def schema_text() -> str:
    """JSON Schema, draft 2020-12: every key with its unit and meaning. Later versions of results add keys."""
    return files(__package__).joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
