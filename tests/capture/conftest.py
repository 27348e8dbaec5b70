"""What the tests of marks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from mark_tape import PLAIN_CALL, Tape
from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.scopes import LayerScopes


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    tape = Tape()
    monkeypatch.setattr(scopes, "_Range", tape)
    yield tape
    assert nn.Module.__call__ is PLAIN_CALL


@pytest.fixture
def attach() -> Iterator[Any]:
    """Attaches scopes and takes them away at the end of the test."""
    attached: list[LayerScopes] = []

    def attach(model: object = None, **options: Any) -> LayerScopes:
        attached.append(LayerScopes(model, **options))
        attached[-1].attach()
        return attached[-1]

    yield attach
    for one in attached:
        one.detach()
