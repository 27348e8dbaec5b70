"""The documentation: its code runs, its links lead somewhere. How a page says what is run: `tests/doc_pages.py`."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

import profiler_wrapper
from doc_pages import DOCS, ROOT, Block, Page, PageError, machine_paths, read_page, run_page, wrong_links
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.config_flops.model_flops import FAMILIES
from profiler_wrapper.timer import timer

pytestmark = pytest.mark.full

PAGES = sorted(DOCS.rglob("*.md"))


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else path.name


@pytest.fixture
def main_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with program(tmp_path, monkeypatch) as module:
        yield module


@contextmanager
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A program of its own, as far as one process allows; what it leaves behind goes with it."""
    gc.freeze()  # the search for what it leaves need not see what is there already, which takes a second
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr(sys, "argv", ["page.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(timer, "global_timer", timer.Timer())
    monkeypatch.setitem(vars(profiler_wrapper), "global_timer", timer.global_timer)
    environment, loggers = dict(os.environ), (logging.root.level, list(logging.root.handlers))
    families_before = dict(FAMILIES)
    dtype, threads, precision = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # a program of its own reads the environment
    with warnings.catch_warnings():
        yield module
    timer.global_timer.close()
    vars(module).clear()
    gc.collect()
    os.environ.clear()
    os.environ.update(environment)
    FAMILIES.clear()
    FAMILIES.update(families_before)
    logging.root.setLevel(loggers[0])
    logging.root.handlers[:] = loggers[1]
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def left_on() -> list[str]:
    """What a page has begun and not ended; it is ended here."""
    found = []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        found.append("a process group")
    if profiler_is_on():
        torch.autograd._disable_profiler()
        found.append("a profiler")
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_is_sound_and_its_code_runs(path: Path, main_module: ModuleType) -> None:
    page = read_page(path)
    assert [str(error) for error in (*wrong_links(page), *machine_paths(page))] == []
    run_page(page, main_module)
    assert left_on() == []


def test_every_page_is_in_the_navigation() -> None:
    def paths(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for one in entry if isinstance(entry, list) else entry.values():  # type: ignore[attr-defined]
                yield from paths(one)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert {name_of(path) for path in PAGES} - set(paths(navigation)) == set()


@pytest.mark.parametrize("path", [path for path in PAGES if read_page(path).preludes], ids=name_of)
def test_what_a_page_begins_with_is_shown_to_its_reader(path: Path) -> None:
    shown = DOCS / "how-to" / "model-of-these-pages.md"
    page, blocks = read_page(path), [block.text for block in read_page(shown).blocks]
    assert any((path.parent / link.split("#")[0]).resolve() == shown for _, link in page.links)
    for prelude in page.preludes:
        code = re.sub(r"  # (?:noqa|fmt).*", "", prelude.read_text(encoding="utf-8"))
        assert code.split('"""', 2)[2].strip() in blocks


# --- the checks themselves ---


def written(tmp_path: Path, text: str) -> Page:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return read_page(path)


def test_blocks_share_a_namespace_and_run_in_order(tmp_path: Path, main_module: ModuleType) -> None:
    page = written(
        tmp_path,
        "<!-- prelude: tiny -->\n# A page\n\n```python\nfrom pathlib import Path\nstep(batches[0])\nx = 1\n```\n\n"
        "- an item\n\n    ```python\n    y = x + 1\n    assert __name__ == '__main__' and Path('outputs').is_dir()\n"
        "    ```\n\n"
        "<!-- not run: there is no such machine -->\n```python\n1 / 0\n```\n\n```bash\nfalse\n```\n",
    )
    run_page(page, main_module)
    assert main_module.y == 2
    assert [block.language for block in page.blocks] == ["python", "python", "python", "bash"]
    assert page.blocks[2] == Block("python", "1 / 0", 19, 0, "there is no such machine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n\n```python\nx = 1\nx / 0\n```", "page.md:5: ZeroDivisionError"),
        ("```python\nx = 1\nx = = 2\n```", "page.md:3: SyntaxError"),
        ("```python\ndef f(): int('a')\n```\n\n```python\n\nf()\n```", "page.md:2: ValueError"),
        ("```python\nimport sys; sys.exit(0)\n```", "page.md:2: SystemExit"),
        (
            "```sh\nprofiler-wrapper --version\n\nprofiler-wrapper analyze no.json\n```",
            "page.md:4: ended with 1, not 0",
        ),
        ("<!-- exit: 2 -->\n```sh\nprofiler-wrapper analyze no.json\n```", "page.md:3: ended with 1, not 2"),
        ("```sh\nprofiler-wrapper --version | grep nothing\n```", "page.md:2: ended with 1, not 0"),
        ("```sh\npip install torch\n```", "page.md:2: an sh block holds commands of ours"),
    ],
)
def test_a_block_that_fails_is_named_with_its_line(
    tmp_path: Path, main_module: ModuleType, text: str, said: str
) -> None:
    with pytest.raises(PageError, match=said):
        run_page(written(tmp_path, text), main_module)


def test_what_a_page_leaves_behind_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getcwd()
    text = (
        "```python\nimport logging, os, torch, profiler_wrapper as pw\nos.environ['PAGE'] = '1'\n"
        "torch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\nlogging.basicConfig(level=10)\n"
        "pw.register_family('page')(lambda fields, batch: None)\nwith pw.global_timer('span'): pass\n```"
    )
    level, timer_before = logging.root.level, profiler_wrapper.global_timer
    with monkeypatch.context() as patch, program(tmp_path, patch) as module:
        run_page(written(tmp_path, text), module)
        assert list(tmp_path.glob("outputs/*/timers/timer_rank0.jsonl"))
    assert (os.getcwd(), torch.get_default_dtype(), logging.root.level) == (here, torch.float32, level)
    assert torch.is_grad_enabled() and "PAGE" not in os.environ and "page" not in FAMILIES
    assert profiler_wrapper.global_timer is timer_before is timer.global_timer


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", "a process group"),
        ("torch.profiler.profile().start()", "a profiler"),
    ],
)
def test_what_goes_on_is_found_and_ended(tmp_path: Path, main_module: ModuleType, code: str, what: str) -> None:
    assert left_on() == []
    run_page(written(tmp_path, f"```python\nimport torch, torch.distributed as dist\n{code}\n```"), main_module)
    assert left_on() == [what]
    assert left_on() == []


@pytest.mark.parametrize(
    "command",
    [
        "profiler-wrapper analyze --help",
        "python -m profiler_wrapper --version # which",
        "profiler-wrapper \\\n  demo -h",
    ],
)
def test_commands_that_end_as_they_should(tmp_path: Path, main_module: ModuleType, command: str) -> None:
    run_page(written(tmp_path, f"```sh\n# a comment\n{command}\n```"), main_module)
    run_page(written(tmp_path, f"<!-- exit: 2 -->\n```sh\n{command}\nprofiler-wrapper demo --no\n```"), main_module)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx", "page.md:1: this block is not closed"),
        ("a\n\n```py\nx\n```", "page.md:3: a block is one of"),
        ("```\nx\n```", "page.md:1: a block is one of"),
        ("<!-- not run: -->\n```python\nx\n```", "page.md:2: say in some words why"),
        ("<!-- not run: it needs a GPU -->\n\ntext", "page.md:1: no block follows"),
        ("<!-- exit: 3 -->", "page.md:1: no block follows"),
        ("<!-- exit: three -->\n```sh\n```", "page.md:2: no exit code"),
        ("<!-- not run: a GPU cluster -->\n```bash\n```", "page.md:2: bash is never run"),
        ("<!-- prelude: nothing -->", "page.md:1: tests/docs_preludes has no nothing.py"),
        ("a\n\n<!-- prelude: tiny -->", "page.md:3: a prelude is named on the first line"),
    ],
)
def test_a_page_that_breaks_the_convention_is_no_page(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        written(tmp_path, text)


def test_links_lead_to_files_of_the_documentation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("doc_pages.DOCS", tmp_path)
    page = written(
        tmp_path,
        "[a](page.md) [b](page.md#part) [c](#part) ![d](images/no.png) `[e](no.md)` [f](https://pytorch.org)\n\n"
        '```text\n[g](no.md)\n```\n\n[h]: no.md\n<img src="no.gif"> [i](../page.md "title") [j](/page.md)\n',
    )
    assert [str(error).partition("page.md:")[2] for error in wrong_links(page)] == [
        "1: a link to no file: images/no.png",
        "7: a link to no file: no.md",
        "8: a link to no file: no.gif",
        "8: a link out of the documentation: ../page.md",
        "8: a link out of the documentation: /page.md",
    ]


@pytest.mark.parametrize("text", ["in /work/x/y.py", f"`{ROOT}/setup.cfg`", "The page: /tmp/pytest-of-me/a", "/root/x"])
def test_a_path_of_one_machine_is_found(tmp_path: Path, text: str) -> None:
    assert len(list(machine_paths(written(tmp_path, f"a\n\n{text}\n")))) >= 1


@pytest.mark.parametrize("text", ["/home/me/outputs/x", "outputs/work/x", "/data/work", "`/scratch/run`", "a/mnt/b"])
def test_a_path_of_the_reader_is_fine(tmp_path: Path, text: str) -> None:
    assert list(machine_paths(written(tmp_path, text))) == []
