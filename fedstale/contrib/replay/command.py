"""`fedstale replay`: run an app on nodes of this machine that act the devices of a trace."""

from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import App, AsJson, deployed, note, one_sentence, say_json
from fedstale.errors import ConfigError

app = typer.Typer()


@app.command(
    rich_help_panel="Deploy",
    epilog="Example: fedstale replay digits --traces phones.parquet --nodes 4 --speed-up 20",
)
@one_sentence()
def replay(
    app: App,
    traces: Annotated[
        str,
        typer.Option(help="Whose devices the nodes act: a file, synthetic:N@FLEET, or ideal:N."),
    ],
    nodes: Annotated[int, typer.Option("--nodes", "-n", help="Number of SuperNodes.")] = 2,
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides as in flwr run.")
    ] = "",
    speed_up: Annotated[float, typer.Option(help="Seconds of the trace in one real second.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Of the app, and of the draw of the devices that are acted.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="New folder, as of fedstale up; default runs/replay-APP."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier deployment's folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an app on SuperNodes of this machine that act the devices of a trace in real time."""
    from fedstale.contrib.replay import replay_config, write_replayed
    from fedstale.deployment import run_app
    from fedstale.simulation import FlowerApp

    found = FlowerApp.find(app)
    if not 0 < speed_up < float("inf"):
        raise ConfigError(f"speed-up = {speed_up:g}: expected a number > 0, such as 20")
    config = replay_config(found, traces, nodes=nodes, run_config=run_config, seed=seed)
    folder = out or Path("runs") / f"replay-{found.directory.name}"
    with deployed(found, folder, nodes, run_config, overwrite=overwrite) as deployment:
        copy, run = deployment.folder / "app", deployment.folder / "run"
        acting = list(deployment.node_ids.values())
        write_replayed(config, copy, speed_up=speed_up, nodes=acting, run=run)
        show = (lambda line: None) if as_json else typer.echo
        run_app(deployment, copy, run_config=run_config, show=show)
        note(f"fedstale: the replay completed; its run is in {run}, logs are in {folder}")
    if as_json:
        say_json(folder, run=str(run))
