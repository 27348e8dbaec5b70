"""The pytest plugin: `@pytest.mark.profile_layers(max_peak="1 GiB")` on a test.

Imports neither torch nor profiler_wrapper before a marked test runs, so that it costs other tests nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from profiler_wrapper.integrations.limits import Limits

_MARK = "profile_layers"
_LIMITS: pytest.StashKey[Limits] = pytest.StashKey()
_HELP = (
    f"{_MARK}(max_peak=None, max_launches=None, max_flops=None, max_graph_breaks=None, max_synchronisations=None, "
    "baseline=None): profile the body of the test by layer, and fail it where it needs more. max_peak: bytes, or text "
    "such as '1 GiB'. Launches (kernels, on a CPU ops), FLOPs and synchronisations are those of a step. baseline: a "
    "file that --profile-layers-update writes, or a directory for one of each test."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("profiler_wrapper")
    where = f"keep the files of tests marked {_MARK} there (default: in pytest's temporary directory)"
    group.addoption("--profile-layers-dir", metavar="DIR", help=where)
    what = f"write the baselines of tests marked {_MARK} instead of comparing with them"
    group.addoption("--profile-layers-update", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP)


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and item.get_closest_marker(_MARK):
        item.fixturenames.append("tmp_path_factory")


def _given(item: pytest.Item) -> dict[str, Any]:
    """What the marks of a test say; the nearest one counts."""
    given: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(_MARK))):
        given |= {**dict.fromkeys(map(repr, mark.args)), **mark.kwargs}
    return given


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the mark, before the test's fixtures are made."""
    if item.get_closest_marker(_MARK) is None:
        return
    from profiler_wrapper.errors import WrongUse
    from profiler_wrapper.integrations.limits import baseline_path, begin_test, read_limits

    update, root, problem = item.config.getoption("profile_layers_update"), item.config.rootpath, None
    try:
        item.stash[_LIMITS] = limits = read_limits(_given(item), root=root, test=item.name, update=update)
        for other in item.session.items if update and limits.baseline is not None else ():
            theirs = _given(other).get("baseline") if other is not item else None
            if not isinstance(theirs, (str, os.PathLike)):
                continue
            if baseline_path(theirs, root=root, test=other.name) == limits.baseline:
                raise WrongUse(
                    f"{limits.baseline} is the baseline of {other.nodeid} too, and one would overwrite the other. "
                    'Give each a file or a directory of its own ("perf/" has a file for each name of a test).'
                )
    except WrongUse as error:
        problem = f"@pytest.mark.{_MARK}: {error}"
    if problem is not None:
        pytest.fail(problem, pytrace=False)
    begin_test(item.stash[_LIMITS])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the body of a marked test under `ProfilerWrapper`."""
    limits = item.stash.get(_LIMITS, None)
    if limits is None:
        return (yield)
    from profiler_wrapper.integrations.limits import failure, make_profiler

    given = item.config.getoption("profile_layers_dir")
    base = item.funcargs["tmp_path_factory"].getbasetemp()  # type: ignore[attr-defined]
    prof = make_profiler(limits, item.config.invocation_params.dir / given if given else base / _MARK, item.nodeid)
    try:
        with prof:
            outcome = yield
    except (Exception, pytest.fail.Exception):
        item.add_report_section("call", _MARK, failure(limits, prof, raised=True))
        raise
    if message := failure(limits, prof):
        pytest.fail(message, pytrace=False)
    return outcome
