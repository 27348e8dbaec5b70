"""`skill`: what a coding agent needs to know of these commands, as a skill file."""

from __future__ import annotations

import argparse
from importlib.resources import files

from profiler_wrapper.commands import common


def add(commands: common.Commands) -> None:
    command = common.add_command(commands, "skill", skill, examples="\n-o .claude/skills/profiler-wrapper/SKILL.md")
    common.add_output(command, "SKILL.md")


def skill(options: argparse.Namespace) -> None:
    """Print the skill file for coding agents: when to profile, what to run, how to read the answers.

    With --format json its parts: name, description, text.
    """
    output = common.output_file(options, "SKILL.md")
    text = files(__package__).joinpath("SKILL.md").read_text(encoding="utf-8").rstrip("\n")
    if options.format == "json":
        head = dict(line.split(": ", 1) for line in text.split("---\n")[1].splitlines())
        text = common.json_text({"name": head["name"], "description": head["description"], "text": text})
    common.print_or_write(text, output)
