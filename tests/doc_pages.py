"""Pages of the documentation: their code, which is run as a reader would, and their links.

All python blocks of a page run in order in one namespace, commands of sh blocks between them. Comments before a block
say otherwise:

    <!-- prelude: tiny trackers --> on the page's first line: its blocks begin after these of `tests/docs_preludes/`
    <!-- not run: why -->          this block is left out
    <!-- exit: 3 -->               the last command of this block ends with 3
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from profiler_wrapper.__main__ import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PRELUDES = Path(__file__).parent / "docs_preludes"

RUN = {"python", "sh"}
SHOWN = {"text", "console", "json", "yaml", "bash", "toml", "ini", "csv", "diff", "html", "markdown"}
PROGRAMS = (["profiler-wrapper"], ["python", "-m", "profiler_wrapper"])

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^`]*")
_COMMENT = re.compile(r"<!--\s*(?P<name>prelude|not run|exit)\b\s*:?\s*(?P<value>.*?)\s*-->", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\s*\[[^\]]+\]:\s*(\S+)|\b(?:src|href)=\"([^\"]+)\"")
# Directories of the machine on which a page was written; a reader's own are shown as /home/me, /data, /scratch.
_MACHINE = re.compile(
    r"(?<![\w./}])/(?:work|root|mnt|workspace|Users|home/(?!me\b)\w+|tmp/(?:tmp|pytest|bash|site-))[\w./-]*"
)
_SHELL = re.compile(r"[|<>;&$*?`(){}~]")


class PageError(AssertionError):
    """What is wrong with a page, as `docs/page.md:12: what`."""


@dataclass(frozen=True)
class Block:
    """The text between two fences; `line` is that of its first line of text."""

    language: str
    text: str
    line: int
    exit_code: int = 0
    not_run: str | None = None


@dataclass
class Page:
    """One page, as it is written."""

    path: Path
    preludes: list[Path] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)

    def error(self, line: int, what: str) -> PageError:
        """An error that names page and line."""
        return PageError(f"{os.path.relpath(self.path, ROOT)}:{line}: {what}")


def read_page(path: Path) -> Page:
    """A page's blocks and links.

    Raises:
        PageError: a block that is not closed or in no known language; a comment that leads no block.
    """
    page, lines = Page(path), path.read_text(encoding="utf-8").splitlines()
    said: dict[str, tuple[int, str]] = {}
    at = 0
    while at < len(lines):
        line, number = lines[at], at + 1
        at += 1
        if fence := _FENCE.fullmatch(line):
            begin, indent, mark = at, fence["indent"], fence["fence"]
            while at < len(lines) and not (lines[at].strip().startswith(mark) and not lines[at].strip(mark[0] + " \t")):
                at += 1
            if at == len(lines):
                raise page.error(number, "this block is not closed")
            text = "\n".join(one.removeprefix(indent) for one in lines[begin:at])
            page.blocks.append(_block(page, number, fence["language"], text, said))
            said = {}
            at += 1
        elif line.lstrip().startswith("<!--"):
            while "-->" not in line and at < len(lines):
                line += " " + lines[at].strip()
                at += 1
            if comment := _COMMENT.search(line):
                said[comment["name"]] = number, " ".join(comment["value"].split())
                if comment["name"] == "prelude":
                    page.preludes = _preludes(page, *said.pop("prelude"))
        elif line.strip():
            if said:
                raise page.error(min(one for one, _ in said.values()), "no block follows this comment")
            plain = re.sub(r"(`+).+?\1", "", line)
            page.links += [(number, "".join(link)) for link in _LINK.findall(plain)]
    if said:
        raise page.error(min(one for one, _ in said.values()), "no block follows this comment")
    return page


def _block(page: Page, number: int, language: str, text: str, said: dict[str, tuple[int, str]]) -> Block:
    if language not in RUN | SHOWN:
        raise page.error(number, f"a block is one of {', '.join(sorted(RUN | SHOWN))}, not {language!r}")
    if language not in RUN and said:
        raise page.error(number, f"{language} is never run, so that no comment is needed")
    not_run = said["not run"][1] if "not run" in said else None
    if not_run is not None and len(not_run.split()) < 2:
        raise page.error(number, "say in some words why it is not run")
    exit_code = said["exit"][1] if "exit" in said else "0"
    if not exit_code.isdecimal():
        raise page.error(number, f"no exit code: {exit_code!r}")
    return Block(language, text, number + 1, int(exit_code), not_run)


def _preludes(page: Page, number: int, names: str) -> list[Path]:
    if number != 1:
        raise page.error(number, "a prelude is named on the first line")
    paths = [PRELUDES / f"{name}.py" for name in names.split()]
    for path in paths:
        if not path.is_file():
            raise page.error(number, f"tests/docs_preludes has no {path.name}")
    return paths


# --- what a page must not have ---


def wrong_links(page: Page) -> Iterator[PageError]:
    """Links to files that are not there, or that lie outside the documentation."""
    for line, target in page.links:
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
            continue
        path = Path(os.path.normpath(page.path.parent / target.split("#")[0]))
        if target.startswith("/") or not path.is_relative_to(DOCS):
            yield page.error(line, f"a link out of the documentation: {target}")
        elif not path.is_file():
            yield page.error(line, f"a link to no file: {target}")


def machine_paths(page: Page) -> Iterator[PageError]:
    """Absolute paths of the machine on which the page was written."""
    for number, line in enumerate(page.path.read_text(encoding="utf-8").splitlines(), 1):
        for found in [*_MACHINE.findall(line), *([str(ROOT)] if str(ROOT) in line else [])]:
            yield page.error(number, f"a path of one machine: {found}")


# --- running ---


def run_page(page: Page, module: ModuleType) -> None:
    """Run the blocks of a page in the current directory, those of Python in the namespace of `module`.

    Raises:
        PageError: a block failed, with its page and line.
    """
    for prelude in page.preludes:
        exec(compile(prelude.read_text(encoding="utf-8"), str(prelude), "exec", dont_inherit=True), vars(module))
    for block in page.blocks:
        if block.not_run is None and block.language == "python":
            _run_python(page, block, module)
        elif block.not_run is None and block.language == "sh":
            _run_commands(page, block)


def _run_python(page: Page, block: Block, module: ModuleType) -> None:
    try:  # lines are counted from the page's first, so that tracebacks show them
        code = compile("\n" * (block.line - 1) + block.text, str(page.path), "exec", dont_inherit=True)
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(page.path)]
        line = error.lineno if isinstance(error, SyntaxError) and not lines else next(iter(lines[-1:]), None)
        raise page.error(line or block.line, f"{type(error).__name__}: {error}") from error


def _run_commands(page: Page, block: Block) -> None:
    commands = list(_commands(block))
    for line, command in commands:
        arguments = shlex.split(command, comments=True)
        program = next((one for one in PROGRAMS if arguments[: len(one)] == one), None)
        if program is None:
            raise page.error(line, f"an sh block holds commands of ours; this is for a bash block: {command}")
        wanted = block.exit_code if (line, command) == commands[-1] else 0
        got, said = _run_shell(command) if _SHELL.search(command) else _run_command(arguments[len(program) :])
        if got != wanted:
            raise page.error(line, f"ended with {got}, not {wanted}: {command}\n{said}")


def _commands(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a block with their lines; one that goes on after a backslash is one."""
    begun, text = 0, ""
    for number, line in enumerate(block.text.splitlines(), block.line):
        begun, text = begun or number, text + line
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text.strip() and not text.lstrip().startswith("#"):
            yield begun, text.strip()
        begun, text = 0, ""


def _run_command(arguments: list[str]) -> tuple[int, str]:
    """In this process: a Python of its own, with torch, takes seconds to start."""
    try:
        return main(arguments), ""
    except SystemExit as left:  # argparse: --help, a wrong option
        return (left.code if isinstance(left.code, int) else left.code is not None), ""


def _run_shell(command: str) -> tuple[int, str]:
    python = f"{shlex.quote(sys.executable)} -m profiler_wrapper"
    functions = f'profiler-wrapper() {{ {python} "$@"; }}; python() {{ {shlex.quote(sys.executable)} "$@"; }}'
    done = subprocess.run(
        ["bash", "-uo", "pipefail", "-c", f"{functions}\n{command}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    return done.returncode, done.stdout + done.stderr
