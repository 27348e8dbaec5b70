"""Who listens to runs of the autograd engine, in whatever order, leaves nothing in its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from profiler_wrapper.timer.steps import _NAMES, ENGINE


class Heard:
    """Counts runs; `deaf`: they are none of its business."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf, self.begun, self.ended = deaf, 0, 0

    def open_run(self) -> bool:
        self.begun += 1
        return not self.deaf

    def close_run(self) -> None:
        self.ended += 1


def there() -> tuple[Any, ...]:
    return tuple(getattr(torch.autograd, name) for name in _NAMES)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = there()
    yield
    assert there() == before, "torch's functions are not back"


def run() -> None:
    torch.ones(1, requires_grad=True).mul(2).sum().backward()


def test_the_first_that_listened_may_stop_first() -> None:
    """As with a timer for each of two models that are trained together."""
    first, second = Heard(), Heard()
    ENGINE.listen(first)
    ours = there()
    ENGINE.listen(second)
    assert there() == ours, "each puts one more function around the engine"
    run()
    ENGINE.stop_listening(first)
    run()
    ENGINE.stop_listening(second)
    run()
    assert ((first.begun, first.ended), (second.begun, second.ended)) == ((1, 1), (2, 2))


def test_an_error_ends_the_run_and_passes() -> None:
    heard, deaf = Heard(), Heard(deaf=True)
    ENGINE.listen(heard)
    ENGINE.listen(deaf)
    try:
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()
    finally:
        ENGINE.stop_listening(heard)
        ENGINE.stop_listening(deaf)
    assert (heard.begun, heard.ended, deaf.begun, deaf.ended) == (1, 1, 1, 0)


def test_what_somebody_put_over_ours_stays_and_ours_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _NAMES[0]
    heard = Heard()
    ENGINE.listen(heard)
    ours = getattr(torch.autograd, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with monkeypatch.context() as other:
        other.setattr(torch.autograd, name, theirs)
        ENGINE.stop_listening(heard)
        run()
        ENGINE.listen(heard)
        assert getattr(torch.autograd, name) is theirs
        run()
    assert heard.begun == 1, "told twice, or not at all"
    ENGINE.stop_listening(heard)


def test_where_somebody_put_the_original_back_ours_takes_its_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _NAMES[0]
    first, second, original = Heard(), Heard(), getattr(torch.autograd, _NAMES[0])
    ENGINE.listen(first)
    setattr(torch.autograd, name, original)
    ENGINE.listen(second)
    run()
    ENGINE.stop_listening(second)
    ENGINE.stop_listening(first)
    assert (first.begun, second.begun) == (1, 1)
