"""The pages of forecasters: of a backtest, and of the losses of a training.

A backtest shows who forecasts best, how reliable probabilities are, and how wide a forecast is.
Every curve differs in colour, dash and marker, so that no reader needs to tell colours apart.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedstale.reports.figure import (
    AROUND_PX,
    FROM_ZERO,
    LONGEST,
    MARKERS,
    ROW_PX,
    SHARES,
    Figure,
    Row,
    curve,
    forest,
    marks,
    named_rows,
    reference,
    time_unit,
)
from fedstale.traces.forecast.evaluation import SURVIVAL_S, TITLES, error_text, span_text, why_empty

PAGE = "backtest.html"
TRAINING_PAGE, LOSSES = "training.html", "losses.csv"
_RATES = {
    "compute": ("processor", "work units/s", 1.0),
    "downlink": ("downlink", "Mbit/s", 1e6),
    "uplink": ("uplink", "Mbit/s", 1e6),
}
_QUANTITIES = {
    "available": "being online later, whatever happens until then",
    "online": "staying online",
    "offline": "staying offline",
    "compute": "the processor's mean rate",
    "downlink": "the downlink's mean rate",
    "uplink": "the uplink's mean rate",
}
_JOBS = {
    "training_s": ("pinball", "Time to train", "log s"),
    "reporting_s": ("pinball", "Time to upload", "log s"),
    "total_s": ("pinball", "Whole time of the job", "log s"),
    "finish": ("brier", "Probability to finish, error", ""),
}
_FIRST = ("verdict", "ranking-available", "job-total_s", "ranking-compute", "reliability-finish")
"""Figures by which a backtest is read, in this order."""
N_OPEN = 3
# Instants of a fan with a number on the axis, in min.
_FAN_MIN = [-120, -60, 0, 60, 120]
# A bin with fewer is mostly noise.
_FEWEST = 10
# What is worse than these stands at them: one bad horizon would hide all other differences.
_WORST = {"skill": -1.0, "mase": 3.0}


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return the figures of the tables that are not empty.

    Args:
        tables: from `fedstale.traces.forecast.evaluation.backtested`.
    """
    drawn = [*_verdict(tables), *_rankings(tables), *_jobs(tables)]
    if "reliability" in tables:
        what = "to finish the job by its deadline"
        drawn.append(_reliability("finish", "Probability to finish", what, tables["reliability"]))
    if "survival" in tables:
        for horizon, table in tables["survival"].groupby("horizon_s"):
            horizon_s = float(str(horizon))
            span = _span(horizon_s)
            title = f"Probability to stay online for {span}"
            what = f"to stay online for another {span}"
            drawn.append(_reliability(f"survival-{horizon_s:.0f}", title, what, table))
    if "fan" in tables:
        fans = tables["fan"]
        names = [name for name in fans["forecaster"].unique() if name]
        drawn += [
            _fan(str(channel), part, str(names[-1]))
            for channel, part in fans.groupby("channel", sort=False)
            if names
        ]
    shown = [figure for figure in drawn if figure.traces]
    ranks = {name: rank for rank, name in enumerate(_FIRST)}
    return sorted(shown, key=lambda figure: ranks.get(figure.id, len(ranks)))


def hidden(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return which tables have no figure, and why, in sentences; nothing if all have one.

    Args:
        tables: as of `figures`.
    """
    drawn = {figure.id for figure in figures(tables)}
    names = {"fan": "A forecast of rates", "survival": "Probability to stay online", **TITLES}
    found = [
        f"{title}: {why[0].lower()}{why[1:]}"
        for name, title in names.items()
        if (why := why_empty(name, tables))
    ]
    chances = {f"survival-{s:.0f}": f"stay online for {_span(s)}" for s in SURVIVAL_S}
    for name, what in {"finish": "finish", **chances}.items():
        kind = "reliability" if name == "finish" else "survival"
        if f"reliability-{name}" not in drawn and not why_empty(kind, tables):
            found.append(f"Probability to {what}: no bin has {_FEWEST} forecasts.")
    scores = tables.get("horizons")
    if scores is not None and len(scores):
        without = [name for name in _QUANTITIES if f"ranking-{name}" not in drawn]
        found += [f"Ranking of {name}: {_why_unranked(scores, name)}" for name in without]
    return " ".join(found)


def _span(horizon_s: float) -> str:
    unit, length_s = time_unit(horizon_s)
    return f"{horizon_s / length_s:g} {unit}"


def _why_unranked(scores: pd.DataFrame, quantity: str) -> str:
    """Return why forecasts of a quantity have no ranking."""
    if not scores["quantity"].eq(quantity).any():
        return "no forecast of it has an outcome in the record."
    return "no score of it is a number, as where all or nothing happened."


def _verdict(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return each forecaster's share of persistence's loss, the best on top."""
    if "verdict" not in tables:
        return []
    table, rows = tables["verdict"], []
    numbers = table[["share", "low", "high", "blocks"]].to_numpy(dtype=np.float64)
    names = map(str, table["forecaster"])
    for i, (name, (share, low, high, n)) in enumerate(zip(names, numbers, strict=True)):
        text, ends = f"{share:.2f} [{low:.2f}, {high:.2f}]", {"low": low, "high": high}
        rows.append(Row(name=name, look=i, text=text, n=int(n), value=share, **ends))
    return [
        forest(
            "verdict",
            "Share of persistence's loss",
            "Of the chances to be online later and of the rates, together; left is better, and at "
            "more than 1 persistence is.",
            rows,
            x_title="share of persistence's loss (left is better)",
            level=1.0,
            header=("forecaster", "share and interval", "devices or days"),
        )
    ]


def _rankings(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return the scores by horizon of each quantity, a row a forecaster, the best on top."""
    if "horizons" not in tables:
        return []
    table = tables["horizons"]
    looks = {str(name): i for i, name in enumerate(table["forecaster"].unique())}
    return [
        _ranking(str(quantity), part, str(part["metric"].iloc[0]), looks)
        for quantity, part in table[table["metric"].isin(list(_WORST))]
        .dropna(subset="value")
        .groupby("quantity", sort=False)
    ]


def _ranking(quantity: str, part: pd.DataFrame, metric: str, looks: Mapping[str, int]) -> Figure:
    """Return a row of marks for each forecaster: one a horizon, and a large one at their median."""
    is_skill, worst = metric == "skill", _WORST[metric]
    middles = part.groupby("forecaster")["value"].median().sort_values(ascending=not is_skill)
    horizons = [float(h) for h in sorted(part["horizon_s"].unique())]
    values = part.pivot(index="forecaster", columns="horizon_s", values="value").loc[middles.index]
    traces = []
    for i, name in enumerate(str(name) for name in middles.index):
        # One may have no score at a horizon where others have.
        own = values.loc[name].dropna()
        for x, text, hollow, size in (
            (own, [f"at {span_text(float(str(h)))}: {v:.3f}" for h, v in own.items()], "-open", 7),
            (middles[[name]], [f"median {middles[name]:.3f}"], "", 11),
        ):
            shown = np.clip(x, worst, None) if is_skill else np.clip(x, None, worst)
            marker = {"size": size, "symbol": f"{MARKERS[looks[name] % len(MARKERS)]}{hollow}"}
            words: dict[str, Any] = {"text": text, "hovertemplate": f"{name}, %{{text}}"}
            words["marker"] = marker
            traces.append(marks(name, looks[name], shown.tolist(), [i] * len(x), **words))
    best = (
        "right is better, 1 is perfect, 0 the share in this test"
        if is_skill
        else ("left is better, 1 is the error of the last value on the training part")
    )
    return Figure(
        id=f"ranking-{quantity}",
        title=f"Forecasts of {_QUANTITIES[quantity]}, ranked",
        about=f"{'Brier skill' if is_skill else 'MASE'}: {best}. Hollow marks are horizons, from "
        f"{span_text(horizons[0])} to {span_text(horizons[-1])}; the large one is their median. "
        f"What is worse than {worst:g} stands there.",
        traces=traces,
        x_title=f"{'Brier skill' if is_skill else 'MASE'} ({'right' if is_skill else 'left'} is "
        "better)",
        layout={"yaxis": named_rows([str(name) for name in middles.index], longest=LONGEST)},
        height=AROUND_PX + ROW_PX * len(middles),
        header=["forecaster", "median", *map(span_text, horizons)],
        rows=[
            [str(name), *(f"{v:.3f}" if np.isfinite(v) else "-" for v in (middles[name], *row))]
            for name, row in zip(middles.index, values.to_numpy(), strict=True)
        ],
    )


def _jobs(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return the scores of a job's times and chances, the best on top."""
    if "jobs" not in tables:
        return []
    table, found = tables["jobs"], []
    looks = {str(name): i for i, name in enumerate(table["forecaster"].unique())}
    for quantity, (metric, title, unit) in _JOBS.items():
        of_quantity = table[table["quantity"].eq(quantity)].set_index("forecaster")
        part = of_quantity[of_quantity["metric"].eq(metric)].dropna(subset="value")
        errors = of_quantity[of_quantity["metric"].eq("median_error_s")]["value"]
        rows = []
        part = part.sort_values("value", kind="stable")
        numbers = part[["value", "low", "high", "n"]].to_numpy(dtype=np.float64)
        for name, (value, low, high, n) in zip(map(str, part.index), numbers, strict=True):
            interval = f" [{low:.3f}, {high:.3f}]" if np.isfinite(low) else ""
            median = f", median error {error_text(errors[name])}" if name in errors.index else ""
            text = f"{value:.3f}{interval}{median}"
            ends = {"value": value, "low": low, "high": high}
            rows.append(Row(name=name, look=looks[name], text=text, n=int(n), **ends))
        # Corrections of times leave the probability to finish as it is.
        if quantity == "finish":
            rows = [row for row in rows if " + " not in row.name]
        score = "Brier score" if metric == "brier" else "pinball loss of 80 % intervals"
        found.append(
            forest(
                f"job-{quantity}",
                f"{title}, ranked",
                f"{score[0].upper()}{score[1:]} by forecaster, the best on top; left is better.",
                rows,
                x_title=f"{score}{f', {unit}' if unit else ''} (left is better)",
                level=None,
                header=("forecaster", "score and interval", "jobs"),
            )
        )
    return found


def _reliability(name: str, title: str, what: str, table: pd.DataFrame) -> Figure:
    """Return the reliability curves of a probability, one a forecaster."""
    shown = table[table["n"] >= _FEWEST]
    traces = [
        curve(
            str(forecaster),
            i,
            one["predicted"],
            one["observed"],
            mode="lines+markers",
            text=[f"{n:,.0f} forecasts" for n in one["n"]],
            hovertemplate="forecast %{x:.0%}, observed %{y:.0%}, %{text}",
        )
        for i, forecaster in enumerate(table["forecaster"].unique())
        for one in (shown[shown["forecaster"] == forecaster],)
        if len(one)
    ]
    if traces:
        traces.append(reference("as forecast", [0.0, 1.0], [0.0, 1.0]))
    return Figure(
        id=f"reliability-{name}",
        title=title,
        about=f"How often devices that were forecast {what} with a probability did; on the "
        f"diagonal as often as forecast. Points stand for {_FEWEST} forecasts or more.",
        traces=traces,
        x_title="forecast",
        y_title="observed",
        layout=SHARES,
        height=380,
        header=["forecaster", "forecast", "observed", "forecasts"],
        rows=[
            [str(row.forecaster), f"{row.predicted:.2f}", f"{row.observed:.2f}", f"{row.n:,.0f}"]
            for row in shown.itertuples()
        ],
    )


def _fan(channel: str, table: pd.DataFrame, forecaster: str) -> Figure:
    """Return the fan of a rate, by one forecaster."""
    what, unit, size = _RATES[channel]
    past = table[table["forecaster"] == ""]
    ahead = table[table["forecaster"] == forecaster]
    device, now = table["device_id"].iloc[0], float(table["now"].iloc[0])
    minutes = np.concatenate([past["offset_s"], ahead["offset_s"]]) / 60.0
    actual = np.concatenate([past["actual"], ahead["actual"]]) / size

    dots = {"mode": "lines+markers", "marker": {"size": 4}}

    def quantile(name: str, column: str, **more: object) -> dict[str, Any]:
        x, y = ahead["offset_s"] / 60.0, ahead[column] / size
        return curve(name, "series-0", x, y, hoverinfo="skip", **more)

    return Figure(
        id=f"fan-{channel}",
        title=f"The {what} of one device, by {forecaster}",
        about=f"Device {device} at {now / 3600.0:.1f} h: the middle one of the test, not picked by "
        "its values. Left of 0, means of five minutes; right of it, the mean rate from now to that "
        "minute, as forecast and as it came.",
        traces=[
            quantile("10 %", "q10", line={"width": 0}, showlegend=False),
            quantile("80 % of futures", "q90", line={"width": 0}, fill="tonexty"),
            quantile("median", "q50", line={"width": 2, "dash": "dash"}),
            curve("what the device did", "series-1", minutes, actual, **dots),
        ],
        x_title="time from now (min)",
        y_title=f"{what} ({unit})",
        layout={
            "yaxis": FROM_ZERO,
            "xaxis": {"tickvals": _FAN_MIN, "ticktext": [f"{minutes}" for minutes in _FAN_MIN]},
        },
        header=["until, min", "10 %", "median", "90 %", "came"],
        rows=[
            [f"{row[0] / 60.0:g}", *(f"{value / size:.3g}" for value in row[1:])]
            for row in ahead[["offset_s", "q10", "q50", "q90", "actual"]].to_numpy()
        ],
    )


def losses(table: pd.DataFrame) -> list[Figure]:
    """Return the losses of each network of a training against its epochs.

    Args:
        table: what `fedstale forecaster train` records: network, epoch, training, validation.
    """
    return [_losses(str(network), part) for network, part in table.groupby("network", sort=False)]


def _losses(network: str, part: pd.DataFrame) -> Figure:
    best = part.iloc[int(part["validation"].to_numpy().argmin())]
    of_what = "sessions" if network == "sessions" else f"the {network} rate"
    kept = [int(best["epoch"])], [float(best["validation"])]
    marker: dict[str, Any] = {"marker": {"size": 13, "symbol": "circle-open"}, "mode": "markers"}
    dots: dict[str, Any] = {"mode": "lines+markers"}
    return Figure(
        id=f"loss-{network}",
        title=f"The network of {of_what}",
        about=f"Loss after each epoch. Epoch {kept[0][0]} is the best on the validation devices "
        f"({kept[1][0]:.4f}), and its weights are kept. Training drops a share of the network's "
        "outputs, so its loss may lie above that of the validation.",
        traces=[
            curve("training", 0, part["epoch"], part["training"], **dots),
            curve("validation", 1, part["epoch"], part["validation"], **dots),
            curve("kept", "series-1", *kept, **marker),
        ],
        x_title="epoch",
        y_title="loss",
        layout={"xaxis": FROM_ZERO},
        header=["epoch", "training", "validation"],
        rows=[
            [str(row.epoch), f"{row.training:.4f}", f"{row.validation:.4f}"]
            for row in part.itertuples()
        ],
    )
