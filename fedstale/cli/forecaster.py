"""`fedstale forecaster`: train forecasters, and test them.

Both commands split the traces by device and by time from the same seed, so nothing is ever tested
on a device or an hour that it learnt from.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import UNITS_S, AsJson, amount, one_sentence, say, steps, table_text
from fedstale.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from fedstale.traces import TraceSet


Traces = Annotated[
    str, typer.Option("--traces", metavar="PATH|synthetic:N[@FLEET]", help="Device traces.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the split and of everything random.")]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Tables = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for the tables."),
]


app = typer.Typer(help="Train forecasters on traces, and test them.", no_args_is_help=True)


@app.command(
    epilog="Example: fedstale forecaster train --traces phones.parquet --out forecasters/phones"
)
@one_sentence()
def train(
    traces: Traces,
    out: Folder,
    kind: Annotated[str, typer.Option(help="What to train; see `backtest`.")] = "lstm",
    examples: Annotated[int, typer.Option(min=100, help="Number of examples.")] = 40_000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a forecaster on traces; writes forecaster.toml and forecaster.safetensors."""
    from fedstale.traces.forecast import LSTM, draw_parts, forecaster_class
    from fedstale.traces.forecast.backtest import no_better

    forecaster = forecaster_class(kind)()
    if (out / "forecaster.toml").exists():
        raise ConfigError(f"{out}: holds a forecaster; expected a new folder")
    if isinstance(forecaster, LSTM):
        # Where torch is missing, that is said before the work.
        import fedstale.traces.forecast.lstm_training  # noqa: F401
    devices = recorded(traces, seed=seed)
    with steps(is_shown=not as_json) as step:
        step("drawing examples", 0, 3)
        parts = draw_parts(devices, n=examples, seed=seed)
        step(f"fitting {kind}", 1, 3)
        forecaster.fit(*parts, seed=seed)
        step("validation", 2, 3)
        advice = no_better(forecaster, *parts, seed=seed)
    provenance = {
        "traces": Path(traces).name,
        "devices": devices.n_devices,
        "examples": examples,
        "seed": seed,
    }
    forecaster.save(out, provenance)
    text = f"forecaster: {out}" + f"\n{advice}" * bool(advice)
    say(text, out, as_json=as_json, kind=kind, advice=advice, **provenance)


@app.command(epilog="Example: fedstale forecaster backtest --traces phones.parquet lstm last-value")
@one_sentence()
def backtest(
    traces: Traces,
    forecasters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND|FOLDER|embedded[:FLEET]]...",
            help="Kinds to fit and test, and trained forecasters; default last-value.",
        ),
    ] = None,
    all_devices: Annotated[
        bool,
        typer.Option(
            "--all-devices",
            help="Test on every device, in the later hours: no trained forecaster learnt from any; "
            "what is fitted here learns from most of them, in the hours before.",
        ),
    ] = False,
    out: Tables = None,
    step: Annotated[str, typer.Option(help="Time between origins, such as 15m.")] = "15m",
    examples: Annotated[int, typer.Option(min=100, help="Examples to fit on.")] = 40_000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Test forecasters at rolling origins, on devices and hours that they did not learn from."""
    from fedstale.traces.forecast.backtest import backtested, verdict

    step_s = amount("step", step, UNITS_S)
    if step_s < 1.0:
        raise ConfigError(f"step = {step!r}: expected at least 1s")
    with steps(is_shown=not as_json) as begin:
        table = backtested(
            recorded(traces, seed=seed),
            forecasters or ["last-value"],
            step_s=step_s,
            examples=examples,
            seed=seed,
            all_devices=all_devices,
            watch=begin,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / "verdict.csv", index=False)
    if as_json:
        # pandas writes NaN as null; the standard library would write NaN, which is not JSON.
        typer.echo(f'{{"verdict": {table.to_json(orient="records")}}}')
    else:
        typer.echo(verdict(table))
        if len(table):
            shown = table_text(table.set_index("forecaster").drop(columns="against"))
            typer.echo(f"\nShare of {table['against'][0]}'s loss; less is better\n\n{shown}")


def recorded(spec: str, *, seed: int) -> "TraceSet":
    """Return devices that take time: of others there is nothing to learn or to forecast."""
    from fedstale.traces import TraceSet

    traces = TraceSet.load(spec, seed=seed)
    if traces.is_ideal:
        raise TraceError(
            f"traces = {spec!r}: devices that take no time have nothing to forecast or to choose "
            "by; expected a recording or synthetic:N"
        )
    return traces
