"""What a terminal shows: its width, whether colours are wanted, and who prints them where."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from profiler_wrapper import demo
from profiler_wrapper.__main__ import main
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.reports.text import cells
from profiler_wrapper.terminal import Cell, bar, in_a_row, styled_terminal, terminal_width
from recordings import Trace
from sample_results import llama

CODES = re.compile(r"\x1b\[[0-9;]*m")


class Screen(io.StringIO):
    """What is printed to a terminal with so many columns."""

    def __init__(self, slave: int, encoding: str) -> None:
        super().__init__()
        self._slave, self._encoding = slave, encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._slave

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


Opens = Callable[..., Screen]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    """`screen(80)`: stdout becomes a terminal of 80 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    ends: list[int] = []

    def opens(columns: int, *, on: str = "stdout", encoding: str = "utf-8") -> Screen:
        ends.extend(os.openpty())
        fcntl.ioctl(ends[-1], termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        made = Screen(ends[-1], encoding)
        monkeypatch.setattr(sys, on, made)
        return made

    yield opens
    for end in ends:
        os.close(end)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Half of the time is `layers.0`'s, a fifth nobody's."""
    made = Trace().mark(".", 0, 80_000).mark("layers.0", 1000, 60_000)
    made.op("aten::mm", 2000, 52_000).op("aten::add", 61_000, 91_000).op("aten::mul", 92_000, 112_000)
    return made.write(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({}, True),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "0"}, False),
        ({"TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
    ids=str,
)
def test_whether_a_terminal_has_colours(
    environment: dict[str, str], colours: bool, screen: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen(80)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert styled_terminal() is colours


def test_what_is_no_terminal_has_colours_only_by_force(screen: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    screen(80, on="stderr")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert (styled_terminal(), styled_terminal("stderr")) == (False, True)
    monkeypatch.setenv("FORCE_COLOR", "")
    assert not styled_terminal()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert styled_terminal()
    monkeypatch.setattr(sys, "stderr", None)
    assert terminal_width("stderr") == 100


def test_each_stream_has_its_own_width(screen: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    screen(73, on="stderr")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert (terminal_width(), terminal_width("stderr")) == (100, 73)
    monkeypatch.setenv("COLUMNS", "66")
    assert (terminal_width(), terminal_width("stderr")) == (66, 66)


@pytest.mark.parametrize(
    ("share", "blocks", "signs"),
    [(0, "", ""), (0.013, "▏", ""), (0.5, "████", "####"), (0.55, "████▍", "####"), (1.2, "████████", "########")],
)
def test_a_bar_has_eighths_of_a_column_where_it_may(share: float, blocks: str, signs: str) -> None:
    assert bar(share, 8, unicode=True) == blocks
    assert bar(share, 8) == signs


def test_codes_are_around_what_is_seen() -> None:
    row = [Cell("a  "), Cell(" b ", "accent"), Cell("  ", "bold"), Cell("c  ", "warning")]
    assert in_a_row(row, styled=True) == "a  \x1b[36m b\x1b[0m   \x1b[33mc\x1b[0m"
    assert in_a_row(row, styled=False) == "a   b   c"


def test_where_there_is_room_a_styled_table_is_the_plain_one_with_bars() -> None:
    plain, styled = (console_table(llama(4), width=140, unicode=True, styled=one).split("\n") for one in (False, True))
    at = re.search(r"share", plain[2])
    assert at is not None
    size = 2 + 20  # with the gap
    for before, after in zip(plain, styled, strict=True):
        shown = CODES.sub("", after)
        if "  " in before[20:] and before not in plain[:2]:
            assert (shown[: at.end()] + shown[at.end() + size :]).rstrip() == before
            share = re.fullmatch(r".* ([\d.]+)", before[: at.end()])
            blocks = shown[at.end() : at.end() + size].strip()
            assert blocks == ("" if share is None else bar(float(share[1]) / 100, 20, unicode=True))
        else:
            assert shown == before


def test_verdict_bars_and_what_asks_for_attention_have_a_style(
    screen: Opens, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = llama(32, odd=17, unattributed_us={"no forward link": 300.0})
    lines = console_table(analysis, styled=True).split("\n")
    codes = {name: [CODES.findall(line) for line in lines if name in line] for name in ("outlier", "unattr", "TOTAL")}
    assert codes["TOTAL"] == [["\x1b[36m", "\x1b[0m"]]
    for name in ("outlier", "unattr"):
        assert {code for line in codes[name] for code in line} == {"\x1b[33m", "\x1b[0m"}
    shown = screen(80)
    assert main(["analyze", str(trace)]) == 0
    verdict = [line for line in shown.getvalue().split("\n") if line.startswith("\x1b[1m")]
    assert verdict and all(line.endswith("\x1b[0m") for line in verdict)


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_analyze_is_as_wide_as_its_terminal(columns: int, encoding: str, screen: Opens, trace: Path) -> None:
    shown = screen(columns, encoding=encoding)
    assert main(["analyze", str(trace)]) == 0
    text = shown.getvalue()
    assert "\x1b[36m" in text
    assert ("█" in text, "##" in text) == (encoding == "utf-8", encoding == "ascii")
    assert max(cells(line) for line in CODES.sub("", text).split("\n")) <= columns


@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb"])
def test_without_colours_a_terminal_gets_the_text_of_a_file(
    variable: str, screen: Opens, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(trace)]) == 0
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    shown = screen(100, encoding="ascii")
    monkeypatch.setenv(*variable.split("="))
    assert main(["analyze", str(trace)]) == 0
    assert shown.getvalue() == piped


def test_what_is_for_programs_and_files_has_no_colours(screen: Opens, trace: Path, tmp_path: Path) -> None:
    shown = screen(100)
    for how in (["--format", "json"], ["--format", "csv"], ["-o", str(tmp_path / "x.txt")]):
        assert main(["analyze", str(trace), *how]) == 0
    assert "\x1b" not in shown.getvalue() + (tmp_path / "x.txt").read_text()


def test_the_demos_table_is_for_the_terminal_and_its_result_is_plain(tmp_path: Path, screen: Opens) -> None:
    shown = screen(84)
    tiny = demo.DemoConfig(layers=2, hidden=32, heads=2, key_value_heads=1, intermediate=64, vocabulary=64, tokens=8)
    result = demo.run_demo(output_dir=tmp_path, config=tiny)
    text = shown.getvalue()
    assert "\x1b[36m" in text
    table = text[text.index("DemoLlama") : text.index("\n", text.index("TOTAL"))]
    assert max(cells(line) for line in CODES.sub("", table).split("\n")) <= 84
    assert "\x1b" not in str(result)
    assert not any("\x1b" in file.read_text() for file in tmp_path.rglob("*.log"))
