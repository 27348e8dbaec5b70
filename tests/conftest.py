"""What all tests share: quiet threads, no network, which tests are left out, fixtures of several rooms."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch: two workers on two cores, one thread each; no test may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes for a few kernels
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # no programs to try out what the CPU says that it can
os.environ.setdefault("FORK_SERVER_OWNER", str(os.getpid()))  # workers of one run share the server of programs.py
os.environ.setdefault("PROFILER_WRAPPER_WORKERS", "1")  # a second process that reduces traces only costs its start
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hypothesis import HealthCheck, settings

import checkout  # noqa: F401
import left_out

if TYPE_CHECKING:
    from browser import Browser, Page
    from models import Case
    from once import Once
    from page_tables import Opener
    from profiler_wrapper.tables.model import Analysis

# The same examples in every run: a red run shows its change; HYPOTHESIS_PROFILE=default draws new ones. No bound of
# time: a busy machine is late.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that no test of this size is in: what they import takes seconds in each worker."""
    is_file = collection_path.match("test_*.py")
    return True if is_file and left_out.has_none(collection_path, size=config.option.markexpr) else None


@pytest.hookimpl(trylast=True)  # of those that are left after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := left_out.leave_out(items, left_out.what_lacks()):
        config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage: each search through all objects, ours too, would see a million."""
    gc.collect()
    gc.freeze()
    if session := sys.modules.get("profiler_wrapper.capture.session"):
        session.core_waits_ns = dict  # type: ignore[attr-defined]  # no warning goes by how busy the machine is


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries complain at the end of the process of what was never freed


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts from the same seed, without our environment variables and compiled code of another test."""
    for name in ("PROFILER_WRAPPER", "PROFILER_WRAPPER_RUN", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo process group of one."""
    import variants

    with variants.process_group():
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, work)`: what `work(folder)` gave the first worker that asked."""
    from once import once_for_all_workers

    return once_for_all_workers(tmp_path_factory)


@pytest.fixture
def case() -> Case:
    """A Llama of two blocks."""
    import models

    return models.build("llama")


@pytest.fixture
def nothing_in_the_way() -> Iterator[None]:
    """At the end nothing of ours is left where torch calls it."""
    import torch

    from unchanged import ours_in_the_way

    before = ours_in_the_way(), dict(vars(torch.autograd))
    yield
    assert (ours_in_the_way(), dict(vars(torch.autograd))) == before


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser without network. Tests that ask for it are left out where there is no Chromium."""
    from browser import Browser

    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def full(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of a result in which every view has something to show."""
    from page_tables import open_page
    from sample_views import full_analysis

    page = open_page(browser, full_analysis(), tmp_path_factory.mktemp("full"))
    yield page
    page.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page of an analysis; at the end says that it asked for nothing and complained of nothing."""
    from page_tables import open_page

    pages: list[Page] = []

    def opens(analysis: Analysis | str, address: str = "", **how: Any) -> Page:
        pages.append(open_page(browser, analysis, tmp_path, address, **how))
        return pages[-1]

    yield opens
    for page in pages:
        assert page.requests == []
        assert page.problems == []
        assert page.dialogs == []
        page.close()
