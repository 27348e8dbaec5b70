"""Work that the workers of one run of pytest do once for all of them."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Once = Callable[[str, Callable[[Path], Any]], Any]


def once_for_all_workers(factory: pytest.TempPathFactory) -> Once:
    """`once(name, work)` gives what `work(folder)` gave the first worker that asked; it must be picklable.

    The folder stays. Where the work fails, who asks next tries again.
    """
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def once(name: str, work: Callable[[Path], Any]) -> Any:
        folder, answer = shared / name, shared / f"{name}.pickle"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not answer.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                done = pickle.dumps(work(folder))
                answer.write_bytes(done)
        return pickle.loads(answer.read_bytes())

    return once
