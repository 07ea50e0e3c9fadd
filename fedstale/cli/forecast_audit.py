"""`fedstale audit`: whether devices keep what they state of themselves."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, note, one_sentence, table_text

_ROWS = 20


@one_sentence()
def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs of one app, simulated or deployed."),
    ],
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help="End with exit code 1 if there is an alarm.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which devices' stated chances and durations do not hold.

    An alarm is false for at most 1 of 1,000 honest devices, however often one looks. Nobody is
    excluded: an honest forecaster may be miscalibrated.
    """
    from fedstale import api

    found = api.audit(runs)
    devices = found.devices
    if as_json:
        # In JSON there is no NaN.
        rows = json.loads(devices.to_json(orient="records", double_precision=15))
        texts = {"runs": found.runs, "verdict": found.verdict, "notes": found.notes}
        typer.echo(json.dumps({**texts, "alarms": len(found.alarms), "devices": rows}))
    else:
        columns = ["device_id", "tested", "stated", "kept", "brier", "log_score", "skill_own"]
        columns += ["skill_fleet", "crps_s", "e_value", "direction", "last_p"]
        shown = devices.loc[devices["tested"] > 0, columns].head(_ROWS)
        shown["e_value"] = shown["e_value"].map("{:.3g}".format)
        typer.echo(table_text(shown.set_index("device_id")))
        for text in (found.verdict, *found.notes):
            typer.echo(text)
        if (left := int((devices["tested"] > 0).sum()) - len(shown)) > 0:
            note(f"{left:,} devices with smaller e-values are not shown; --json has all")
    if fail_on_alarm and len(found.alarms):
        raise typer.Exit(1)
