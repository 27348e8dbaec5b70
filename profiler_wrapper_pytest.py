"""The pytest plugin of profiler_wrapper: `@pytest.mark.profile_layers(max_peak="1 GiB", ...)` on a test.

Imports neither torch nor profiler_wrapper before a marked test runs, so that it costs other test suites nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from profiler_wrapper.integrations.limits import Limits

_MARK = "profile_layers"
_LIMITS: pytest.StashKey[Limits] = pytest.StashKey()
_HELP = (
    f"{_MARK}(max_peak=None, max_launches=None, max_flops=None, max_graph_breaks=None, max_synchronisations=None, "
    "baseline=None): profile the test's body by layer, and fail where it needs more. max_peak: memory, in bytes or as "
    "text ('1 GiB', '500 MB'); max_launches: kernels and copies a step on a device, ops on a CPU; max_flops: FLOPs a "
    "step; max_graph_breaks: places where torch.compile could not go on; max_synchronisations: waits for the device "
    "a step; baseline: a file of `profiler-wrapper guard --update`, or a directory with one for each test."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("profiler_wrapper")
    group.addoption(
        "--profile-layers-dir",
        metavar="DIR",
        help=f"keep results and traces of tests marked {_MARK} there (default: in pytest's temporary directory)",
    )
    group.addoption(
        "--profile-layers-update",
        action="store_true",
        help=f"write the baselines of tests marked {_MARK} instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP)


def pytest_itemcollected(item: pytest.Item) -> None:
    if not isinstance(item, pytest.Function) or item.get_closest_marker(_MARK) is None:
        return
    if "tmp_path_factory" not in item.fixturenames:
        item.fixturenames.append("tmp_path_factory")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the mark says, before the test's fixtures are made."""
    marks = list(item.iter_markers(_MARK))
    if not marks:
        return
    from profiler_wrapper.errors import WrongUse
    from profiler_wrapper.integrations.limits import Limits

    limits, problem = None, ""
    try:
        given: dict[str, Any] = {}
        for mark in reversed(marks):  # the nearest one counts
            if mark.args:
                raise WrongUse(f"{mark.args[0]!r} is given without a keyword. Give max_peak={mark.args[0]!r}, say.")
            given |= mark.kwargs
        limits = Limits.of(given, root=item.config.rootpath, test=item.name)
        if not item.config.getoption("profile_layers_update"):
            limits.check_baseline()
    except WrongUse as error:
        problem = str(error)
    if limits is None or problem:
        pytest.fail(f"@pytest.mark.{_MARK}: {problem}", pytrace=False)
    if limits.counts_graph_breaks and "torch._dynamo" in sys.modules:
        limits.forget_compiled()
    item.stash[_LIMITS] = limits


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs the body of a marked test under `ProfilerWrapper`."""
    limits = item.stash.get(_LIMITS, None)
    if limits is None:
        return (yield)
    prof = limits.profiler(_directory(item), item.nodeid)
    try:
        with prof:
            outcome = yield
    except (Exception, pytest.fail.Exception):
        found = limits.judge(prof, raised=True)
        item.add_report_section("call", _MARK, found.message or "within its limits until it failed")
        raise
    found = limits.judge(prof, update=item.config.getoption("profile_layers_update"))
    item.user_properties += [(f"{_MARK}_{name}", value) for name, value in found.measured.items()]
    for note in found.notes:
        item.warn(pytest.PytestWarning(f"{_MARK}: {note}"))
    if found.message:
        pytest.fail(found.message, pytrace=False)
    return outcome


def _directory(item: pytest.Item) -> Path:
    given = item.config.getoption("profile_layers_dir")
    if given:
        return item.config.invocation_params.dir / Path(given)
    base: Path = item.funcargs["tmp_path_factory"].getbasetemp()  # type: ignore[attr-defined]
    return base / _MARK
