"""Write the tables of two pages on forecasting from recorded results.

docs/results/forecasting.md has the chances to be online, docs/results/forecasting-times.md rates
and times of jobs. What stands between the markers of a table is replaced; the words around them are
kept. The best number of a column is bold.

Run it with: python benchmarks/forecasting_page.py
"""

from pathlib import Path

import pandas as pd
from pages import refilled, rewrite
from results_file import read_result

HERE = Path(__file__).parent
PAGES = [
    HERE.parent / "docs" / "results" / name for name in ("forecasting.md", "forecasting-times.md")
]
HORIZONS_S = {
    "online": (900.0, 1800.0, 3600.0, 14_400.0, 86_400.0),
    "offline": (3600.0, 14_400.0, 86_400.0),
    "available": (3600.0, 14_400.0, 86_400.0),
}
WORDS = {"online": "stays", "offline": "back in", "available": "online in"}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a duration in its largest whole unit, such as 15 min; a day is 24 h."""
    for size, name in _UNITS[1:]:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def markdown(table: pd.DataFrame, *, best: str | None = None, digits: int = 3) -> str:
    """Return a table with its index as first column; `best` is "min" or "max" of each column."""
    lines = [
        "| " + " | ".join(["", *map(str, table.columns)]) + " |",
        "|---|" + "---:|" * table.shape[1],
    ]
    for name, row in table.iterrows():
        cells = []
        for column, value in row.items():
            text = value if isinstance(value, str) else f"{value:,.{digits}f}"
            if best and value == getattr(table[column], best)():
                text = f"**{text}**"
            cells.append("" if text == "nan" else text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chances(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return one metric of chances, the mean over seeds, a column a question."""
    columns = {}
    for quantity, horizons in HORIZONS_S.items():
        part = rows[rows["quantity"].eq(quantity) & rows["metric"].eq(metric)]
        for horizon in horizons:
            values = part[part["horizon_s"].eq(horizon)].groupby("forecaster", sort=False)["value"]
            columns[f"{WORDS[quantity]} {duration(horizon)}"] = values.mean()
    return pd.DataFrame(columns)


def differences(rows: pd.DataFrame) -> str:
    """Return the differences of Brier scores x 1,000, with the widest interval of the seeds."""
    part = rows[rows["metric"].eq("brier difference")]
    lines: dict[str, dict[str, str]] = {}
    for quantity, horizons in HORIZONS_S.items():
        for horizon in horizons:
            here = part[part["quantity"].eq(quantity) & part["horizon_s"].eq(horizon)]
            for pair, of_seeds in here.groupby("forecaster"):
                low, mean, high = (
                    1e3 * x
                    for x in (
                        of_seeds["low"].min(),
                        of_seeds["value"].mean(),
                        of_seeds["high"].max(),
                    )
                )
                column = f"{WORDS[quantity]} {duration(horizon)}"
                lines.setdefault(str(pair), {})[column] = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    return markdown(pd.DataFrame(lines).T)


def recurrence(rows: pd.DataFrame) -> str:
    """Return a sentence on the differences of the LSTM and the perceptron."""
    part = rows[rows["forecaster"].eq("lstm - perceptron")]
    shown = pd.concat(
        part[part["quantity"].eq(quantity) & part["horizon_s"].isin(horizons)]
        for quantity, horizons in HORIZONS_S.items()
    )
    better, worse = (shown["high"] < 0).sum(), (shown["low"] > 0).sum()
    level, most = len(shown) - better - worse, shown["value"].abs().max()
    return (
        f"Of {len(shown)} comparisons, a question on a fleet in a division, {level} have an "
        f"interval with 0 in it;\nthe LSTM is better in {better}, the perceptron in {worse}, by "
        f"{most:.4f} in the Brier score at most."
    )


def rates(rows: pd.DataFrame, channel: str, metric: str) -> str:
    """Return one metric of a channel's rates, the mean over seeds, a column a horizon."""
    part = rows[rows["quantity"].eq(channel) & rows["metric"].eq(metric)]
    part = part[
        part["forecaster"].isin(["last-value", "ewma", "hour", "linear", "perceptron", "lstm"])
    ]
    found = part.pivot_table(index="forecaster", columns="horizon_s", values="value", sort=False)
    found = found[sorted(found.columns)]
    found.columns = pd.Index([duration(h) for h in found.columns])
    return markdown(found, best="min" if metric == "pinball" else None)


def coverage(rows: pd.DataFrame) -> str:
    """Return how often 80 % intervals of the times of jobs covered, a row a forecaster."""
    part = rows[rows["metric"].eq("coverage") & rows["job"].notna()]
    phase = part["quantity"].str.removesuffix("_s")
    links = part["links"].fillna("")
    part = part.assign(
        column=part["job"] + ", " + phase,
        row=part["forecaster"] + links.where(links == "", ", links of " + links),
    )
    return markdown(part.pivot_table("value", "row", "column", sort=False), digits=2)


def own_outcomes(rows: pd.DataFrame) -> str:
    """Return the skill and, in brackets, the calibration error, of horizons of four hours on."""
    skills, errors = (chances(rows, metric) for metric in ("skill", "ece"))
    far = [column for column in skills if column.endswith((" 4 h", " 24 h"))]
    text = skills[far].map("{:.3f}".format) + errors[far].map(" ({:.3f})".format)
    return markdown(text)


def speed(rows: pd.DataFrame) -> str:
    """Return how fast the embedded forecasters are."""
    part = rows.set_index("forecaster")
    found = pd.DataFrame(
        {
            "processes a second": part["processes_per_s"],
            "with a job's times, a second": part["jobs_per_s"],
            "one device, ms": part["one_device_ms"],
        }
    )
    observed = f"\n\nObserving: {part['observations_per_s'].iloc[0]:,.0f} devices a second."
    return markdown(found, digits=1) + observed


def written() -> dict[Path, str]:
    """Return the pages with all of their tables written from the results."""
    recorded = {
        name: pd.DataFrame(read_result(name)["rows"])
        for name in ("forecasting", "forecasting_speed", "own_outcomes")
    }
    rows, tables = recorded["forecasting"], {"speed": speed(recorded["forecasting_speed"])}
    for fleet, of_fleet in rows.groupby("fleet"):
        first = of_fleet[of_fleet["seed"].eq(0) & of_fleet["forecaster"].isin(["lstm", "any"])]
        tables[f"{fleet} any"] = markdown(chances(first, "skill"))
        part = of_fleet[~of_fleet["forecaster"].eq("any")]
        tables[f"{fleet} skill"] = markdown(chances(part, "skill"), best="max")
        errors = chances(part, "ece")
        tables[f"{fleet} error"] = markdown(
            errors.loc[errors.index.isin(["linear", "perceptron", "lstm", "boosting"])]
        )
        tables[f"{fleet} difference"] = differences(part)
        tables[f"{fleet} coverage"] = coverage(part)
        own = recorded["own_outcomes"]
        tables[f"{fleet} own"] = own_outcomes(own[own["fleet"].eq(fleet)])
    seeds = ", ".join(map(str, sorted(rows["seed"].unique())))
    tables["seeds"] = (
        "Numbers are means over divisions of the devices, each trained anew\n"
        f"(seeds {seeds}). Times of jobs are of the first."
    )
    tables["recurrence"] = recurrence(rows)
    phones = rows[rows["fleet"].eq("phones")]
    for channel in ("compute", "downlink"):
        for metric in ("pinball", "coverage"):
            tables[f"{channel} {metric}"] = rates(phones, channel, metric)
    return refilled(PAGES, tables)


def main() -> None:
    """Write the tables."""
    rewrite(written())


if __name__ == "__main__":
    main()
