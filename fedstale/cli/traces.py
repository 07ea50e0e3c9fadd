"""`fedstale traces`: look at recordings, convert, compose and download them."""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    say,
    steps,
    write,
)
from fedstale.cli.record import link_rates, merge, record, stated_speed
from fedstale.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedstale.traces import Series, TraceSet

_MOST_DEVICES = 2000
_SAMPLES = 96


app = typer.Typer(
    name="traces",
    help="List device traces, look at them, convert, compose and download them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Seed = Annotated[int, typer.Option(min=0, help="Seeds everything that is random.")]
_Compute = Annotated[
    str,
    typer.Option(
        metavar="PATH|'N UNIT'",
        help="Recording of how fast devices are; or the work units/s of every idle device, and "
        "what one is, such as '40 images of digits'.",
    ),
]
_NETWORK = "Recording of links; or what every link carries, constant, bit/s, such as 100M,100M"


@app.command(epilog="Examples: fedstale traces describe phones.json  |  synthetic:1000 --json")
@one_sentence()
def describe(
    traces: Annotated[
        str, typer.Argument(metavar="PATH|synthetic:N[@FLEET]|ideal:N", help="What to look at.")
    ],
    seed: _Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Describe traces: devices, repairs, hours online, speeds and links."""
    from fedstale.traces import TraceSet
    from fedstale.traces.synthetic import availability_marginal

    devices = TraceSet.load(traces, seed=seed)
    online: dict[str, Any] = {}
    if devices.availability is not None:
        online = availability_marginal(devices.availability, epoch_s=devices.midnight_s or 0.0)
    table = _quantiles(devices, online)
    if as_json:
        facts: dict[str, Any] = {
            "n_devices": devices.n_devices,
            "known": devices.known,
            "epoch": devices.epoch,
            "compute_unit": devices.compute_unit,
            "repairs": devices.repairs,
            **{name: online[name] for name in ("hourly", "never") if name in online},
        }
        # pandas writes what is infinite as null; the standard library would write no JSON.
        quantiles = json.loads(table.to_json(orient="index"))
        typer.echo(json.dumps({**facts, "quantiles": quantiles}))
        return
    known, megabytes = ", ".join(devices.known), devices.nbytes / 1e6
    typer.echo(f"{traces}: {devices.n_devices:,} devices; known: {known}; {megabytes:,.1f} MB")
    if devices.compute_unit:
        typer.echo(f"one work unit: {devices.compute_unit}")
    for kind, count in devices.repairs.items():
        typer.echo(f"  {count:>10,}  {kind}")
    if online:
        shares = " ".join(f"{share:.0%}" for share in online["hourly"])
        typer.echo(f"online by the hour of the day (epoch {devices.epoch}): {shares}")
        typer.echo(f"never online: {online['never']:.1%}")
    typer.echo(f"\n{table.to_string(float_format='{:.3g}'.format)}")


@app.command(
    epilog="Examples: fedstale traces convert ready_strict.json --out phones.parquet  |  "
    "fedstale traces convert log.csv --columns 'device=phone start=from end=to' --unit ms "
    "--time-zone Europe/Oslo --dry-run"
)
@one_sentence()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="Published recording; a log in CSV, JSON or Parquet, or a folder of one for each "
            "device; or synthetic:N@FLEET to generate.",
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IN]... [OUT] [ROLE=COLUMN]...",
            help="Further files of a log; as --out; and more of --columns.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Native file to write, NAME.parquet.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=COLUMN...",
            help="Columns of a log: device start end (or duration) online | device time online | "
            "device time charging plugged level | device time downlink uplink interval | device "
            "time | device speed downlink uplink. A column DATE+TIME is two; * is every other one, "
            "each of a device; none is no column.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="What IN is, if it cannot be found out: of a log windows, samples, battery, "
            "rates, pings or nodes; or the name of a published recording."
        ),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="UNIT|ROLE=UNIT",
            help="Of time (s, ms, us, ns, min, h, d) or rates (Mbit/s, kB/s, bytes/interval, "
            "bytes/total ...); repeatable.",
        ),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option(help="Zone of the devices' clocks, such as Europe/Oslo.")
    ] = None,
    time_format: Annotated[
        str | None, typer.Option(help="Format of times, such as '%d/%m/%Y %H:%M'.")
    ] = None,
    max_gap: Annotated[
        str | None,
        typer.Option(help="Longest time for which a reading holds: 5m; none: until the next."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device that all of a log is of, if no column says it.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Rows of a log to read; repeatable."),
    ] = None,
    online_values: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="What counts as online, charging or plugged, or '>0'."),
    ] = None,
    min_level: Annotated[
        float | None, typer.Option(help="Level of a battery from which on its device is online.")
    ] = None,
    compute_unit: Annotated[
        str | None, typer.Option(help="What one work unit of a column of speeds is, in words.")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="What stands between two cells of a log.")
    ] = None,
    decimal: Annotated[str | None, typer.Option(help="Decimal mark of a log.")] = None,
    seed: _Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how IN is understood, and write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a recording, a log or generated devices as a native file; say what was repaired."""
    places = [text for text in more or [] if "=" not in text]
    if places and out is None and not dry_run:
        out = Path(places.pop())
    sources = [Path(source), *(Path(place) for place in places)]
    if missing := [path for path in sources[1:] if not path.exists()]:
        raise ConfigError(f"out = {str(missing[0])!r}: expected one file to write")
    if (out is None) != dry_run:
        raise ConfigError(f"out = {out}: expected --out NAME.parquet, or --dry-run, which has none")
    if out is not None:
        check_free(out, overwrite=overwrite)
    from fedstale.traces import TraceSet
    from fedstale.traces.sources import SOURCES, is_foreign

    stated = {
        "columns": _roles([*(columns or []), *(text for text in more or [] if "=" in text)]),
        "kind": None if kind in SOURCES else kind,
        "unit": tuple(unit or []),
        "time_zone": time_zone,
        "time_format": time_format,
        "max_gap_s": _gap_s(max_gap),
        "device": device,
        "only": tuple(only or []),
        "online_values": tuple(online_values.split(",")) if online_values else (),
        "min_level": min_level,
        "compute_unit": compute_unit,
        "decimal": decimal,
    }
    given = {name: value for name, value in stated.items() if value not in (None, (), {})}
    is_log = bool(given) or separator is not None or len(sources) > 1
    published, is_generated = kind if kind in SOURCES else None, TraceSet.is_synthetic(source)
    if is_log and (published is not None or is_generated):
        name, value = ("source", source) if is_generated else ("kind", kind)
        raise ConfigError(f"{name} = {value!r}: expected none with options of a log of your own")
    told: Mapping[str, str] = {}
    if is_generated:
        traces = TraceSet.load(source, seed=seed)
    elif is_log or (published is None and is_foreign(sources[0])):
        traces, told = _read_log(sources, separator, given)
    else:
        traces = TraceSet.read(sources[0], published)
    if told:
        note("\n".join([f"{source}:", *(f"  {what}: {how}" for what, how in told.items())]))
    write(traces, out, as_json=as_json, told=told)


def _read_log(
    paths: Sequence[Path], separator: str | None, stated: Mapping[str, Any]
) -> tuple["TraceSet", Mapping[str, str]]:
    """Return the traces of a log of one's own, and how it was understood."""
    from fedstale.traces.tables import TableOptions, UnclearLogError, open_table, read_table

    table = open_table(paths, separator)
    try:
        read = read_table(table, TableOptions(**stated))
    except UnclearLogError as problem:
        said = "\n  ".join(problem.said)
        # The command as it was typed, with more options.
        command = shlex.join(["fedstale", *sys.argv[1:], *problem.words])
        again = f"\ntype next: {command}" if problem.words else ""
        raise TraceError(f"{paths[0]}: {said}{again}") from None
    except TraceError as problem:
        raise TraceError(f"{paths[0]}: {problem}") from None
    return read.traces, read.interpretation


def _roles(texts: Sequence[str]) -> dict[str, str]:
    """Return columns by role; a column's name may have spaces.

    Example:
        >>> _roles(["device=Device ID start=from", "end=to"])
        {'device': 'Device ID', 'start': 'from', 'end': 'to'}
    """
    roles = {}
    for text in texts:
        start, *parts = re.split(r"(?:^|\s+)(\w+)=", text.strip())
        if start or not parts:
            raise ConfigError(f"columns = {text!r}: expected ROLE=COLUMN, such as device=phone")
        for role, column in zip(parts[::2], parts[1::2], strict=True):
            if role in roles:
                raise ConfigError(f"columns: {role} is given twice: expected one column")
            roles[role] = column
    return roles


def _gap_s(text: str | None) -> float | None:
    if text is None:
        return None
    return inf if text == "none" else amount("max-gap", text, UNITS_S)


@app.command(
    epilog="Example: fedstale traces compose --availability phones.json --compute models.json "
    "--background planetlab.tar.gz --network mahimahi --days 3 --n 1000 --out devices.parquet"
)
@one_sentence()
def compose(
    availability: Annotated[Path, typer.Option(help="Recording of when devices are online.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Number of devices.")],
    compute: _Compute,
    network: Annotated[str, typer.Option(metavar="PATH|DOWN,UP", help=f"{_NETWORK}.")],
    out: Out,
    background: Annotated[
        Path | None, typer.Option(help="Recording of what other programs leave of a processor.")
    ] = None,
    uplink_share: Annotated[
        float | None, typer.Option(help="Uplink / downlink, where no uplink was recorded.")
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(min=1, help="Days for which no link or load repeats; else each record does."),
    ] = None,
    keep_together: Annotated[
        bool,
        typer.Option(
            "--keep-together",
            help="Let each device keep the link and speed that are recorded under its own id.",
        ),
    ] = False,
    seed: _Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make complete devices out of independent recordings, and of what you state of them."""
    check_free(out, overwrite=overwrite)
    from fedstale.traces import TraceSet

    devices = TraceSet.compose(
        availability=TraceSet.read(availability),
        compute=_computing(compute),
        background=None if background is None else TraceSet.read(background),
        network=_linked(network),
        n=n,
        seed=seed,
        uplink_share=uplink_share,
        days=days,
        keep_together=keep_together,
    )
    write(devices, out, as_json=as_json)


@app.command("list", epilog="Examples: fedstale traces list  |  fedstale traces list --json")
@one_sentence()
def list_(as_json: AsJson = False) -> None:
    """List recordings, generated devices, forecasters and agents by name, with a card each."""
    from fedstale.traces.sources import cards

    found = cards()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for kind in dict.fromkeys(card["kind"] for card in found):
        typer.echo(kind)
        for card in (one for one in found if one["kind"] == kind):
            size = "size not stated" if card["bytes"] is None else f"{card['bytes'] / 1e6:.2f} MB"
            typer.echo(f"  {card['name']}  {card['about']}")
            typer.echo(f"    {card['use']}; {size}; licence: {card['licence']}")


@app.command(epilog="Example: fedstale traces fetch flash --folder recordings")
@one_sentence()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of a published recording.")],
    folder: Annotated[Path, typer.Option(help="Where to put it.")] = Path(),
    url: Annotated[str | None, typer.Option(help="Download from here instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a published recording from its authors, checked and whole or not at all."""
    from fedstale.traces.sources import SOURCES
    from fedstale.traces.sources import fetch as download

    if name in SOURCES:
        note(SOURCES[name].licence_line)
    with steps(is_shown=True) as step:
        path = download(
            name,
            folder,
            url=url,
            progress=lambda done, total: step(f"{name}, {done / 1e6:,.0f} MB", done, total or done),
        )
    say(str(path), path, as_json=as_json)


app.command(
    epilog="Example: fedstale traces record --compute calibrate --out phone.parquet --for 1h"
)(record)
app.command(epilog="Example: fedstale traces merge a.parquet b.parquet --out fleet.parquet")(merge)


def _computing(text: str) -> "TraceSet":
    """Return a recording of speeds, or the one speed that an option states."""
    from fedstale.traces import TraceSet

    stated = stated_speed(text)
    if stated is None:
        return TraceSet.read(Path(text))
    speed, unit = stated
    same = TraceSet.constant(1, compute=speed, downlink_bit_per_s=0, uplink_bit_per_s=0)
    return replace(same, compute_unit=unit)


def _linked(text: str) -> "TraceSet":
    """Return a recording of links, or links of the one capacity that an option states."""
    from fedstale.traces import TraceSet

    if Path(text).exists() or "," not in text:
        return TraceSet.read(Path(text))
    down, up = link_rates(text)
    return TraceSet.constant(2, compute=0, downlink_bit_per_s=down, uplink_bit_per_s=up)


def _quantiles(traces: "TraceSet", online: Mapping[str, Any]) -> "DataFrame":
    """Tabulate how long devices are online, and how fast they are.

    Every device and every part of its record count alike; large sets are looked at through a
    sample of their devices.
    """
    import numpy as np
    import pandas as pd

    from fedstale.traces.synthetic import LEVELS

    rows: dict[str, Any] = {}
    if (channel := traces.availability) is not None:
        logs_s = channel.known_s()[channel.rows]
        if np.isfinite(logs_s).any():
            rows["logged, h"] = np.quantile(logs_s[np.isfinite(logs_s)], LEVELS) / 3600.0
        rows["share of time online"] = online["share"]
        rows |= {
            f"{name}, h": np.divide(online[f"{name}_s"], 3600.0) for name in ("session", "gap")
        }
    for name, unit, size in (
        ("compute", "units/s", 1.0),
        ("downlink", "Mbit/s", 1e6),
        ("uplink", "Mbit/s", 1e6),
    ):
        series: Series | None = getattr(traces, name)
        if series is None:
            continue
        devices = np.unique(np.linspace(0, series.n_devices - 1, _MOST_DEVICES).astype(np.int64))
        length = np.minimum(series.lengths[series.rows[devices]], series.until)
        places = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
        rates = series.value_at(np.repeat(devices, _SAMPLES), np.outer(length, places).ravel())
        of_devices = rates.reshape(-1, _SAMPLES).mean(axis=1)
        # Between two infinite rates nothing can be interpolated.
        how: Any = "lower" if series.is_instant else "linear"
        rows[f"{name}, {unit}"] = np.quantile(rates, LEVELS, method=how) / size
        rows[f"mean of a device, {unit} {name}"] = (
            np.quantile(of_devices, LEVELS, method=how) / size
        )
    columns = [f"{level:.0%}" for level in LEVELS]
    found = {label: quantiles for label, quantiles in rows.items() if len(quantiles)}
    return pd.DataFrame.from_dict(found, orient="index", columns=columns)
