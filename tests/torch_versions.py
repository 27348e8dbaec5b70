"""Tests of what older torch lacks are skipped there, by what it lacks."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def since_torch(major: int, minor: int, lacks: str) -> pytest.MarkDecorator:
    """A mark for a test of what came with that version."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__}: {lacks}")
