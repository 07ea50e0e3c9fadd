"""`fedstale train-forecaster` and `fedstale backtest`: learn from traces, and score forecasts.

Both split the traces by device and by time from the same seed, so a forecaster is never tested on a
device or an hour that it learnt from.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import AsJson, one_sentence, say_json
from fedstale.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.traces import TraceSet

_Traces = Annotated[
    str, typer.Option("--traces", metavar="PATH|synthetic:N", help="Device traces.")
]
_Seed = Annotated[int, typer.Option(min=0, help="Of the split, of examples and of weights.")]
_Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]


def train_forecaster(
    traces: _Traces,
    out: _Out,
    kind: Annotated[str, typer.Option(help="What to train; see `backtest`.")] = "lstm",
    stop_on: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Other traces to stop early on, instead of a fifth."),
    ] = None,
    examples: Annotated[int, typer.Option(min=100, help="Number of examples.")] = 40_000,
    seed: _Seed = 0,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted training was.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no epochs.")] = False,
) -> None:
    """Train a forecaster on traces; writes forecaster.toml and forecaster.safetensors."""
    with one_sentence():
        from fedstale.traces.forecast import LSTM, forecaster_class
        from fedstale.traces.forecast.dataset import draw_parts

        forecaster = forecaster_class(kind)()
        if forecaster.reads_the_future:
            raise ConfigError(f"kind = {kind!r}: reads the future and learns nothing")
        if not forecaster.can_be_saved:
            raise ConfigError(f"kind = {kind!r}: only compared with others, by `fedstale backtest`")
        if not resume and (out / "forecaster.toml").exists():
            raise ConfigError(f"{out}: holds a forecaster; expected a new folder, or --resume")
        devices = _load(traces, seed)
        other = None if stop_on is None else _load(stop_on, seed)
        training, held_out = draw_parts(devices, other, n=examples, seed=seed)
        if isinstance(forecaster, LSTM):
            if not resume:
                (out / "training.safetensors").unlink(missing_ok=True)
            forecaster.fit(
                training,
                held_out,
                seed=seed,
                progress=None if quiet else _epoch,
                checkpoint=str(out),
            )
        else:
            forecaster.fit(training, held_out, seed=seed)
        provenance = {
            "traces": Path(traces).name,
            "stop_on": "" if stop_on is None else Path(stop_on).name,
            "devices": devices.n_devices,
            "examples": examples,
            "seed": seed,
        }
        forecaster.save(out, provenance)
        (out / "training.safetensors").unlink(missing_ok=True)
        if as_json:
            say_json(out, kind=kind, **provenance)
        else:
            typer.echo(f"forecaster: {out}")


def backtest(
    traces: _Traces,
    forecasters: Annotated[
        str, typer.Option(help="Kinds to fit and test, with commas between.")
    ] = "last-value,ewma,hourly-markov,oracle",
    trained: Annotated[
        list[Path] | None, typer.Option(help="Folder of a trained forecaster; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the tables and backtest.html.")
    ] = None,
    work: Annotated[float, typer.Option(min=0.0, help="Work of the job, in units.")] = 300.0,
    download_bytes: Annotated[int, typer.Option(min=0, help="Size of the model.")] = 5_000_000,
    upload_bytes: Annotated[int, typer.Option(min=0, help="Size of the update.")] = 5_000_000,
    deadline_s: Annotated[float, typer.Option(help="Time for the job, in s.")] = 1800.0,
    step_s: Annotated[float, typer.Option(min=1.0, help="Time between origins, in s.")] = 900.0,
    k: Annotated[int, typer.Option(min=1, help="Devices picked in a round.")] = 10,
    examples: Annotated[int, typer.Option(min=100, help="Examples to fit on.")] = 40_000,
    seed: _Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Test forecasters at rolling origins, on devices and hours that they did not learn from."""
    with one_sentence():
        from fedstale.reports.backtest import write_backtest
        from fedstale.traces import Job
        from fedstale.traces.forecast.evaluation import SHOWN, backtested

        job = Job(
            work=work, download_bytes=download_bytes, upload_bytes=upload_bytes, ttl_s=deadline_s
        )
        tables = backtested(
            _load(traces, seed),
            [name for name in forecasters.split(",") if name],
            trained or [],
            job,
            step_s=step_s,
            k=k,
            examples=examples,
            seed=seed,
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for name, table in tables.items():
                table.to_csv(out / f"{name}.csv", index=False)
            write_backtest(
                tables,
                out,
                f"{Path(traces).name}, seed {seed}: devices and hours that no forecaster learnt "
                f"from. The job: {work:g} work units, {download_bytes:,} bytes down, "
                f"{upload_bytes:,} bytes up, a deadline of {deadline_s:g} s.",
            )
        if as_json:
            # pandas writes NaN as null; the standard library would write NaN, which is not JSON.
            parts = (f"{json.dumps(n)}: {t.to_json(orient='records')}" for n, t in tables.items())
            typer.echo("{" + ", ".join(parts) + "}")
        else:
            for name, table in tables.items():
                if name in SHOWN:
                    _show(name, table)


def _show(name: str, table: "pd.DataFrame") -> None:
    from fedstale.traces.forecast.evaluation import SHOWN, wide

    typer.echo(f"\n{SHOWN[name]}\n")
    typer.echo(wide(name, table).to_string(float_format=lambda x: f"{x:.3f}"))


def _load(word: str, seed: int) -> "TraceSet":
    from fedstale.traces import TraceSet

    return TraceSet.load(word, seed=seed)


def _epoch(epoch: int, loss: float, held_out: float) -> None:
    typer.echo(f"epoch {epoch:3d}  loss {loss:.4f}  held out {held_out:.4f}", err=True)
