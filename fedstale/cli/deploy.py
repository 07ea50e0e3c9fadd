"""`fedstale up` and `fedstale check`: a deployment on this machine, and what fails on others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, end_on_signals, one_sentence, say_json


def up(
    app: Annotated[
        str,
        typer.Argument(metavar="APP", help="Directory of a Flower app, or a built-in one."),
    ],
    nodes: Annotated[int, typer.Option("--nodes", "-n", help="Number of SuperNodes.")] = 2,
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides as in flwr run.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder for certificates, keys, state and logs; default runs/up-APP."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace an earlier deployment's folder.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Run although fedstale check finds faults.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not show the run's log.")
    ] = False,
    traces: Annotated[
        str | None,
        typer.Option(help="Let the nodes act devices of these traces: a file, or synthetic:N."),
    ] = None,
    speed_up: Annotated[float, typer.Option(help="Seconds of the trace in one real second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Draws the devices that are acted.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run an app on a SuperLink and SuperNodes that live on this machine for the time of the run.

    All are Flower's own processes, with TLS and node keys; for trying and small deployments.
    """
    with one_sentence():
        from fedstale.deployment.check import check_app
        from fedstale.deployment.local import LocalDeployment, run_app
        from fedstale.errors import ConfigError
        from fedstale.simulation.flower_app import FlowerApp

        found = FlowerApp.find(app)
        faults = [f.text for f in check_app(found.directory, run_config) if f.is_fault]
        if faults and not force:
            raise ConfigError("; ".join(faults) + "; to run anyway, pass --force")
        if speed_up != 1.0 and traces is None:
            raise ConfigError(f"speed-up = {speed_up:g}: expected --traces with it")
        config = None
        if traces is not None:
            from fedstale.deployment.replay import replay_app, replay_config

            if not 0 < speed_up < float("inf"):
                raise ConfigError(f"speed-up = {speed_up:g}: expected a number > 0, such as 20")
            config = replay_config(found, traces, nodes=nodes, run_config=run_config, seed=seed)
        folder = out or Path("runs") / f"up-{found.directory.name}"

        def say(line: str) -> None:
            typer.echo(f"fedstale: {line}", err=True)

        with (
            end_on_signals(),
            LocalDeployment(folder, nodes=nodes, overwrite=overwrite, say=say) as deployment,
        ):
            show = (lambda line: None) if quiet or as_json else typer.echo
            if config is None:
                run_id = run_app(deployment, found.directory, run_config=run_config, show=show)
                say(f"run {run_id} completed; logs are in {folder}")
                facts: dict[str, object] = {"run_id": run_id}
            else:
                run = replay_app(
                    deployment, config, speed_up=speed_up, run_config=run_config, show=show
                )
                say(f"the replay completed; its run is in {run}, logs are in {folder}")
                facts = {"run": str(run)}
        if as_json:
            say_json(folder, **facts)


def check(
    app: Annotated[
        str,
        typer.Argument(metavar="APP", help="Directory of a Flower app, or a built-in one."),
    ],
    superlink: Annotated[
        str | None,
        typer.Argument(help="Name of a SuperLink in Flower's config.toml, to be reached too."),
    ] = None,
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides that the run will have.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what would go wrong before an app goes out to devices.

    Packages are looked for here: run it in an environment like that of the devices.
    """
    with one_sentence():
        from fedstale.deployment.check import check_app, check_superlink
        from fedstale.simulation.flower_app import FlowerApp

        found = FlowerApp.find(app)
        findings = check_app(found.directory, run_config)
        if superlink is not None:
            findings += check_superlink(superlink)
    if as_json:
        typer.echo(json.dumps([{"fault": f.is_fault, "text": f.text} for f in findings]))
    else:
        for finding in findings:
            typer.echo(f"{'fault' if finding.is_fault else 'note'}: {finding.text}")
        if not findings:
            typer.echo(f"{found.name}: nothing found that would go wrong")
    if any(finding.is_fault for finding in findings):
        raise typer.Exit(1)
