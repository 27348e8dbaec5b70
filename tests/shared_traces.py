"""Where recorded traces of GPUs lie: beside the checkout. They are not part of the project; tests skip without them."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "shared" / "traces"
TRACE_NAMES = sorted(path.name for path in TRACES.glob("*.json.gz"))
NO_TRACES = f"no recorded traces at {TRACES}"
needs_traces = pytest.mark.needs_traces  # without them all such tests are one that is skipped: `left_out.py`
