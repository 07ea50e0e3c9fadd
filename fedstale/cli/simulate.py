"""`fedstale simulate`: a Flower app on replayed devices."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedstale.cli.output import end_on_signals, one_sentence, say_json
from fedstale.config import ExecutorKind

_WORDS = {"failed": "failed", "stuck": "got stuck", "interrupted": "was interrupted"}


def simulate(
    app_: Annotated[
        str,
        typer.Argument(
            metavar="[APP]",
            help="Directory of a Flower app, name of a built-in one (digits, shakespeare), or the "
            "config.toml of an earlier run.",
            show_default=False,
        ),
    ] = "",
    traces: Annotated[
        str, typer.Option(help="File of device traces, or synthetic:N.")
    ] = "synthetic:100",
    devices: Annotated[
        int | None, typer.Option(help="Enrol only this many, drawn at random.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds everything that is random.")] = 0,
    until: Annotated[
        str | None,
        typer.Option(help="End at 2d (virtual time), '100 rounds', or 'accuracy 0.9'."),
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Overrides as in flwr run: 'key=1 name=\"x\"'."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/APP-SEED.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the folder.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder, which was interrupted or killed."),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Model versions from one checkpoint to the next; 0 for none.")
    ] = 1,
    on_interrupt: Annotated[
        Literal["abort", "pause"],
        typer.Option(help="A device that goes offline loses its work, or goes on later."),
    ] = "abort",
    after_end: Annotated[
        Literal["repeat", "stop"], typer.Option(help="What follows the end of a trace.")
    ] = "repeat",
    executor: Annotated[
        ExecutorKind,
        typer.Option(help="What trains clients; auto measures. Only batched rounds otherwise."),
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="Processes that train clients; 1 for none but this.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs of each Ray actor, such as 0.25 for four on one.")
    ] = None,
    work_per_example: Annotated[
        float | None, typer.Option(help="Work units to train one example once.")
    ] = None,
    evaluate_work_per_example: Annotated[
        float | None, typer.Option(help="Work units to evaluate one example.")
    ] = None,
    epochs: Annotated[
        str | None, typer.Option(help="Passes over a client's data, or a run-config key.")
    ] = None,
    examples: Annotated[
        float | None, typer.Option(help="Examples of a client until its first reply states them.")
    ] = None,
    model_bytes: Annotated[
        int | None, typer.Option(help="Size of the model, to stand for a bigger one.")
    ] = None,
    overhead: Annotated[
        Literal["none", "flower"],
        typer.Option(help="What every message takes besides: nothing, or what Flower needs."),
    ] = "none",
    live: Annotated[
        bool, typer.Option("--live", help="Serve a page that shows the run while it goes on.")
    ] = False,
    live_at: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Where; default 8760, this machine alone."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write scalars for TensorBoard into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Flower's log.")] = False,
) -> None:
    """Run a Flower app on replayed devices, and see which devices trained, and which lost work."""
    with one_sentence():
        from fedstale.config import SimulationConfig
        from fedstale.errors import ConfigError

        if (resume is None) == (not app_):
            raise ConfigError("expected an APP to simulate, or --resume RUN to go on with a run")
        if resume is not None:
            config, out = SimulationConfig.read(resume / "config.toml"), resume
        elif app_.endswith(".toml"):
            config = SimulationConfig.read(Path(app_))
        else:
            costs = {
                "work-per-example": work_per_example,
                "evaluate-work-per-example": evaluate_work_per_example,
                "epochs": int(epochs) if epochs is not None and epochs.isdecimal() else epochs,
                "examples": examples,
                "model-bytes": model_bytes,
            }
            if overhead == "flower":
                from fedstale.simulation.costs import FLOWER_OVERHEAD

                costs |= FLOWER_OVERHEAD
            config = SimulationConfig(
                app=app_,
                traces=traces,
                devices=devices,
                seed=seed,
                until=until,
                on_interrupt=on_interrupt,
                after_end=after_end,
                executor=executor,
                workers=workers,
                gpus=gpus,
                checkpoint_every=checkpoint_every,
                run_config=_parsed(run_config),
                costs={k: v for k, v in costs.items() if v is not None},
            )
        name = Path(config.app).resolve().name if Path(config.app).is_dir() else config.app
        out = out or Path("runs") / f"{name}-{config.seed}"
        from fedstale.cli import display
        from fedstale.simulation.run import simulate as simulate_config
        from fedstale.traces import TraceSet

        # Flower sets this level when it is imported, which the imports above have done.
        logging.getLogger("flwr").setLevel(logging.INFO if verbose else logging.ERROR)
        logging.basicConfig(level=logging.DEBUG if verbose else logging.ERROR)
        trace_set = TraceSet.load(config.traces, seed=config.seed)
        shown = sys.stderr.isatty() and not (quiet or as_json)
        with (
            end_on_signals(),
            display.watching(
                config,
                shown=shown,
                live_at=live_at or ("8760" if live else None),
                tensorboard=tensorboard,
            ) as callbacks,
        ):
            run = simulate_config(
                config,
                out,
                traces=trace_set,
                overwrite=overwrite,
                resume=resume is not None,
                callbacks=callbacks,
            )
    if as_json:
        say_json(run.folder, **run.summary)
    else:
        display.table(run)
    if run.status in _WORDS:
        typer.echo(f"fedstale: the run {_WORDS[run.status]}: {run.reason}", err=True)
        raise typer.Exit(1)


def _parsed(run_config: list[str] | None) -> dict[str, Any]:
    """Return overrides of a run config, read as Flower reads them."""
    import click
    from flwr.common.config import parse_config_args

    from fedstale.errors import ConfigError

    try:
        overrides = parse_config_args(run_config)
    except (click.ClickException, ValueError, OSError) as problem:
        raise ConfigError(f"run-config = {run_config}: {problem}") from None
    if any(text.strip() for text in run_config or ()) and not overrides:
        raise ConfigError(f"run-config = {run_config}: expected 'key=value' pairs or a .toml file")
    return overrides
