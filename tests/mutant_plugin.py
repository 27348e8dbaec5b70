"""Says which expressions of the package each test evaluates: a plugin of the pytest that `mutant_reach.py` runs.

The package of that run sets a byte of a file for each expression that it evaluates, in whatever process. One line of
JSON a test is written to the folder: what it reached and the CPU time that it took. What a fixture of several tests, a
cached function or the import of the test's file reached counts for every test that uses it.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import json
import mmap
import os
import resource
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER, SIZE, ROOT = "MUTANTS_FOLDER", "MUTANTS_SIZE", "MUTANTS_ROOT"
LEFT_OUT = "left_out.json"  # in the folder: tests that are not run
BITS = "MUTANTS_BITS"  # the file that the package of this process and its children writes to
IMPORTED = (
    *("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.utils.checkpoint"),
    *("torch.profiler", "hypothesis.extra.numpy", "pandas", "msgspec", "tabulate", "tqdm", "jinja2", "jsonschema"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "transformers.generation"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "pyarrow.parquet"),
)


def import_what_is_slow(root: Path) -> None:
    """Libraries that tests need, in the environment that their conftest.py sets. Nothing of the package itself."""
    spec = importlib.util.spec_from_file_location("conftest_of_mutants", root / "tests" / "conftest.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for name in IMPORTED:
        importlib.import_module(name)


class Reached:
    """The bytes of this process: 1 for each expression that was evaluated."""

    def __init__(self) -> None:
        path, size = Path(os.environ[FOLDER], f"bits-{os.getpid()}"), int(os.environ[SIZE])
        path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), size)
        os.environ[BITS] = str(path)

    def take(self) -> int:
        """What was reached since the last time."""
        found = int.from_bytes(self._bytes[:], "little")
        self._bytes[:] = bytes(len(self._bytes))
        return found

    def add(self, found: int) -> None:
        self._bytes[:] = (int.from_bytes(self._bytes[:], "little") | found).to_bytes(len(self._bytes), "little")

    def of(self, action: Callable[[], Any]) -> tuple[Any, int]:
        """What `action` returns and reaches."""
        before = self.take()
        try:
            value = action()
        finally:
            found = self.take()
            self.add(before | found)
        return value, found


class Plugin:
    """Writes a line for each test."""

    def __init__(self) -> None:
        self._out = Path(os.environ[FOLDER], f"tests-{os.getpid()}.jsonl").open("a")  # noqa: SIM115  (until the end)
        self._of_file: dict[str, int] = {}
        self._of_fixture: dict[object, tuple[str, int, float]] = {}
        self._fixtures_s = 0.0  # CPU of fixtures of several tests, within a test
        self._test: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        left_out = set(json.loads(Path(os.environ[FOLDER], LEFT_OUT).read_text()))
        items[:] = [item for item in items if item.nodeid not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        REACHED.take()
        report = yield
        if isinstance(collector, pytest.Module):
            self._of_file[collector.nodeid] = REACHED.take()
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, began = REACHED.take(), _cpu_s()
        try:
            return (yield)
        finally:
            found, took_s = REACHED.take(), _cpu_s() - began
            REACHED.add(before | found)
            self._fixtures_s += took_s
            parameter = fixturedef.cached_result[1] if fixturedef.cached_result else None
            key = f"{fixturedef.baseid}::{fixturedef.argname}::{parameter}"
            self._of_fixture[fixturedef] = key, found, took_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        REACHED.take()
        _asked.clear()
        self._test = {"reached": self._of_file.get(item.nodeid.split("::")[0], 0), "fixtures": {}, "skipped": False}
        self._fixtures_s, began = 0.0, _cpu_s()
        done = yield
        reached = self._test.pop("reached") | REACHED.take()
        size = int(os.environ[SIZE])
        packed = base64.b64encode(zlib.compress(reached.to_bytes(size, "little"), 1)).decode()
        took_s = max(0.0, _cpu_s() - began - self._fixtures_s)
        line = {"test": item.nodeid, "cpu_s": round(took_s, 4), **self._test, "reached": packed}
        print(json.dumps(line), file=self._out, flush=True)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            self._test["skipped"] = True
        if report.when == "call":
            for definition in item._request._fixture_defs.values():  # type: ignore[attr-defined]
                if definition in self._of_fixture:
                    key, found, took_s = self._of_fixture[definition]
                    self._test["reached"] |= found
                    self._test["fixtures"][key] = round(took_s, 4)
        return report


REACHED: Reached
_caches: list[object] = []
_asked: set[object] = set()  # (cache, key) of this test


def _cpu_s() -> float:
    """Of this process and the children that it has waited for, and of programs: children of another process."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    of_programs: float = getattr(sys.modules.get("programs"), "cpu_s", 0.0)
    return sum(each.ru_utime + each.ru_stime for each in used) + of_programs


def cache_that_tells(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What a cached function reached when it was called first counts for each test that calls it."""
    found: dict[object, int] = {}
    number = len(_caches)

    @functools.wraps(inner)
    def ours(*args: Any, **named: Any) -> Any:
        key = functools._make_key(args, named, False)
        misses = inner.cache_info().misses  # type: ignore[attr-defined]
        if key in found and (number, key) in _asked:
            return inner(*args, **named)
        value, reached = REACHED.of(lambda: inner(*args, **named))
        if inner.cache_info().misses != misses:  # type: ignore[attr-defined]
            found[key] = reached
        REACHED.add(found.get(key, 0))
        _asked.add((number, key))
        return value

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        setattr(ours, name, getattr(inner, name))
    _caches.append(ours)
    return ours


def _lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
    cached = _plain_lru_cache(maxsize, typed)
    if callable(maxsize):
        return _told(maxsize, cached)
    return lambda function: _told(function, cached(function))


def _told(function: Callable[..., Any], cached: Callable[..., Any]) -> Callable[..., Any]:
    code = getattr(function, "__code__", None)
    is_ours = code is not None and code.co_filename.startswith(os.environ[ROOT])
    return cache_that_tells(cached) if is_ours else cached


if FOLDER in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    REACHED = Reached()
    import_what_is_slow(Path(os.environ[ROOT]))
    _plain_lru_cache = functools.lru_cache
    functools.lru_cache = _lru_cache
    functools.cache = _lru_cache(maxsize=None)

    def pytest_configure(config: pytest.Config) -> None:
        config.pluginmanager.register(Plugin())
