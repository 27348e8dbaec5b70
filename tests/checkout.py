"""Importing it puts the package of this checkout before an installed one: for scripts that run in a second checkout.

What PYTHONPATH names goes before: it may be another tree, whose outputs are compared with ours.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_named = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
if not any((place / "profiler_wrapper").is_dir() for place in _named):
    sys.path.insert(1, str(ROOT))
