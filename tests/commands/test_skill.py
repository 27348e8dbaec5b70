"""`skill`: the file for coding agents, and every command that it names on a small recording."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

import models
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.__main__ import main
from profiler_wrapper.commands import COMMANDS
from profiler_wrapper.result import load
from rank_spans import job, write_logs

pytestmark = pytest.mark.full


def skill(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["skill", *arguments]) == 0
    return capsys.readouterr().out


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`outputs/` with the runs that the file names: before, after, and a job of two ranks."""
    directory = tmp_path_factory.mktemp("skill")
    for name in ("before", "after"):
        case = models.build("llama")
        with ProfilerWrapper(case.model, output_dir=directory / "outputs", run_name=name, enable_print_summary=False):
            models.train(case, steps=6)
    write_logs(directory / "outputs" / "job", job(2, slow=1), ranks=2)
    return directory


def test_it_has_what_a_skill_file_needs(capsys: pytest.CaptureFixture[str]) -> None:
    text = skill(capsys)
    head = text.split("---\n")[1]
    assert re.search(r"^name: [a-z0-9-]{1,64}$", head, re.MULTILINE)
    description = re.search(r"^description: (.+)$", head, re.MULTILINE)
    assert description is not None and "Use it" in description[1] and len(description[1]) <= 1024
    assert text.count("\n") < 150
    assert json.loads(skill(capsys, "--format", "json")) == {
        "name": "profiler-wrapper",
        "description": description[1],
        "text": text.rstrip("\n"),
    }


def test_it_is_written_where_agents_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ".claude" / "skills" / "SKILL.md"
    assert skill(capsys, "-o", str(path)).strip() == str(path)
    assert path.read_text() == skill(capsys)
    assert main(["skill", "-o", str(path)]) == 1  # it is there


def test_every_command_that_it_names_runs(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    named = set()
    for line in "".join(blocks(skill(capsys), "sh")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "profiler-wrapper"
        named.add(arguments[0])
        assert main(arguments) == 0, line
        printed = capsys.readouterr().out
        assert printed.strip(), line
        if "json" in arguments:
            assert any(json.loads(printed).values()), line
    assert named == {"analyze", "compare", "ranks", "report"}


def test_every_key_that_it_names_is_there(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = skill(capsys)
    known = json.dumps(load(directory / "outputs" / "before").to_dict())
    keys = {"layers", "run.timed_steps", "self_time_us", "time_us", "warnings", "time_basis", "saves_at_most_us"}
    for key in keys:
        assert f"`{key}`" in text or key in text
        assert f'"{key.rpartition(".")[2]}"' in known, key
    for code in blocks(text, "python"):
        compile(code, "SKILL.md", "exec")


def test_it_ships_with_the_package() -> None:
    """What the wheel takes beside modules is listed in setup.cfg."""
    root = Path(__file__).parents[2]
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    patterns = settings["options.package_data"]["profiler_wrapper"].split()
    assert root / "profiler_wrapper" / "commands" / "SKILL.md" in {
        file for pattern in patterns for file in (root / "profiler_wrapper").glob(pattern)
    }


# `run` writes what a block of the script's own would, and has no format.
@pytest.mark.parametrize("name", [name for one in COMMANDS if (name := one.__name__.rpartition(".")[2]) != "run"])
def test_every_command_takes_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert re.search(r"--format \{text,json(,csv|,markdown)?\}", capsys.readouterr().out)
