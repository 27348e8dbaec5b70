"""What holds of any result is asked of live loops of many kinds; of recorded traces in `tables/`.

Nothing here depends on how long anything takes: laws that go by the size of a share (`OF_TIMES`) are asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invariants import INVARIANTS, broken
from live_cases import CASES, live_result
from profiler_wrapper import ProfileResult
from profiler_wrapper.place.names import NO_FORWARD_LINK

pytestmark = pytest.mark.filterwarnings("ignore")
CHEAP = {"a function of its own", "convolutions", "checkpoint() of checkpoint()", "named blocks", "gpt2 trains"}
# Of live runs what these say goes by the clock, and they hold on recorded traces.
OF_TIMES = {"the_verdict_says_its_findings", "details_of_findings_are_those_of_the_tables"}


# --- what holds of these loops, whose steps are alike -----------------------------------------------


def all_has_a_layer(result: ProfileResult) -> Iterator[str]:
    """Each op's layer is known: the marks were there."""
    yield from (f"{row.count} ops: {row.reason}" for row in result.unattributed if row.reason == NO_FORWARD_LINK)


def memory_does_not_grow(result: ProfileResult) -> Iterator[str]:
    """No loop keeps anything from step to step."""
    slope = result.memory.get("slope")
    if slope is not None and slope["bytes_per_step"]:
        yield f"{slope['bytes_per_step']} bytes more a step"
    yield from (f"a leak of {leak['op']}" for leak in result.memory.get("leaks") or ())


def steps_are_iterations(result: ProfileResult) -> Iterator[str]:
    """Each step has as many calls of the model as the others, or it is said that they are unlike."""
    if any("the steps are unlike: calls of" in warning for warning in result.warnings):
        return
    steps = sum(row.step is not None for row in result.steps)
    for row in result.layers:
        if row.depth == 0 and row.calls and row.calls % steps:
            yield f"{row.calls} calls of {row.layer} in {steps} steps"


def what_is_called_has_a_row(result: ProfileResult) -> Iterator[str]:
    """`decoder.forward(x)` in the place of `decoder(x)`: a row, or a warning with its name."""
    is_row = any(row.layer == "decoder" and row.phase == "forward" and row.calls for row in result.layers)
    if not is_row and not any("decoder" in warning for warning in result.warnings):
        yield "nothing is said of the decoder"


def parents_run_two_blocks(result: ProfileResult) -> Iterator[str]:
    """Both parents run two like blocks, one of them the same."""
    flops = {row.layer: row.flops_per_step for row in result.layers if row.phase == "forward"}
    if flops["first"] != flops["second"]:
        yield f"{flops['first']} FLOPs in the first, {flops['second']} in the second"


def sparse_flops_are_of_what_is_there(result: ProfileResult) -> Iterator[str]:
    """FLOPs of a product with a sparse matrix are null, or 2 for each number there is and each column."""
    full = 2 * 64 * 64 * 8
    for row in result.layers:
        if row.layer == "_Sparse" and row.phase == "forward" and (row.flops_per_step or 0) > full / 4:
            yield f"{row.flops_per_step} FLOPs, of a full matrix they are {full}"


OF_ALL: dict[str, Callable[[ProfileResult], Iterator[str]]] = {
    law.__name__: law for law in (all_has_a_layer, memory_does_not_grow, steps_are_iterations)
}
OF_ONE: dict[str, Callable[[ProfileResult], Iterator[str]]] = {
    law.__name__: law for law in (what_is_called_has_a_row, parents_run_two_blocks, sparse_flops_are_of_what_is_there)
}


def _broken(result: ProfileResult, law: str) -> list[str]:
    own = OF_ALL.get(law) or OF_ONE.get(law)
    return broken(result, [law]) if own is None else list(own(result))


def _cases(names: Iterator[str]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in CHEAP)) for name in names]


@pytest.mark.parametrize("name", _cases(iter(CASES)))
def test_loops_of_many_kinds(name: str, tmp_path: Path) -> None:
    result = live_result(name, tmp_path)
    assert [line for law in (*INVARIANTS, *OF_ALL) if law not in OF_TIMES for line in _broken(result, law)] == []
