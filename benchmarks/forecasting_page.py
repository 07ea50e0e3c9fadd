"""Write the tables of docs/results/forecasting.md and forecasting-jobs.md from recorded results.

What stands between the markers of a table is replaced; the words around them are kept. The best
number of a column is bold, the oracle's aside.

Run it with: python benchmarks/forecasting_page.py
"""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
PAGES = tuple(
    HERE.parent / "docs" / "results" / name for name in ("forecasting.md", "forecasting-jobs.md")
)
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a duration in its largest whole unit, such as 15 min."""
    for size, name in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def markdown(table: pd.DataFrame, *, best: str | None = None, digits: int = 3) -> str:
    """Return a table with its index as first column; `best` is "min" or "max" of each column."""
    lines = [
        "| " + " | ".join(["", *map(str, table.columns)]) + " |",
        "|---|" + "---:|" * table.shape[1],
    ]
    judged = table.drop(index="oracle", errors="ignore")
    for name, row in table.iterrows():
        cells = []
        for column, value in row.items():
            text = "" if pd.isna(value) else f"{value:,.{digits}f}"
            if best and name != "oracle" and value == getattr(judged[column], best)():
                text = f"**{text}**"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_horizon(
    rows: pd.DataFrame,
    table: str,
    quantity: str,
    metric: str,
    last: float,
    *,
    best: str | None = "min",
) -> str:
    """Return one metric of one quantity, a column a horizon."""
    part = rows[rows["table"].eq(table) & rows["quantity"].eq(quantity) & rows["metric"].eq(metric)]
    part = part[part["horizon_s"] <= last]
    found = part.pivot_table(index="forecaster", columns="horizon_s", values="value", sort=False)
    found = found[sorted(found.columns)]
    found.columns = pd.Index([duration(h) for h in found.columns])
    return markdown(found, best=best)


def jobs(rows: pd.DataFrame, size: str) -> str:
    """Return the scores of one job."""
    part = rows[rows["table"].eq(f"jobs, {size} job")]
    wanted = {
        "training_s mae_s": "training MAE, s",
        "training_s coverage": "training coverage",
        "reporting_s mae_s": "reporting MAE, s",
        "reporting_s coverage": "reporting coverage",
        "total_s coverage": "total coverage",
        "finish brier": "finish Brier",
        "finish log_loss": "finish log loss",
        "finish auprc": "finish AUPRC",
    }
    part = part.assign(what=part["quantity"] + " " + part["metric"])
    found = part.pivot_table(index="forecaster", columns="what", values="value", sort=False)
    # An exact interval has no width, so whether it covers is a matter of rounding.
    found.loc["oracle", [w for w in wanted if w.endswith("coverage")]] = np.nan
    return markdown(found[list(wanted)].rename(columns=wanted))


def decision(rows: pd.DataFrame, table: str) -> str:
    """Return what picking the first devices of an order brings."""
    part = rows[rows["table"].eq(table)].set_index("forecaster")
    found = pd.DataFrame(
        {
            "valid ratio": part["valid_ratio"],
            "wasted device-s a job": part["wasted_s"],
            "from": part["wasted_low"],
            "to": part["wasted_high"],
            "gap closed": part["gap_closed"],
        }
    )
    return markdown(found, digits=2) + f"\n\n{part['rounds'].iloc[0]:.0f} rounds."


def calibration(rows: pd.DataFrame) -> str:
    """Return how often the embedded forecaster's intervals cover, and how wide they are."""
    part = rows[rows["forecaster"].str.startswith("lstm")]
    columns = {}
    for size in ("short", "long"):
        for metric in ("coverage", "width"):
            for phase in ("training", "reporting", "total"):
                chosen = part[
                    part["table"].eq(f"jobs, {size} job")
                    & part["quantity"].eq(f"{phase}_s")
                    & part["metric"].eq(metric)
                ]
                columns[f"{size}, {phase} {metric}"] = chosen.set_index("forecaster")["value"]
    found = pd.DataFrame(columns)
    return "\n\n".join(
        markdown(found.filter(like=f"{size}, ").rename(columns=lambda c: c.split(", ")[1]))
        for size in ("short", "long")
    )


def seeds(rows: pd.DataFrame) -> str:
    """Return how the LSTM varies with its seed."""
    part = rows[rows["table"].eq("horizons by seed") & rows["metric"].eq("brier")]
    part = part[part["quantity"].eq("online") & part["horizon_s"].between(60, 7200)]
    found = part.pivot_table(index="seed", columns="horizon_s", values="value")
    found.columns = pd.Index([f"Brier, {duration(h)}" for h in found.columns])
    for size in ("short", "long"):
        chosen = rows[rows["table"].eq(f"decision, {size} job by seed")].set_index("seed")
        found[f"gap closed, {size} job"] = chosen["gap_closed"]
    found.index = pd.Index([f"seed {int(i)}" for i in found.index])
    return markdown(found)


def cold(rows: pd.DataFrame) -> str:
    """Return the scores after short histories."""
    part = rows[rows["table"].eq("cold_start")]
    parts = []
    for metric in ("pinball", "brier"):
        found = part.pivot_table(index="forecaster", columns="history_s", values=metric, sort=False)
        found.columns = pd.Index([f"{metric}, {duration(h)}" for h in sorted(found.columns)])
        parts.append(found)
    return markdown(pd.concat(parts, axis=1), best="min")


def speed(rows: pd.DataFrame) -> str:
    """Return how fast forecasters are."""
    part = rows[rows["table"].eq("speed")].set_index("forecaster")
    found = pd.DataFrame(
        {
            "processes a second": part["processes_per_s"],
            "with a job's times, a second": part["jobs_per_s"],
            "one device, ms": part["one_device_ms"],
        }
    )
    text = markdown(found, digits=1)
    return text + f"\n\nObserving: {part['observations_per_s'].iloc[0]:,.0f} devices a second."


def main() -> None:
    """Rewrite the tables of both pages."""
    rows, rules, bounds, corrected, speeds = (
        pd.DataFrame(json.loads((HERE / "results" / f"{name}.json").read_text())["rows"])
        for name in (
            "forecasting",
            "forecasting_rules",
            "forecasting_bound",
            "forecasting_calibration",
            "forecasting_speed",
        )
    )
    tables = {
        "online": by_horizon(rows, "horizons", "online", "brier", 14_400),
        "offline": by_horizon(rows, "horizons", "offline", "brier", 14_400),
        "seeds": seeds(rows),
        "cold": cold(rows),
        "calibration": calibration(corrected),
        "speed": speed(speeds),
    }
    for channel in ("compute", "downlink"):
        for metric in ("mase", "pinball", "coverage"):
            best = None if metric == "coverage" else "min"
            found = by_horizon(rows, "horizons", channel, metric, 7200, best=best)
            tables[f"{channel} {metric}"] = found
    for name, table in (("links", "links as recorded"), ("other", "links of another study")):
        for metric in ("mase", "pinball"):
            tables[f"{name} {metric}"] = by_horizon(rows, table, "downlink", metric, 900)
    for size in ("short", "long"):
        tables[f"jobs {size}"] = jobs(rows, size)
        tables[f"decision {size}"] = decision(rows, f"decision, {size} job")
        tables[f"cost {size}"] = decision(rules, f"cost, {size} job")
        tables[f"bound {size}"] = decision(bounds, f"bound, {size} job")
    for path in PAGES:
        page = path.read_text()
        for name, text in tables.items():
            pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
            page = re.sub(pattern, lambda m, t=text: m[1] + t + "\n" + m[2], page, flags=re.DOTALL)
        path.write_text(page)


if __name__ == "__main__":
    main()
