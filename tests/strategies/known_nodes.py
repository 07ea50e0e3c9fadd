"""Candidates made of what is known of each node, for selectors."""

from math import nan
from statistics import median

import numpy as np

from fedstale.strategies.server.clients import DURATIONS_KEPT, Candidates, Table


def listed(nodes):
    """Return candidates of which each is given by fields of `Candidate`; the rest is unknown."""
    nodes = list(nodes)
    table = Table(len(nodes))
    for row, node in enumerate(nodes):
        for name in node.keys() & table.columns.keys() - {"durations_s"}:
            table.columns[name][row] = node[name]
        table.note_forecast(row, node.get("forecast", {}), node.get("forecast_at", nan))
        durations = node.get("durations_s", ())
        for k, seconds in enumerate(durations[-DURATIONS_KEPT:]):
            table.columns["durations_s"][row, k] = seconds
        table.columns["duration_s"][row] = median(durations) if durations else nan
    return Candidates([node["node_id"] for node in nodes], table, np.arange(len(nodes)))
