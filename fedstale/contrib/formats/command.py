"""Commands that `fedstale traces` has besides its own: `unevenness`, `validate` and `export`."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, Overwrite, check_free, note, one_sentence, say, say_json
from fedstale.errors import TraceError

app = typer.Typer()
_Traces = Annotated[
    str, typer.Argument(metavar="PATH|synthetic:N[@FLEET]", help="Of which devices.")
]
_Seed = Annotated[int, typer.Option(min=0, help="Seeds everything that is random.")]


@app.command(epilog="Example: fedstale traces unevenness synthetic:100 --model-bytes 1400000")
@one_sentence()
def unevenness(
    traces: _Traces,
    model_bytes: Annotated[int, typer.Option(min=0, help="Sent each way.")] = 343_200_776,
    deadline: Annotated[int, typer.Option(min=10, help="End of a round of -R, s.")] = 120,
    seed: _Seed = 42,
    as_json: AsJson = False,
) -> None:
    """Measure how uneven devices are: Gini coefficients, and measures of FLASH and FLHetBench."""
    from fedstale.contrib.formats.measures import unevenness as measured
    from fedstale.traces import TraceSet

    devices = TraceSet.load(traces, seed=seed)
    found = measured(devices, model_bytes=model_bytes, deadline_s=deadline, seed=seed)
    if as_json:
        # JSON has neither inf nor NaN.
        say_json(None, **{name: x if abs(x) < float("inf") else None for name, x in found.items()})
        return
    for name, value in found.items():
        typer.echo(f"{value:10.3f}  {name}")


@app.command(epilog="Example: fedstale traces validate phones.parquet")
@one_sentence()
def validate(
    file: Annotated[Path, typer.Argument(help="Native file.")], as_json: AsJson = False
) -> None:
    """Say all that breaks the format of a native file, in a sentence each; exit code 1 then."""
    from fedstale.contrib.formats.validation import faults

    if not file.is_file():
        raise TraceError(f"{file}: no such file")
    found = faults(file)
    shown = list(islice(found, 20))
    n = len(shown) + sum(1 for _ in found)
    if as_json:
        say_json(None, n_faults=n, faults=shown)
    else:
        more = [f"and {n - len(shown)} more"] if n > len(shown) else []
        typer.echo("\n".join([f"{file}: {n} faults", *shown, *more]))
    if n:
        raise typer.Exit(1)


@app.command(epilog="Example: fedstale traces export phones.parquet --to flash --out phones.json")
@one_sentence()
def export(
    traces: _Traces,
    to: Annotated[
        str, typer.Option(help="appfl, fedscale-behaviour, fedscale-capacity, flash, flgo.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    seed: _Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write devices in the format of another platform; say what it keeps and what is lost."""
    from fedstale.contrib.formats.exports import export as exported
    from fedstale.traces import TraceSet

    check_free(out, overwrite=overwrite)
    devices = TraceSet.load(traces, seed=seed)
    kept, lost = exported(devices, to, out)
    note(f"kept: {kept}\nlost: {lost}")
    say(f"wrote {out}: {devices.n_devices:,} devices", out, as_json=as_json, kept=kept, lost=lost)
