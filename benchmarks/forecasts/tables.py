"""Tables of forecasts: a row a forecaster, a column a question of chances, rates or times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

HORIZONS_S = {
    "online": (900.0, 1800.0, 3600.0, 14_400.0, 86_400.0),
    "offline": (3600.0, 14_400.0, 86_400.0),
    "available": (3600.0, 14_400.0, 86_400.0),
}
"""What is shown, of each quantity."""
WORDS = {"online": "stays", "offline": "back in", "available": "online in"}
Row = dict[str, Any]


def duration(seconds: float) -> str:
    """Return a duration in its largest whole unit, such as 15 min; a day is 24 h."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the questions that are shown."""
    return [row for row in rows if row["horizon_s"] in HORIZONS_S.get(row["quantity"], ())]


def _by_question(rows: Sequence[Row]) -> list[tuple[str, pd.DataFrame]]:
    found = pd.DataFrame(list(rows))
    return [
        (
            f"{WORDS[quantity]} {duration(horizon)}",
            found[found["quantity"].eq(quantity) & found["horizon_s"].eq(horizon)],
        )
        for quantity, horizons in HORIZONS_S.items()
        for horizon in horizons
    ]


def by_fleet(rows: Sequence[Row], table: Callable[[Sequence[Row]], pd.DataFrame]) -> pd.DataFrame:
    """Return a table of each fleet, one below the other."""
    found = pd.DataFrame(list(rows)).groupby("fleet", sort=False)
    made = [(fleet, table(of_it.to_dict("records"))) for fleet, of_it in found]
    return pd.concat([each.rename(f"{fleet}, {{}}".format) for fleet, each in made])


def errors(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the calibration errors of chances, by fleet and forecaster."""
    return by_fleet(rows, partial(chances, metric="ece"))


def skills(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the skill of chances, by fleet and forecaster."""
    return by_fleet(rows, partial(chances, metric="skill"))


def chances(rows: Sequence[Row], metric: str) -> pd.DataFrame:
    """Return one metric of chances, the mean over seeds, a column a question."""
    some = [row for row in rows if row["metric"] == metric]
    return pd.DataFrame(
        {
            question: of_it.groupby("forecaster", sort=False)["value"].mean()
            for question, of_it in _by_question(some)
        }
    )


def differences(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the differences of Brier scores x 1,000, by fleet, with the widest interval."""
    return by_fleet(rows, _differences)


def _differences(rows: Sequence[Row]) -> pd.DataFrame:
    some = [row for row in rows if row["metric"] == "brier difference"]
    columns: dict[str, dict[str, str]] = {}
    for question, of_it in _by_question(some):
        for pair, each in of_it.groupby("forecaster"):
            ends = each["low"].min(), each["value"].mean(), each["high"].max()
            low, mean, high = (f"{1e3 * x:+.1f}" for x in ends)
            columns.setdefault(question, {})[str(pair)] = f"{mean} [{low}, {high}]"
    return pd.DataFrame(columns)


def by_horizon(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the loss of a channel's rates and, in brackets, how often intervals covered.

    A column is a horizon, a number the mean over seeds; the smallest loss of a column is bold.
    """
    losses, covered = (_rates(rows, metric) for metric in ("pinball", "coverage"))
    bold = losses.eq(losses.min())
    shown = losses.map("{:.3f}".format)
    return shown.where(~bold, "**" + shown + "**") + covered.map(" ({:.3f})".format)


def _rates(rows: Sequence[Row], metric: str) -> pd.DataFrame:
    some = pd.DataFrame([row for row in rows if row["metric"] == metric])
    found = some.pivot_table(index="forecaster", columns="horizon_s", values="value", sort=False)
    return found[sorted(found.columns)].rename(columns=duration)


def covered(rows: Sequence[Row]) -> pd.DataFrame:
    """Return how often 80 % intervals of the times of jobs covered, a row a forecaster."""
    some = pd.DataFrame([row for row in rows if row.get("job")])
    links = some["links"].fillna("")
    some = some.assign(
        column=some["job"] + ", " + some["quantity"].str.removesuffix("_s"),
        row=some["forecaster"] + links.where(links == "", ", links of " + links),
    )
    return some.pivot_table("value", "row", "column", sort=False)


def own_outcomes(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the skill and, in brackets, the calibration error, of horizons of four hours on."""
    skill, error = skills(rows), errors(rows)
    far = [column for column in skill if column.endswith((" 4 h", " 24 h"))]
    return skill[far].map("{:.3f}".format) + error[far].map(" ({:.3f})".format)
