"""Write docs/commands.md, the reference of the command line, from the commands themselves.

Each panel of `fedstale --help` is a section, each group of commands a table in it. What an option
means and its default stay with `--help`, which a reader of the page has at hand.

Run it with: python docs/commands_page.py
"""

import inspect
from pathlib import Path

import click
from typer.main import get_command

from fedstale.cli.main import app

PAGE = Path(__file__).parent / "commands.md"

OPENING = """\
# Command line

`fedstale COMMAND --help` says what each option means and what its default is, and shows an example.
This page lists the commands and their options by name. A command needs its options in **bold**.
Commands that run a program of Flower's hand `--help` to it; their own options are explained here.

<!-- Written by `python docs/commands_page.py`; edit the help of the commands instead. -->
"""


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by their long names, in the order of its help."""
    return {
        max(parameter.opts, key=len): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
    }


def names_of(command: click.Command) -> str:
    """Return the names of a command's options in one cell."""
    names = [
        f"**`{name}`**" if option.required else f"`{name}`"
        for name, option in options_of(command).items()
    ]
    return ", ".join(names) or "-"


def explained(commands: dict[str, click.Command]) -> list[str]:
    """Return what the options mean of commands that hand `--help` on to Flower."""
    lines: list[str] = []
    for path, command in commands.items():
        options = (
            {} if command.context_settings.get("help_option_names", True) else options_of(command)
        )
        if options:
            lines += [
                f"Options of `{path}`:",
                "",
                "| option | meaning | default |",
                "|---|---|---|",
            ]
            lines += [
                f"| `{name}` | {option.help} | {option.default or '-'} |"
                for name, option in options.items()
            ]
            lines.append("")
    return lines


def row(command: click.Command, path: str) -> str:
    """Return a command's line of a table, whose cells must not hold a bar."""
    context = click.Context(command, info_name=path)
    arguments = [
        parameter.make_metavar(context)
        for parameter in command.params
        if isinstance(parameter, click.Argument)
    ]
    usage = " ".join([path, *arguments]).replace(" | ", "|").replace("|", " or ")
    about = " ".join(inspect.cleandoc(command.help or "").split())
    return f"| `{usage}` | {about} | {names_of(command)} |"


def table(commands: dict[str, click.Command]) -> list[str]:
    """Return a table of commands, by the words that start each."""
    head = ["| command | what it does | options |", "|---|---|---|"]
    rows = [row(command, path) for path, command in commands.items()]
    return [*head, *rows, "", *explained(commands)]


def page() -> str:
    """Return the whole page."""
    root = get_command(app)
    assert isinstance(root, click.Group)
    panels: dict[str, dict[str, click.Command]] = {}
    for name, command in root.commands.items():
        panel = str(getattr(command, "rich_help_panel", "Others"))
        if not command.hidden:
            panels.setdefault(panel, {})[f"fedstale {name}"] = command
    lines = [OPENING]
    for panel, commands in panels.items():
        groups = {
            path: command for path, command in commands.items() if isinstance(command, click.Group)
        }
        alone = {path: command for path, command in commands.items() if path not in groups}
        lines += [f"## {panel}", "", *(table(alone) if alone else [])]
        for path, group in groups.items():
            members = {
                f"{path} {name}": command
                for name, command in group.commands.items()
                if not command.hidden
            }
            lines += [f"### {path}", "", group.help or "", "", *table(members)]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
