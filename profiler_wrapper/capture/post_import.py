"""Calls a function as soon as a module has been imported, without importing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

WhenImported = Callable[[ModuleType], None]

_waiting: dict[str, WhenImported] = {}


def after_import(name: str, when_imported: WhenImported) -> None:
    """Call `when_imported` with the module `name`: now if it is imported already, else once it is.

    `when_imported` must not raise: it runs within somebody's import statement.
    """
    module = sys.modules.get(name)
    if module is not None:
        when_imported(module)
        return
    _waiting[name] = when_imported
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Lets the others find a module that is waited for, and has the loader tell when it is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = _found_by_others(fullname, path, target)
        # A loader of this type is made for one module and for one import of it.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            _let_tell(fullname, spec.loader)
        return spec


_finder = _Finder()


def _found_by_others(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if finder is not _finder and find is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None


def _let_tell(name: str, loader: SourceFileLoader) -> None:
    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # the loader is as it was
        loader.exec_module(module)
        when_imported = _waiting.pop(name, None)
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        if when_imported is not None:
            when_imported(module)

    vars(loader)["exec_module"] = exec_module


# --------------------------------------------------------------------------------------------------
# PROFILER_WRAPPER in the environment, as far as it turns everything off. Imports no torch: it is asked at import.

SWITCH = "PROFILER_WRAPPER"


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns the package off."""
    return environment.get(SWITCH, "").strip().lower() in ("off", "0")
