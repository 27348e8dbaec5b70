"""Makes the pictures of pages that README and documentation show: in outputs/gallery, by a headless Chromium.

python benchmarks/page_pictures.py [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import measuring  # noqa: F401
from browser import Browser, Page
from measuring import ROOT
from page_tables import DRAWN
from shared_traces import TRACES

GALLERY = ROOT / "outputs" / "gallery"
QWEN = "h100_qwen1.5_0.5b_inference.json.gz"
_MLP = "select=layer%3Alayers.3.mlp"
_ATTENTION = "select=layer%3AQwen2Model.Qwen2DecoderLayer_13.Qwen2Attention"
# Of each: whose page, its address, how far down the window is, and what the window is like.
PICTURES: Mapping[str, tuple[str, str, str, dict[str, int | bool]]] = {
    "page_step": ("demo", "step", "", {}),
    "page_layers": ("demo", f"layers?{_MLP}", "", {}),
    "page_memory": ("demo", "memory", "", {}),
    "page_timeline": (QWEN, f"step?{_ATTENTION}", "#view-timeline", {}),
    "page_h100_qwen_step": (QWEN, "step", "", {"dark": True}),
    "page_h100_qwen_kernels": (QWEN, "kernels", "", {}),
    "page_h100_qwen_roofline": (QWEN, "kernels?by=roofline", "", {}),
    "page_phone": (QWEN, "step", "", {"width": 400, "height": 800}),
    "example_03_page": ("examples/03_analyze_a_trace.py", "layers", "", {}),
    "many_ranks_page": ("examples/14_many_ranks.py", "", "", {}),
}
_SIZE = {"width": 1366, "height": 900}


def run(*command: object) -> None:
    arguments = [sys.executable, *map(str, command)]
    subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@cache
def page_of(source: str, directory: Path) -> Path:
    """The page of the demo, of what an example records, or of a trace."""
    out = directory / Path(source).stem
    if source == "demo":
        run("-m", "profiler_wrapper", "demo", "-o", out)
    elif source.endswith(".py"):
        run(source, "--output-dir", out)
    trace = TRACES / source if source.endswith(".gz") else next(out.glob("*.pt.trace.json"), None)
    if trace is None:
        return next(out.rglob("report.html"))
    run("-m", "profiler_wrapper", "report", trace, "-o", f"{out}.html")
    return out.with_name(f"{out.name}.html")


def take(page: Page, down_to: str, picture: Path) -> None:
    page.to_front()
    page.wait(DRAWN)
    if down_to:
        page.evaluate(f"document.querySelector('{down_to}').scrollIntoView()")
    page.evaluate("new Promise(resolve => setTimeout(resolve, 500))")
    page.screenshot(picture)
    page.close()
    print(f"{picture.name}: {picture.stat().st_size // 1000} kB")


def main() -> None:
    """Makes those that are named, else all."""
    with tempfile.TemporaryDirectory() as directory, Browser() as browser:
        for name, (source, address, down_to, window) in PICTURES.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                page = browser.open(page_of(source, Path(directory)), address=address, **{**_SIZE, **window})
                take(page, down_to, GALLERY / f"{name}.png")


if __name__ == "__main__":
    main()
