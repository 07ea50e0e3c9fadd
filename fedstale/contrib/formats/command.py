"""Commands that `fedstale traces` has besides its own: `unevenness` and `validate`."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, one_sentence, say_json
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
