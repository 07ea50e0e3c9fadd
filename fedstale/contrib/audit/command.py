"""`fedstale audit`: hold devices to what they state of themselves, and a server to its record."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import AsJson, note, one_sentence, table_text
from fedstale.errors import ConfigError

if TYPE_CHECKING:
    from fedstale.strategies.selection import Selector

app = typer.Typer()

_ROWS = 20
_NOT_MADE_AGAIN = 3


@app.command(
    rich_help_panel="Analyse", epilog="Example: fedstale audit runs/digits --fail-on-alarm"
)
@one_sentence()
def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs of one app, simulated or deployed."),
    ],
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help="End with exit code 1 if there is an alarm.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check the audit record that a run with AuditRecord() has written, and make each "
            "of its picks again. Exit code 1: it does not hold; 3: it holds, and picks could not "
            "be made again. Several folders are parts of one run, in their order.",
        ),
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Of the last line, as it was published; for --verify."),
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(help="Of the head, by the server's key; for --verify.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="The server's public key, or its certificate.")
    ] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS", help="Selector of your own that the run used; for --verify."
        ),
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option(help="Folder of the agent that the run used, if it is not fedstale's own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which devices' stated chances and durations do not hold.

    An alarm is false for at most 1 of 1,000 honest devices, however often one looks. Nobody is
    excluded: an honest forecaster may be miscalibrated.
    """
    from fedstale.contrib.audit import audited

    if verify:
        if fail_on_alarm:
            raise ConfigError(
                "--fail-on-alarm beside --verify: a record has no alarms; leave it out"
            )
        _verify(runs, head, signature, key, selector or [], agent, as_json=as_json)
        return
    _refuse_others(head=head, signature=signature, key=key, selector=selector, agent=agent)
    found = audited(runs)
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


def _verify(
    runs: list[Path],
    head: str | None,
    signature: Path | None,
    key: Path | None,
    selectors: list[str],
    agent: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print what came of verifying a record, and exit with a code that says it."""
    from fedstale.contrib.audit import verify

    found = verify(
        runs,
        head=head,
        signature=signature,
        key=key,
        selectors=[_selector(name) for name in selectors],
        agent=agent,
    )
    if as_json:
        typer.echo(json.dumps({"holds": found.holds, "verdict": found.verdict, **asdict(found)}))
    else:
        for text in (*found.faults, *found.notes, found.verdict):
            typer.echo(text)
        if found.head:
            typer.echo(f"head {found.head}")
    if not found.holds:
        raise typer.Exit(1)
    if found.why_not:
        raise typer.Exit(_NOT_MADE_AGAIN)


def _selector(name: str) -> "type[Selector]":
    """Import a selector that whoever verifies names; a record's own words import nothing."""
    from fedstale.strategies.selection import Selector

    module, _, kind = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(f"selector = {name!r} cannot be imported: {problem}") from None
    finally:
        sys.path.remove("")
    if not isinstance(found, type) or not issubclass(found, Selector):
        raise ConfigError(f"selector = {name!r}: expected a subclass of Selector")
    return found


def _refuse_others(**options: object) -> None:
    """Refuse options that mean nothing without --verify."""
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)}: expected beside --verify")
