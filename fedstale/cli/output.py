"""The part that commands share: options, output and exit codes.

What is wrong is one sentence on stderr with exit code 2, and no traceback.
"""

import copy
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from fedstale.errors import ConfigError, FedstaleError, TraceError, not_installed
from fedstale.interrupts import end_on_signals, exit_code

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedstale.deployment import LocalDeployment
    from fedstale.simulation import FlowerApp
    from fedstale.traces import TraceSet


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

ADVANCED = "Advanced options"
"""Panel of the help for what few need."""


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn the errors that a user can mend into one sentence and exit code 2."""
    try:
        yield
    except FedstaleError as problem:
        note(f"fedstale: {problem}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as problem:
        needed = not_installed(problem)
        if needed is None:
            raise
        note(f"fedstale: this {needed}")
        raise typer.Exit(2) from None


App = Annotated[
    str, typer.Argument(metavar="APP", help="Directory of a Flower app, or a built-in one.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Native file to write, NAME.parquet.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the file if there is one.", rich_help_panel=ADVANCED),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON.", rich_help_panel=ADVANCED),
]


def check_free(out: Path, *, overwrite: bool, unless: Path | None = None) -> None:
    """Reject at once what would fail only after the work.

    Args:
        out: the file to be written.
        overwrite: whether an existing file may be replaced.
        unless: what makes an existing file ours to continue, such as its journal.

    Raises:
        TraceError: the file cannot be written there.
    """
    if not out.parent.is_dir():
        raise TraceError(f"{out}: the folder {out.parent} does not exist; make it first")
    if out.is_dir():
        raise TraceError(f"{out}: is a folder, expected the name of a file")
    is_ours = unless is not None and unless.exists()
    if out.exists() and not overwrite and not is_ours:
        raise TraceError(f"{out}: exists already; choose another name, or pass --overwrite")


def amount(option: str, text: str, units: Mapping[str, float]) -> float:
    """Parse the value of an option with a unit, such as 24h.

    Raises:
        ConfigError: it is no number with one of the units.

    Example:
        >>> amount("valid", "24h", UNITS_S)
        86400.0
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2] not in units:
        accepted = ", ".join(f"N{unit}" for unit in units)
        raise ConfigError(f"{option} = {text!r}: expected one of {accepted}")
    return float(found[1]) * units[found[2]]


def write(
    traces: "TraceSet",
    out: Path | None,
    *,
    as_json: bool,
    private: bool = False,
    told: Mapping[str, str] | None = None,
) -> None:
    """Write a native file, and say what was repaired or dropped.

    Args:
        traces: of devices.
        out: the file; None writes nothing.
        as_json: whether to print the result as JSON.
        private: whether only its owner may read the file.
        told: how the traces were read, for JSON.
    """
    if out is not None:
        traces.write(out, private=private)
    done = "nothing written" if out is None else f"wrote {out}"
    first = f"{done}: {traces.n_devices:,} devices, {', '.join(traces.known)}"
    note("\n".join([first, *(f"  {n:,} {kind}" for kind, n in traces.repairs.items())]))
    if as_json:
        made = {"devices": traces.n_devices, "channels": list(traces.known)}
        understood = {"understood": dict(told)} if told else {}
        say_json(out, **made, repairs=dict(traces.repairs), **understood)


def say(line: str, out: Path, *, as_json: bool, **facts: object) -> None:
    """Print what was made in a line, or as JSON."""
    if as_json:
        say_json(out, **facts)
    else:
        typer.echo(line)


def say_json(out: Path | None, **facts: object) -> None:
    """Print a result and its folder as one JSON object; null if nothing was kept."""
    typer.echo(json.dumps({"out": None if out is None else str(out), **facts}))


def table_text(table: "DataFrame") -> str:
    """Return a table for a terminal; a dash is what has no value."""
    return table.to_string(float_format="{:.3f}".format, na_rep="-", index_names=False)


def note(text: str) -> None:
    """Print what is no result, on stderr."""
    typer.echo(text, err=True)


@contextmanager
def deployed(
    app: "FlowerApp", folder: Path, nodes: int, run_config: str, *, overwrite: bool
) -> Iterator["LocalDeployment"]:
    """Deploy on this machine for an app that has no faults on devices, and say each step.

    Raises:
        ConfigError: the app has faults.
    """
    from fedstale.deployment import LocalDeployment, check_app

    faults = [finding.text for finding in check_app(app, run_config) if finding.is_fault]
    if faults:
        raise ConfigError("; ".join(faults))
    with (
        end_on_signals(),
        LocalDeployment(folder, nodes=nodes, overwrite=overwrite, say=_say) as deployment,
    ):
        yield deployment


def _say(line: str) -> None:
    note(f"fedstale: {line}")


@contextmanager
def goes_on_when_interrupted(heard: Callable[[], str]) -> Iterator[None]:
    """End with the code of an interrupt, and say that the same command goes on.

    Args:
        heard: which signal came, as `end_on_signals` yields it.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        note(f"fedstale: {str(stop) or 'interrupted'}; the same command goes on")
        raise typer.Exit(exit_code(heard())) from None


def end_with_failures(failures: Sequence[tuple[str, int, str]], of: str) -> None:
    """End with code 1 if runs failed, and say why the first did.

    Args:
        failures: variant, seed and reason of each.
        of: what they are of, such as "the runs".
    """
    if failures:
        variant, seed, reason = failures[0]
        note(
            f"fedstale: {len(failures)} of {of} failed; the first: {variant}, seed {seed}: {reason}"
        )
        raise typer.Exit(1)


Step = Callable[[str, int, int], None]
"""Called with what comes next, how many parts of the work are done, and how many there are."""


@contextmanager
def steps(*, is_shown: bool) -> Iterator[Step]:
    """Show on a terminal, in a line, how far long work is.

    Args:
        is_shown: whether to show anything.

    Yields:
        What is to be told before each part of the work.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda what, done, total: None
        return
    from fedstale.live import progress_line

    with progress_line(progress=True) as say:

        def step(what: str, done: int, total: int) -> None:
            assert say is not None
            say(f"{done / total:.0%} done, {what}")

        yield step


class _Stderr:
    """What stderr is at the moment of writing: a progress line puts its own in the place."""

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr, name)


@contextmanager
def app_log() -> Iterator[None]:
    """Show on stderr the warnings and errors that an app logs.

    The folder of a run has its whole log. What the app prints and logs by itself is left alone:
    whatever handlers it configures get its own lines, but neither Flower's nor ours, which have one
    already.
    """
    from fedstale.flower import command_line

    stream, is_terminal = cast("TextIO", _Stderr()), sys.stderr.isatty()
    flower, ours = logging.getLogger("flwr"), logging.getLogger("fedstale")
    shows = command_line.console()
    shown_before = shows.level, shows.stream, getattr(shows, "colored", None)
    shows.colored, shows.stream = is_terminal, stream
    own = copy.copy(shows)
    loggers, handlers = [flower, ours], [shows, own]
    before = [(one.level, one.propagate) for one in loggers]
    ours.addHandler(own)
    for one, handler in zip(loggers, handlers, strict=True):
        one.propagate = False
        handler.setLevel(logging.WARNING)
        # A line for each job is made only for who sees it.
        one.setLevel(logging.INFO)
    try:
        yield
    finally:
        for shown in handlers:
            shown.flush()
        ours.removeHandler(own)
        shows.level, shows.stream, shows.colored = shown_before
        for one, (level, propagates) in zip(loggers, before, strict=True):
            one.setLevel(level)
            one.propagate = propagates


@contextmanager
def stdout_kept_free() -> Iterator[None]:
    """Redirect to stderr whatever is printed inside, here or in processes started here."""
    kept = None
    with suppress(OSError):
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(cast("TextIO", _Stderr())):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
