"""Where recorded traces of GPUs lie: beside the checkout. They are not part of the project; tests skip without them."""

from __future__ import annotations

from pathlib import Path

TRACES = Path(__file__).parents[2] / "shared" / "traces"
