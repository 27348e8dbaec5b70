"""Where recorded traces of GPUs lie: beside the checkout. They are not part of the project; tests skip without them."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "shared" / "traces"
TRACE_NAMES = sorted(path.name for path in TRACES.glob("*.json.gz"))
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded traces at {TRACES}")
