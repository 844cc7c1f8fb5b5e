"""Help: groups, examples that can be typed, flags, and what is required."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fewshift
from fewshift.cli import app

COMMANDS = dict(get_command(app).commands)


def help_of(*words: str, columns: int = 80) -> list[str]:
    env = {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [*words, "--help"], prog_name="fewshift", env=env).stdout.splitlines()


def examples(name: str) -> list[str]:
    """The commands below the word Examples, as a terminal of 80 columns shows them."""
    lines = [line.rstrip() for line in help_of(name)]
    below = "\n".join(lines[lines.index(" Examples:") + 1 :]).strip()
    return [line.strip() for line in below.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_understands(name):
    shown = examples(name)
    assert shown
    for example in shown:
        program, command, *words = shlex.split(example)
        assert (program, command) == ("fewshift", name)
        COMMANDS[name].make_context(name, words)  # an option that does not exist, or a line that was broken, raises


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_stands_in_a_group(name):
    titles = [line.split(" ")[1] for line in help_of(name) if line.startswith("╭")]
    assert "Options" not in titles
    assert titles == [
        title
        for title in ("Arguments", "Network", "Images", "Method", "Evidence", "Running", "Output")
        if title in titles
    ]


def test_research_comes_last_and_adapt_first():
    lines = [line.strip("│ ") for line in help_of()]
    names = [line.split()[0] for line in lines if line and line.split()[0] in COMMANDS]
    assert names[0] == "adapt"
    assert set(names[-3:]) == {"train", "bench", "report"}
    assert set(names) == set(COMMANDS)


def test_flags_take_no_value_and_required_options_are_marked():
    lines = help_of("merge")
    assert re.search(r"\* +--delta +-d +PATH", "\n".join(lines))
    assert re.search(r"--revert +From", "\n".join(lines))
    assert not any("<bool>" in line for name in COMMANDS for line in help_of(name))


def test_the_version_is_printed(command):
    for option in ("--version", "-V"):
        done = command(option)
        assert (done.code, done.stdout) == (0, f"fewshift {fewshift.__version__}\n")


def test_short_options_mean_the_same_everywhere():
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in command.params:
            short = [name for name in option.opts if re.fullmatch("-[a-zA-Z]", name)]
            for name in short:
                meanings.setdefault(name, set()).add(option.name)
    assert {"-o", "-m", "-w", "-s", "-d"} <= set(meanings)
    assert all(len(names) == 1 for names in meanings.values()), meanings


def test_the_shell_can_complete_commands():
    env = {"_FEWSHIFT_COMPLETE": "complete_bash", "COMP_WORDS": "fewshift ev", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="fewshift", env=env)
    assert done.stdout.split() == ["evaluate"]
