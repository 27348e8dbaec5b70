"""Programs of their own, and what an action warns of."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

from profiler_wrapper.errors import ProfilerWrapperWarning

TESTS = Path(__file__).parent


def run_script(body: str, *arguments: object) -> str:
    """What a program prints, which has `tests` and us on its path and must say nothing on stderr."""
    paths = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + textwrap.dedent(body), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def warned(action: Callable[[], object]) -> list[str]:
    """What `action` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, ProfilerWrapperWarning)]
