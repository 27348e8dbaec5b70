"""What the file of a page holds, read without a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_data(page: Path) -> dict[str, Any]:
    """The data in a page."""
    (text,) = _DATA.findall(page.read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(text)
    return data


def trace_href(page: Path) -> str | None:
    """Where the page says that the trace is."""
    href: str | None = page_data(page)["page"]["trace_href"]
    return href
