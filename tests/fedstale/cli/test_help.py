"""What `--help` says: every word that a command takes, in groups, with what it does."""

import re

import click
import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.main import app

ROOT = typer.main.get_command(app)
PASS_ON = {"node", "flwr", "superlink", "superexec"}
"""Commands whose other words are Flower's."""


def commands(group=ROOT, words=()):
    """Yield every command with the words that call it."""
    for name, command in group.commands.items():
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


def called(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "240", "TERMINAL_WIDTH": "240"})


SINGLE = [
    pytest.param(words, command, id=" ".join(words))
    for words, command in commands()
    if not isinstance(command, click.Group) and words[-1] not in PASS_ON
]


@pytest.mark.parametrize(("words", "command"), SINGLE)
def test_every_argument_and_option_is_explained(words, command):
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", called(*words, "--help").stdout).split())
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.help, parameter.name
            # Shown, and not only written: versions of click and typer that do not fit lose it.
            assert " ".join(parameter.help.split())[:60] in text, parameter.name


def test_the_version_has_a_short_option():
    assert called("-V").stdout == called("--version").stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["simulat"], "simulate"),
        (["traces", "compse"], "compose"),
        (["compare", "--targt"], "--target"),
    ],
)
def test_what_was_meant_is_said_once(words, meant):
    said = " ".join(called(*words).stderr.split())
    assert said.count(meant) == 1
    assert said.lower().count("did you mean") == 1
