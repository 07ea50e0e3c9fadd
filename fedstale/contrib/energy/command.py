"""`fedstale energy`: say where the energy of a run went, and how far that rests on assumptions."""

from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, note, one_sentence, say_json, table_text

app = typer.Typer()


@app.command(
    rich_help_panel="Analyse", epilog="Example: fedstale energy runs/phones --devices phone"
)
@one_sentence()
def energy(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a simulated run.")],
    devices: Annotated[
        str,
        typer.Option(
            metavar="CLASS|FILE.csv",
            help="What all devices are (phone, desktop, board), or a table with the columns "
            "device_id, class and perhaps region.",
        ),
    ],
    power: Annotated[
        Path | None, typer.Option(help="TOML with figures for classes of your own.")
    ] = None,
    intensity: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.csv|synthetic",
            help="Grams of CO2 equivalents a kWh: the columns time, g_per_kwh and perhaps region.",
        ),
    ] = None,
    region: Annotated[str | None, typer.Option(help="Of all devices.")] = None,
    epoch: Annotated[
        str | None, typer.Option(metavar="DATE", help="Of instant 0, where times are dates.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the energy of a run went, and its grams of CO2; the run's report shows it then.

    Energy is what jobs take above an idle device, from the plug, and that of the network; making
    devices and the server are left out.
    """
    from fedstale.contrib.energy.account import ACCOUNTS, accounts, keep
    from fedstale.contrib.energy.carbon import Intensity
    from fedstale.contrib.energy.power import Fleet, Power
    from fedstale.reports import Run

    over = Run(run)
    fleet = Fleet(devices, Power.read(power), region=region)
    known = None if intensity is None else Intensity.read(intensity, epoch=epoch)
    found = accounts(over, fleet, known)
    keep(over, found)
    if as_json:
        say_json(run / ACCOUNTS, **found.plain())
        return
    unit, joules = found.in_unit
    for name, table in ((unit, joules), ("g of CO2 equivalents", found.grams)):
        if table is not None:
            whole = table.assign(sum=table.sum(axis=1))
            whole.loc["sum"] = whole.sum()
            typer.echo(f"{name}\n{table_text(whole.map('{:,.4g}'.format))}\n")
    rows = found.assumptions.set_index(["class", "figure"])
    shown = rows[["value", "half", "double"]].assign(value=rows["value"].map("{:g}".format))
    for way in ("half", "double"):
        shown[way] = rows[way].map("{:+.1%}".format)
    typer.echo("Assumed, and by how much the sum of joules changes if a figure is half or double")
    typer.echo(f"{table_text(shown)}\n")
    for row in found.assumptions.itertuples(index=False):
        typer.echo(f"{row[1]} of {row[0]}: {row.source}")
    note(f"wrote {run / ACCOUNTS}: fedstale report {run} shows it")
