"""`fedstale traces record` and `merge`: a device records itself, and recordings become a fleet.

Both are plain functions, to be mounted on the commands of traces. A recording is stopped by Ctrl-C,
by SIGTERM or when its time is over, and then becomes a trace; a recording that was killed is
finished, or continued, by the same command.
"""

import re
import signal
import threading
from datetime import datetime
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedstale.cli.output import (
    UNITS_S,
    AsJson,
    Out,
    Overwrite,
    amount,
    check_free,
    note,
    one_sentence,
    write,
)
from fedstale.errors import ConfigError, TraceError
from fedstale.interrupts import on_signals

if TYPE_CHECKING:
    from fedstale.traces.recording import AvailableWhen, RecordingRules, RecordingRun

_UNITS_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@one_sentence()
def record(
    out: Out,
    compute: Annotated[
        str,
        typer.Option(
            metavar="'N UNIT'|calibrate",
            help="Speed of this machine when it is idle: work units/s and what one is, in words, "
            "such as '40 images of digits'; or measured now, for two seconds.",
        ),
    ],
    every: Annotated[str, typer.Option(help="Time between readings, 1s to 60s.")] = "5s",
    duration: Annotated[
        str | None, typer.Option("--for", help="How long, such as 1h or 7d; else until Ctrl-C.")
    ] = None,
    available: Annotated[
        Literal["online", "charging", "recording"],
        typer.Option(help="When it can take a job: online; online and on mains; while recording."),
    ] = "online",
    network: Annotated[
        str | None,
        typer.Option(metavar="DOWN,UP", help="What its links carry, bit/s: 50M,10M; else unknown."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Name of this device; default the name of the file.")
    ] = None,
    max_bytes: Annotated[
        str, typer.Option(help="Space for the journal; its oldest hours are dropped.")
    ] = "64M",
    finish: Annotated[
        bool, typer.Option("--finish", help="Record no more; write what the journal holds.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Record this device's load, link and battery, and write them as a trace.

    Readings go to a journal beside the file, OUT.journal, from which a recording that was killed
    goes on. Links are not measured: traffic only shows what they carried.
    """
    from fedstale.traces.recording import journal as journals
    from fedstale.traces.recording import to_traces as recorded

    journal = out.with_name(out.name + ".journal")
    check_free(out, overwrite=overwrite, unless=journal)
    rules = _rules(compute, available, network)
    if not finish:
        seconds = amount("for", duration, UNITS_S) if duration else inf
        limit = int(amount("max-bytes", max_bytes, _UNITS_BYTES))
        offset = datetime.now().astimezone().utcoffset()
        about = journals.RecordingRun(
            device_id=device or out.stem,
            interval_s=amount("every", every, UNITS_S),
            utc_offset_s=offset.total_seconds() if offset else 0.0,
        )
        _record(journal, about, rules.available, duration_s=seconds, max_bytes=limit)
    readings, dropped = journals.read(journal)
    write(recorded.traces_of(readings, rules, dropped), out, as_json=as_json, private=True)
    rates = dict(zip(("downlink", "uplink"), recorded.highest_rates(readings), strict=True))
    seen = [f"{name} {rate:,.0f} bit/s" for name, rate in rates.items() if not isnan(rate)]
    if seen:
        note(f"highest traffic seen (links carry at least that): {', '.join(seen)}")
    if rules.link_bit_per_s is None:
        note("downlink and uplink are unknown; --network DOWN,UP states them")
    note(f"kept {journal}: the same command goes on from it; delete it when done")


@one_sentence()
def merge(
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RECORDING...", help="Files of distinct devices.")
    ],
    out: Out,
    align: Annotated[
        Literal["time-of-day", "time-of-week"],
        typer.Option(help="Lay recordings over each other by the hour of the day, or of the week."),
    ] = "time-of-day",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Join recordings of several devices, or fleets, to one file of what all of them know."""
    check_free(out, overwrite=overwrite)
    from fedstale.traces import TraceSet
    from fedstale.traces.merge import merged

    sets = {str(path): TraceSet.read(path, "native") for path in recordings}
    if len(sets) < len(recordings):
        raise TraceError("a file is given twice: expected distinct recordings")
    write(merged(sets, align=align), out, as_json=as_json, private=True)


def _record(
    journal: Path,
    about: "RecordingRun",
    available: "AvailableWhen",
    *,
    duration_s: float,
    max_bytes: int,
) -> None:
    """Add readings to a journal until the time is over or a signal comes."""
    from fedstale.traces.recording import (
        Journal,
        PsutilMonitor,
        check,
        check_readable,
        record,
        steady_clock,
    )

    length = {"interval_s": about.interval_s, "duration_s": duration_s}
    check(**length)
    # The rule would fail at the end of the recording; one reading tells now.
    check_readable(PsutilMonitor().read(), available)
    stop = threading.Event()
    # Ctrl-C and SIGTERM end a recording between readings.
    ended = on_signals(lambda number: stop.set(), signal.SIGINT, signal.SIGTERM)
    with Journal(journal, about, max_bytes=max_bytes) as opened, ended:
        every = f"{about.interval_s:g} s"
        note(f"recording {about.device_id} every {every} into {journal}; Ctrl-C ends")
        monitor = PsutilMonitor(steady=steady_clock)
        count = record(monitor, opened, wait=stop.wait, steady=steady_clock, **length)
    note(f"{count:,} readings")


def _rules(
    compute: str, available: Literal["online", "charging", "recording"], network: str | None
) -> "RecordingRules":
    from fedstale.traces.recording import RecordingRules, monitor

    links = None if network is None else link_rates(network)
    if compute == "calibrate":
        speed, unit = monitor.calibrate(), monitor.CALIBRATION_UNIT
        note(f"calibrated: {speed:,.1f} units/s, 1 unit = {unit}")
    elif (stated := stated_speed(compute)) is not None:
        speed, unit = stated
    else:
        raise ConfigError(
            f"compute = {compute!r}: expected work units/s and what one unit is, such as "
            "'40 images of digits', or calibrate"
        )
    return RecordingRules(available=available, speed=speed, compute_unit=unit, link_bit_per_s=links)


def stated_speed(text: str) -> tuple[float, str] | None:
    """Return work units/s and what one unit is, of an option that states them; else None.

    Example:
        >>> stated_speed("40 images of digits"), stated_speed("models.json")
        ((40.0, 'images of digits'), None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s+(\S.*?)\s*", text)
    return None if found is None else (float(found[1]), found[2])


def link_rates(capacity: str) -> tuple[float, float]:
    """Return the rates of a link in bit/s, down and up, of an option such as 50M,10M.

    Raises:
        ConfigError: it is no such pair.
    """
    rates = capacity.split(",")
    if len(rates) != 2:
        raise ConfigError(f"network = {capacity!r}: expected DOWN,UP in bit/s, as in 50M,10M")
    down, up = (amount("network", rate, _UNITS_BYTES) for rate in rates)
    return down, up
