"""The README: short, its links lead somewhere, and both languages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))
MOST_LINES = 170
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def structure(path: Path) -> dict[str, list[str]]:
    """What does not depend on the language: levels of headings, code, pictures, links, figures of prose and tables."""
    text = path.read_text(encoding="utf-8")
    code = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    links = [link for link in LINK.findall(prose) if not Path(link).name.startswith("README")]
    return {
        "levels of headings": re.findall(r"^#+", prose, re.MULTILINE),
        "code": code,
        "links": links,
        "columns of tables": re.findall(r"^\|[-|]+\|$", prose, re.MULTILINE),
        "quoted": sorted(re.findall(r"`[^`]+`", prose)),
        "figures": sorted(re.findall(r"\d+(?:[.,]\d+)*", re.sub(LINK, "]", prose))),
    }


@pytest.mark.parametrize("path", [README, CHINESE], ids=["English", "Chinese"])
def test_it_fits_a_few_screens(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("path", [README, CHINESE], ids=["English", "Chinese"])
def test_every_link_leads_to_a_file(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_both_languages_say_the_same() -> None:
    assert structure(CHINESE) == structure(README)
