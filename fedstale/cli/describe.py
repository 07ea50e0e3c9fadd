"""What `fedstale traces describe` shows: numbers for machines, and the same for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstale.traces.synthetic.fit import LEVELS, availability_marginal, time_of_day_s

if TYPE_CHECKING:
    from fedstale.traces import TraceSet
    from fedstale.traces.series import Series

_MOST_DEVICES = 2000
_SAMPLES = 96
_WIDTH = 40


def numbers(traces: "TraceSet") -> dict[str, Any]:
    """Return counts, repairs and quantiles of a trace set, ready for JSON.

    Quantiles are at the levels in `levels`; lengths are in s, links in bit/s, compute in work
    units/s. Large sets are looked at through a sample of their devices.
    """
    about: dict[str, Any] = {
        "n_devices": traces.n_devices,
        "known": list(traces.known),
        "epoch": traces.epoch,
        "compute_unit": traces.compute_unit,
        "nbytes": traces.nbytes,
        "repairs": dict(traces.repairs),
        "levels": list(LEVELS),
    }
    if traces.availability is not None:
        channel = traces.availability
        at = time_of_day_s(traces.epoch)
        about["availability"] = {
            "record_s": float(channel.lengths.max()),
            "n_windows": int(np.diff(channel.offsets)[channel.rows].sum()),
            **availability_marginal(channel, epoch_s=at),
        }
    for name in ("compute", "downlink", "uplink"):
        series = getattr(traces, name)
        if series is not None:
            about[name] = _rates(series)
    return about


def _rates(series: "Series") -> dict[str, Any]:
    """Return quantiles of the rate, every device and every part of its record counting alike."""
    devices = np.unique(np.linspace(0, series.n_devices - 1, _MOST_DEVICES).astype(np.int64))
    length = np.minimum(series.lengths[series.rows[devices]], series.until)
    places = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    rates = series.value_at(np.repeat(devices, _SAMPLES), np.outer(length, places).ravel())
    per_device = rates.reshape(-1, _SAMPLES).mean(axis=1)
    return {
        "record_s": float(series.lengths.max()),
        "rate": [float(q) for q in np.quantile(rates, LEVELS)],
        "mean_of_device": [float(q) for q in np.quantile(per_device, LEVELS)],
        "zero": float((rates == 0).mean()),
    }


def show(name: str, about: dict[str, Any]) -> None:
    """Print the numbers as tables and a small plot."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{name}: {about['n_devices']:,} devices; known: {', '.join(about['known'])}; "
        f"{about['nbytes'] / 1e6:,.1f} MB",
        markup=False,
    )
    if about["compute_unit"]:
        console.print(f"one work unit: {about['compute_unit']}", markup=False)
    for kind, count in about["repairs"].items():
        console.print(f"  {count:>10,}  {kind}", markup=False)
    there = about.get("availability")
    if there is not None:
        console.print(f"\nshare of devices there, by hour of the day (epoch {about['epoch']})")
        for line in plot(there["hourly"]):
            console.print(line)
        console.print(f"never there: {there['never']:.1%}")
    table = Table("quantile", *(f"{level:.0%}" for level in about["levels"]))
    for label, quantiles, show_ in _lines(about):
        if quantiles:
            table.add_row(label, *(show_(q) for q in quantiles))
    console.print(table)


def plot(shares: Sequence[float]) -> list[str]:
    r"""Return one bar a line, the longest as wide as the plot.

    Example:
        >>> print("\n".join(plot([0.5, 0.25])))
        00  50.0% ########################################
        01  25.0% ####################
    """
    most = max(*shares, 1e-9)
    return [
        f"{hour:02d} {share:6.1%} {'#' * round(share / most * _WIDTH)}"
        for hour, share in enumerate(shares)
    ]


def _lines(about: dict[str, Any]) -> list[tuple[str, list[float], Any]]:
    there = about.get("availability", {})
    lines: list[tuple[str, list[float], Any]] = [
        ("share of time there", there.get("share", []), "{:.1%}".format),
        ("session", there.get("session_s", []), _duration),
        ("gap", there.get("gap_s", []), _duration),
    ]
    number = "{:.3g}".format
    for name, unit, show_ in (
        ("compute", "units/s", number),
        ("downlink", "Mbit/s", _mega),
        ("uplink", "Mbit/s", _mega),
    ):
        rates = about.get(name, {})
        lines.append((f"{name}, {unit}", rates.get("rate", []), show_))
        lines.append(("  mean of a device", rates.get("mean_of_device", []), show_))
    return lines


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _mega(number: float) -> str:
    return f"{number / 1e6:.3g}"
