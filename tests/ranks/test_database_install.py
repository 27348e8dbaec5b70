"""What a message says to install is what the package's own extras ask for."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from profiler_wrapper.ranks.database import INSTALL

ROOT = Path(__file__).parents[2]


def test_the_packages_named_are_those_of_the_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = set(setup["options.extras_require"]["ranks"].split())
    named = set(re.findall(r"'([^']+)'", INSTALL))
    assert named
    assert named <= extra


def test_no_hint_asks_an_index_for_this_package() -> None:
    """Its name there is not the import name, and a clone is on no index."""
    texts = [*ROOT.glob("profiler_wrapper/**/*.py"), ROOT / "README.md"]
    assert not [text.name for text in texts if re.search(r"pip install '?profiler[_-]wrapper", text.read_text("utf-8"))]
