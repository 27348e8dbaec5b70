"""PROFILER_WRAPPER in the environment, as far as it turns everything off. Imports no torch: it is asked at import."""

from __future__ import annotations

import os
from collections.abc import Mapping

SWITCH = "PROFILER_WRAPPER"


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns the package off."""
    return environment.get(SWITCH, "").strip().lower() in ("off", "0")
