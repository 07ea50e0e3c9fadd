"""How stale the aggregated updates were, and what weight they were given."""

from typing import TYPE_CHECKING

import numpy as np

from fedstale.reports.figure import Array, Figure, bars, curve, thinned

if TYPE_CHECKING:
    from fedstale.reports.run import Run

PAIRS = 800
"""Pairs of staleness and weight that the figure of weights shows at most."""
_BARS = 60
_GAPS, _ROWS = 40, 60


def figures(run: "Run") -> list[Figure]:
    """Return the distributions of staleness and weight; nothing where it states none."""
    staleness = run.jobs["staleness"].to_numpy(np.float64)
    weight = run.jobs["weight"].to_numpy(np.float64)
    found = []
    if np.isfinite(staleness).any():
        known = staleness[np.isfinite(staleness)]
        step = max(1, int(np.ceil((known.max() + 1) / _BARS)))
        edges = np.arange(0, known.max() + 1 + step, step)
        counts = np.histogram(known, edges)[0]
        trace = bars("updates", "series-0", edges - 0.5, counts, share=0.9)
        found.append(
            Figure(
                id="staleness",
                title="Staleness of aggregated updates",
                about=f"{len(known):,} aggregated updates; median {np.median(known):g}, 90% at "
                f"most {np.quantile(known, 0.9):g}, largest {known.max():g}.",
                traces=[trace],
                x_title="staleness (model versions)",
                y_title="updates",
                header=("staleness", "updates"),
                rows=[
                    (f"{low:g}" if step == 1 else f"{low:g} to {low + step - 1:g}", f"{count:,}")
                    for low, count in zip(edges[:-1], counts, strict=True)
                ],
            )
        )
    known_both = np.flatnonzero(np.isfinite(weight) & np.isfinite(staleness))
    if len(known_both):
        found.append(_weights(staleness[known_both], weight[known_both]))
        found += _divisors(weight[known_both])
    return found


def _weights(staleness: Array, weight: Array) -> Figure:
    # Most rules give all updates of one staleness one weight: a dot a pair, not a dot an update.
    pairs = np.stack([staleness, np.round(weight, 4)], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    kept = thinned(len(distinct), PAIRS)
    about = (
        f"Weights from {weight.min():.3g} to {weight.max():.3g}, mean {weight.mean():.3g}. One dot "
        f"for each pair of staleness and weight, of {len(weight):,} updates."
    )
    if len(kept) < len(distinct):
        about += f" {PAIRS:,} of {len(distinct):,} pairs are drawn, evenly spread."
    trace = curve(
        "updates",
        "series-3",
        distinct[kept, 0],
        distinct[kept, 1],
        mode="markers",
        showlegend=False,
        marker={"size": 7, "opacity": 0.7},
        customdata=counts[kept].tolist(),
        hovertemplate="staleness %{x}, weight %{y}: %{customdata} updates<extra></extra>",
    )
    return Figure(
        id="weights",
        title="Weight against staleness",
        about=about,
        traces=[trace],
        x_title="staleness (model versions)",
        y_title="weight",
        layout={"yaxis": {"rangemode": "tozero"}},
        header=("staleness", "updates", "weight: 10%", "median", "90%"),
        rows=[
            (f"{age:g}", f"{len(of):,}", *(f"{q:.3f}" for q in np.quantile(of, (0.1, 0.5, 0.9))))
            for age in np.unique(staleness)[:_ROWS]
            for of in (weight[staleness == age],)
        ],
    )


def _divisors(weight: Array) -> list[Figure]:
    """Return what updates were divided by, which is the gap G of Gap-Aware; nothing if all by 1."""
    gap = 1.0 / weight[weight > 0]
    if not len(gap) or np.allclose(gap, 1.0):
        return []
    low, high = float(gap.min()), float(gap.max())
    edges = np.linspace(low, high if high > low else low + 1.0, _GAPS + 1)
    counts = np.histogram(gap, edges)[0]
    trace = bars("updates", "series-4", edges, counts)
    silent = len(weight) - len(gap)
    about = (
        "1 / weight of each aggregated update; under Gap-Aware this is its gap G, the mean over "
        f"parameters. Median {np.median(gap):.3g}, 90% at most {np.quantile(gap, 0.9):.3g}, "
        f"largest {high:.3g}."
    )
    return [
        Figure(
            id="gaps",
            title="What updates were divided by",
            about=about + (f" {silent:,} updates had the weight 0." if silent else ""),
            traces=[trace],
            x_title="1 / weight",
            y_title="updates",
            layout={"bargap": 0},
        )
    ]
