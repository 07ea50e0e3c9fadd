"""Draw the picture of the README: three strategies on the same phones, as one SVG.

Run it with: python benchmarks/picture/run.py [--runs FOLDER] [--out FILE]

Runs that are there already are drawn as they are. The colours are those of reports, for a light and
for a dark page; the drawing brings its own background, so it reads on either.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd

from fedstale.config import SimulationConfig
from fedstale.reports.run import Run
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

TRACES, SEED, UNTIL, END_S = "synthetic:100", 0, "2h", 7200.0
STRATEGIES = {"FedAvg": "fedavg", "FedBuff": "fedbuff", "Gap-Aware": "gap-aware"}
"""Class of its curve in the picture, by method."""
TEXTS = {
    # Flower's own FedAvg is drawn.
    "FedAvg": "flower.FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)",
    "FedBuff": "FedBuff(10, 5)",
    "Gap-Aware": "GapAware(10, 5)",
}
SHOWN = ("FedAvg", "Gap-Aware")

WIDTH, LEFT, RIGHT, GAP = 960, 56, 130, 28
TOP, ROW, UNDER = 92, 9, 34
CURVES = 170

LIGHT = {
    **{"card": "#ffffff", "ink": "#1c2430", "faint": "#55606e", "grid": "#e6e9ee"},
    **{"online": "#dfe4ea", "download": "#56b4e9", "training": "#0072b2", "upload": "#009e73"},
    **{"lost": "#d55e00", "fedavg": "#d55e00", "fedbuff": "#007f5c", "gap-aware": "#0072b2"},
}
DARK = {
    **{"card": "#1a2029", "ink": "#e8ecf1", "faint": "#a5afbc", "grid": "#2a323d"},
    **{"online": "#343d49", "download": "#a5d8f5", "training": "#4aa3df", "upload": "#2fc09a"},
    **{"lost": "#f28e4b", "fedavg": "#f28e4b", "fedbuff": "#2fc09a", "gap-aware": "#4aa3df"},
}
DASHES = {"fedavg": "", "fedbuff": "7 4", "gap-aware": ""}
LEGEND = (
    *(("online", "online"), ("download", "download"), ("training", "training")),
    *(("upload", "upload"), ("lost", "work that came to nothing")),
)


class Panel(NamedTuple):
    """A rectangle with virtual time from left to right."""

    left: float
    width: float

    def x(self, seconds: float) -> float:
        """Return where an instant is drawn."""
        return round(self.left + self.width * min(max(seconds, 0.0), END_S) / END_S, 1)


def run_of(name: str, traces: TraceSet, folder: Path) -> Run:
    """Return a strategy's run, simulated unless it is in its folder already."""
    path = folder / STRATEGIES[name]
    if not (path / "summary.json").is_file():
        config = SimulationConfig(
            app="digits",
            traces=TRACES,
            seed=SEED,
            until=UNTIL,
            executor="inline",
            run_config={"num-server-rounds": 100_000, "strategy": TEXTS[name], "seed": 1},
        )
        simulate(config, path, traces=traces, overwrite=path.exists())
    return Run(path)


def windows(traces: TraceSet, device_id: str) -> Iterator[tuple[float, float]]:
    """Yield when a device is online."""
    availability, position = traces.availability, [traces.device_ids.get_loc(device_id)]
    assert availability is not None
    now = 0.0
    while now < END_S:
        starts, ends = availability.window_at_or_after(position, np.array([now]))
        start, now = float(starts[0]), float(ends[0])
        if start < END_S:
            yield start, now


def strokes(spans: Sequence[tuple[float, float, float]], kind: str, panel: Panel) -> str:
    """Return strokes of one kind as one path; a span is a height, a start and an end in s."""
    parts = [
        f"M{panel.x(start)} {y:g}H{max(panel.x(end), panel.x(start) + 0.4):g}"
        for y, start, end in spans
        if np.isfinite(start) and start < END_S
    ]
    width = ROW - 1 if kind == "online" else ROW - 3
    return f'<path class="s {kind}" stroke-width="{width}" d="{"".join(parts)}"/>'


def timeline(
    run: Run, title: str, rows: dict[str, float], traces: TraceSet, panel: Panel
) -> Iterator[str]:
    """Yield the drawing of what devices did in a run."""
    jobs = run.jobs[run.jobs["kind"].str.startswith("train")]
    used = jobs[jobs["status"] == "reported"]
    in_flight = jobs["status"] == "in-flight"
    lost = jobs[(jobs["status"] != "reported") & ~in_flight]
    busy = float(run.jobs["busy_s"].sum())
    share = float(run.jobs["busy_s"][run.jobs["outcome"] == "wasted"].sum()) / busy
    yield text(panel.left, TOP - 26, title, "h")
    said = f"{len(used):,} updates merged; {share:.0%} of {busy / 3600:.0f} device-hours wasted"
    yield text(panel.left, TOP - 9, said, "f")
    online = [(y, *span) for device, y in rows.items() for span in windows(traces, device)]
    yield strokes(online, "online", panel)
    at = used["device_id"].map(rows)
    for kind, start, end in (
        ("download", "started_at", "downloaded_at"),
        ("training", "downloaded_at", "trained_at"),
        ("upload", "trained_at", "reported_at"),
    ):
        yield strokes(list(zip(at, used[start], used[end], strict=True)), kind, panel)
    spans = zip(lost["device_id"].map(rows), lost["started_at"], lost["ended_at"], strict=True)
    yield strokes(list(spans), "lost", panel)


def axis(panel: Panel, top: float, bottom: float) -> Iterator[str]:
    """Yield the axis of virtual time."""
    for minutes in range(0, 121, 30):
        x = panel.x(60.0 * minutes)
        yield f'<path class="g" d="M{x} {top}V{bottom}"/>'
        label, anchor = (f"{minutes} min", "end") if minutes == 120 else (f"{minutes}", "middle")
        yield text(x, bottom + 15, label, "f", anchor)


def curves(runs: dict[str, Run], panel: Panel, top: float) -> Iterator[str]:
    """Yield accuracy against virtual time, each curve with its name at its end."""
    bottom = top + CURVES
    yield text(LEFT, top - 12, "Test accuracy against virtual time", "h")
    yield from axis(panel, top, bottom)
    for percent in range(0, 101, 25):
        y = bottom - CURVES * percent / 100
        yield f'<path class="g" d="M{panel.left} {y:g}H{panel.left + panel.width}"/>'
        yield text(panel.left - 8, y + 4, f"{percent}%", "f", "end")
    below = -np.inf
    for name in sorted(runs, key=lambda name: -_last(runs[name])):
        run = runs[name]
        rows = run.metrics.query("source == 'server' and name == 'accuracy'")
        last = float(rows["value"].iloc[-1])
        points = [
            f"{panel.x(at):g} {bottom - CURVES * value:.1f}"
            for at, value in zip([*rows["time_s"], END_S], [*rows["value"], last], strict=True)
        ]
        kind = STRATEGIES[name]
        dash = f' stroke-dasharray="{DASHES[kind]}"' if DASHES[kind] else ""
        yield f'<path class="c {kind}"{dash} d="M{"L".join(points)}"/>'
        # Names stand below one another, the best curve's on top.
        y = max(bottom - CURVES * last + 4, below)
        below = y + 17
        yield text(panel.left + panel.width + 8, y, f"{name} {last:.0%}", f"n {kind}")


def legend(y: float) -> Iterator[str]:
    """Yield what the colours of the timelines mean."""
    x = float(LEFT)
    for kind, words in LEGEND:
        yield f'<path class="s {kind}" stroke-width="8" d="M{x:g} {y - 4}h18"/>'
        yield text(x + 24, y, words, "f")
        x += 50 + 7.2 * len(words)


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """Return a line of text."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{at}>{escape(words)}</text>'


def style() -> str:
    """Return the colours, for light and for dark."""

    def rules(colours: dict[str, str]) -> str:
        ink = f".card{{fill:{colours['card']}}}.h{{fill:{colours['ink']}}}"
        ink += f".f{{fill:{colours['faint']}}}.g{{stroke:{colours['grid']}}}"
        for kind, _ in LEGEND:
            ink += f".s.{kind}{{stroke:{colours[kind]}}}"
        for kind in STRATEGIES.values():
            ink += f".c.{kind}{{stroke:{colours[kind]}}}.n.{kind}{{fill:{colours[kind]}}}"
        return ink

    fixed = (
        "text{font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        ".h{font-weight:600;font-size:15px}.n{font-weight:600}.c{fill:none;stroke-width:2.2}"
        ".g{stroke-width:1}.s{fill:none}"
    )
    return f"{fixed}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"


def drawing(runs: dict[str, Run], traces: TraceSet) -> str:
    """Return the picture."""
    jobs = pd.concat([runs[name].jobs["device_id"] for name in SHOWN])
    order = jobs.value_counts(sort=False).sort_index().sort_values(ascending=False, kind="stable")
    rows = {str(device): TOP + ROW * (i + 0.5) for i, device in enumerate(order.index)}
    bottom = TOP + ROW * len(rows)
    half = (WIDTH - LEFT - 20 - GAP) / 2
    height = bottom + UNDER + 58 + CURVES + 32
    parts = [f'<rect class="card" width="{WIDTH}" height="{height}" rx="10"/>', *legend(34)]
    for i, name in enumerate(SHOWN):
        panel = Panel(LEFT + i * (half + GAP), half)
        parts += axis(panel, TOP, bottom)
        parts += timeline(runs[name], f"{name}: a row a phone", rows, traces, panel)
    parts += curves(runs, Panel(LEFT, WIDTH - LEFT - RIGHT), bottom + UNDER + 42)
    said = "; ".join(f"{name} {_last(run):.0%}" for name, run in runs.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>What phones did under {' and '.join(SHOWN)}, and test accuracy after two hours of "
        f"virtual time: {escape(said)}</title><style>{style()}</style>{''.join(parts)}</svg>\n"
    )


def _last(run: Run) -> float:
    return float(run.metrics.query("source == 'server' and name == 'accuracy'")["value"].iloc[-1])


def main() -> None:
    """Run what has not been run, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/picture"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/phones.svg"))
    options = parser.parse_args()
    traces = TraceSet.load(TRACES, seed=SEED)
    # Flower sets this level when it is imported, which the imports above have done.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    runs = {name: run_of(name, traces, options.runs) for name in STRATEGIES}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(drawing(runs, traces), encoding="utf-8")
    print(f"wrote {options.out}: {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
