"""`fedstale suite`: judge a method on scenarios that never change."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli import output
from fedstale.interrupts import end_on_signals

app = typer.Typer(name="suite", no_args_is_help=True, rich_help_panel="Analyse")
app.info.help = "Judge a method on scenarios that never change, beside standing methods."
_METHOD = typer.Argument(metavar="METHOD", help="Python file of a method, or a strategy's text.")
_OUT = typer.Option("--out", "-o", help="Folder; default suites/METHOD/SCENARIO-TASK.")
_QUICK = typer.Option("--quick", help="A look in minutes, not comparable to the table.")
_RECORDINGS = typer.Option(help="Folder of recordings, for SCENARIO@recorded.")
_WORKERS = typer.Option(min=1, help="Runs at a time; default one for each core.")


@app.command(epilog="Example: fedstale suite run my_rule.py --scenario phones-v1 --quick")
@output.one_sentence()
def run(
    method: Annotated[str, _METHOD],
    scenario: Annotated[str, typer.Option(help="One of fedstale suite list.")] = "phones-v1",
    task: Annotated[str, typer.Option(help="What is trained.")] = "digits",
    data: Annotated[str, typer.Option(help="Its data, where it brings none.")] = "",
    quick: Annotated[bool, _QUICK] = False,
    out: Annotated[Path | None, _OUT] = None,
    recordings: Annotated[Path | None, _RECORDINGS] = None,
    workers: Annotated[int | None, _WORKERS] = None,
    as_json: output.AsJson = False,
) -> None:
    """Choose a method's rate on tuning seeds, and score it on test seeds.

    A method is Python of yours, and is imported. The same command goes on after an interrupt.
    """
    from fedstale.contrib.suite.judging import PAGE, judge

    ends = ["recorded"] * (recordings is not None) + ["quick"] * quick
    name = Path(method).name.removesuffix(".py")
    folder = out or Path("suites", name, "-".join([scenario, task, *ends]))
    options = {"task": task, "data": data, "quick": quick, "recordings": recordings}
    shown = {"workers": workers, "progress": False if as_json else None}
    free = output.stdout_kept_free() if as_json else nullcontext()
    with end_on_signals() as heard, free, output.goes_on_when_interrupted(heard):
        row = judge(method, scenario, folder, **options, **shown)  # type: ignore[arg-type]
    if as_json:
        output.say_json(folder, **row)
    else:
        typer.echo(f"{(folder / PAGE).read_text(encoding='utf-8')}\npage: {folder / PAGE}")


@app.command(name="list", epilog="Example: fedstale suite list")
def list_(as_json: output.AsJson = False) -> None:
    """List the scenarios, and how many standing methods each has."""
    from fedstale.contrib.suite import Setting, standing

    found = {name: one.table["about"] for name, one in Setting.all().items()}
    if as_json:
        output.say_json(None, scenarios=found)
    for name, about in found.items() if not as_json else ():
        typer.echo(f"{name:<12}{about}; {len(standing(name))} standing methods")
