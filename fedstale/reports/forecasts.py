"""Whether devices kept their word: what they said of a job before it was sent, and what came of it.

Runs in which no device forecasts itself, and runs written before the column was, have no figure.
"""

from typing import Any

import numpy as np

from fedstale.reports.figure import Figure, numbers
from fedstale.reports.run_record import RunRecord
from fedstale.simulation.jobs import FLYING, UNCLAIMED
from fedstale.strategies.server.runtime import CLIENT_ERROR, REJECTED, REPORTED

BINS = 10
FEWEST = 5
"""Jobs behind a point of the curve at least; fewer say more about chance than about a forecast."""
_CAME_BACK = (REPORTED, REJECTED, UNCLAIMED)


def reliability(run: RunRecord) -> Figure | None:
    """Return how often jobs came back against how likely their devices had said that is.

    A job came back if its reply arrived before its message expired, whatever the server made of it.
    Jobs that were out when the run ended, and those in which the app failed, are left out.
    """
    if "reported_p_finish" not in run.events:
        return None
    status = run.events["status"].to_numpy(object)
    said = run.events["reported_p_finish"].to_numpy(np.float64)
    known = np.isfinite(said) & (status != FLYING) & (status != CLIENT_ERROR)
    if not known.any():
        return None
    said, happened = said[known], np.isin(status[known].astype(str), _CAME_BACK)
    which = np.minimum((said * BINS).astype(np.int64), BINS - 1)
    n = np.bincount(which, minlength=BINS)
    some = np.flatnonzero(n)
    x = np.bincount(which, said, BINS)[some] / n[some]
    y = np.bincount(which, happened, BINS)[some] / n[some]
    shown = n[some] >= FEWEST
    brier = float(np.mean((said - happened) ** 2))
    base = float(happened.mean())
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "devices",
            "meta": "series-0",
            "line": {"width": 2},
            "marker": {"size": 7},
            "x": numbers(x[shown]),
            "y": numbers(y[shown]),
            "text": [f"{count:,} jobs" for count in n[some][shown]],
            "hovertemplate": "said %{x:.0%}, came back %{y:.0%}, %{text}",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "as said",
            "meta": "still",
            "hoverinfo": "skip",
            "line": {"width": 1, "dash": "dash"},
            "x": [0.0, 1.0],
            "y": [0.0, 1.0],
        },
    ]
    share = {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return Figure(
        id="reliability",
        title="Did devices keep their word?",
        about=f"Of {len(said):,} training jobs their devices had said how likely they would finish "
        f"the next one: on average {said.mean():.0%}, and {base:.0%} came back in time. "
        f"Brier score {brier:.3f}; always saying {base:.0%} has {base * (1 - base):.3f}. "
        f"Points stand for {FEWEST} jobs or more.",
        traces=[trace for trace in traces if trace["x"]],
        x_title="said",
        y_title="came back",
        layout={"xaxis": share, "yaxis": share},
        header=("said", "came back", "jobs"),
        rows=[
            (f"{a:.2f}", f"{b:.2f}", f"{count:,}")
            for a, b, count in zip(x, y, n[some], strict=True)
        ],
    )
