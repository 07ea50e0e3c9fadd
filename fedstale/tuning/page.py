"""The page of a search: what configurations came to at each rung, which stopped, and what held."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.reports.figure import Figure, curve, time_unit
from fedstale.reports.page import write_figures
from fedstale.tuning.space import Space
from fedstale.tuning.trials import Trial

_LOOKS = {"complete": 0, "stopped": 1, "failed": 2, "open": 3}
"""Numbers of the colour, the dash and the marker of each way to end."""
_WORDS = {
    "complete": "came to the end",
    "stopped": "stopped at a rung",
    "failed": "failed",
    "open": "not over",
}


def write_page(
    space: Space,
    trials: Sequence[Trial],
    out: Path,
    *,
    lead: str,
    table: pd.DataFrame,
    front: set[int],
    held_out: pd.DataFrame,
    by_chance: bool,
    texts: Mapping[str, str],
) -> Path:
    """Write the page of a search, and return it.

    Args:
        space: that was searched.
        trials: all configurations.
        out: file to write.
        lead: what the held-out runs say.
        table: one row a configuration.
        front: numbers of the configurations that none beats, of several objectives.
        held_out: the table in words of the comparison on held-out seeds and devices.
        by_chance: whether configurations were proposed without regard to what others came to.
        texts: texts below the figures, by title.

    Raises:
        ConfigError: the page cannot be written.
    """
    figures = [_rungs(space, trials, i) for i in range(len(space.objectives))]
    if len(space.objectives) > 1:
        figures.append(_front(space, trials, front))
    n_failed = sum(trial.status == "failed" for trial in trials)
    n_stopped = sum(trial.status == "stopped" for trial in trials)
    cards = [
        ("configurations", str(len(trials))),
        ("stopped at a rung", str(n_stopped)),
        ("failed", str(n_failed)),
        ("tuning seeds", str(len(space.seeds))),
        ("held-out seeds", str(len(space.held_out["seeds"]))),
    ]
    shown = table.map(lambda value: "-" if pd.isna(value) else _text(value))
    return write_figures(
        "Settings searched on device time",
        lead,
        [figure for figure in figures if figure.traces],
        out,
        cards=cards,
        tables={
            "On held-out seeds and devices": held_out,
            **({IMPORTANCE: importance(space, trials)} if by_chance else {}),
            "The configurations": shown,
        },
        hidden=""
        if by_chance
        else "The importance of settings: TPE and NSGA-II propose what did well before, so that no "
        "measure of it would be a fair one; a search by random or grid shows it.",
        texts=texts,
    )


IMPORTANCE = "What each key alone explains at the first rung"
_GROUPS = 4


def importance(space: Space, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return the share of the variance at the first rung that each key alone explains.

    All configurations come to the first rung, later ones only those that did well. The share is
    that between groups, adjusted for their number (Kelley's epsilon squared) and at least 0: equal
    values are a group, or neighbouring ones, where a key has more than four. What keys do only
    together is in no share.

    Args:
        space: that was searched, without regard to what came of it.
        trials: all configurations; failed ones are left out.

    References:
        Kelley. An Unbiased Correlation Ratio Measure. PNAS 21(9), 1935.
    """
    first = [
        (trial.parameters, trial.reports[0].values[0])
        for trial in trials
        if trial.reports and np.isfinite(trial.reports[0].values[0])
    ]
    values = np.array([value for _, value in first])
    rows = []
    for key, domain in space.domains.items():
        given = pd.Series([parameters[key] for parameters, _ in first], dtype=object)
        groups = given.astype(str)
        if domain.is_numeric and given.nunique() > _GROUPS:
            groups = pd.qcut(given.astype(float), _GROUPS, duplicates="drop").astype(str)
        n, k = values.size, groups.nunique()
        within = float(
            pd.Series(values).groupby(groups).transform(lambda x: (x - x.mean()) ** 2).sum()
        )
        total = float(((values - values.mean()) ** 2).sum()) if n else 0.0
        known = n > k > 1 and total > 0.0
        share = max(1.0 - within / (n - k) * (n - 1) / total, 0.0) if known else np.nan
        rows.append({"key": key, "share of the variance": share, "groups": k, "configurations": n})
    found = pd.DataFrame(rows).sort_values("share of the variance", ascending=False)
    shares = found["share of the variance"].map(lambda x: "-" if np.isnan(x) else f"{x:.2f}")
    return found.assign(**{"share of the variance": shares})


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rungs(space: Space, trials: Sequence[Trial], number: int) -> Figure:
    """Return an objective against device time, a line a configuration."""
    unit, length_s = time_unit(space.until_s)
    objective, named = space.objectives[number], set[str]()
    traces = []
    for trial in trials:
        if not trial.reports:
            continue
        x = np.array([space.instants_s[report.rung] for report in trial.reports]) / length_s
        y = [report.values[number] for report in trial.reports]
        words = {
            "text": [f"configuration {trial.number}"] * len(y),
            "hovertemplate": "%{text}: %{y} at %{x}",
            "showlegend": trial.status not in named,
        }
        named.add(trial.status)
        name, look = _WORDS[trial.status], _LOOKS[trial.status]
        traces.append(curve(name, look, x, y, mode="lines+markers", **words))
    better = "lower" if objective.is_lower_better else "higher"
    return Figure(
        id=f"rungs-{number}",
        title=f"{objective.text} at the rungs",
        about=f"A line is a configuration's {objective.in_words}, in the mean over the tuning "
        f"seeds; {better} is better. A run that has not reached its target counts with all of its "
        "time.",
        traces=traces,
        x_title=f"device time ({unit})",
        y_title=objective.unit,
        is_wide=True,
        header=["configuration", "how it ended", *(f"at {s:,.0f} s" for s in space.instants_s)],
        rows=[
            [str(trial.number), _WORDS[trial.status], *_values(space, trial, number)]
            for trial in trials
        ],
    )


def _values(space: Space, trial: Trial, number: int) -> list[str]:
    known = {report.rung: report.values[number] for report in trial.reports}
    return [f"{known[i]:.4g}" if i in known else "-" for i in range(len(space.instants_s))]


def _front(space: Space, trials: Sequence[Trial], front: set[int]) -> Figure:
    """Return the first two objectives at the end against one another."""
    first, second = space.objectives[:2]
    over = [trial for trial in trials if trial.status == "complete"]
    traces = []
    for name, is_on, look in (("on the front", True, 0), ("beaten", False, 1)):
        some = [trial for trial in over if (trial.number in front) == is_on]
        if some:
            x, y = ([trial.reports[-1].values[i] for trial in some] for i in (0, 1))
            words = {
                "text": [f"configuration {trial.number}" for trial in some],
                "hovertemplate": "%{text}: %{x}, %{y}",
            }
            traces.append(curve(name, look, x, y, mode="markers", **words))
    return Figure(
        id="front",
        title="What no configuration beats",
        about="The first two objectives at the end. On the front are configurations than which no "
        "other is at least as good in all objectives and better in one.",
        traces=traces,
        x_title=first.unit,
        y_title=second.unit,
    )
