"""Tests of what older torch lacks are skipped there, by what it lacks."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def torch_has(feature: object, lacks: str) -> pytest.MarkDecorator:
    """A mark for a test of that feature; falsy: this torch lacks it."""
    return pytest.mark.skipif(not feature, reason=f"torch {torch.__version__}: {lacks}")


def since_torch(major: int, minor: int, lacks: str) -> pytest.MarkDecorator:
    """The same for what can be told by the version alone."""
    return torch_has((major, minor) <= TORCH, lacks)
