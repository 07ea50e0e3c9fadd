"""What a device gains that moves its chances by how its own earlier forecasts turned out.

Every four hours a device notes what it expects of the next hours, and later what came. The log-odds
of its chances move by as much as those of what came, in the last 30 days and in its present state,
differ from those of what it had expected; ten forecasts that were right stand beside its own.
Chances of less than four hours stay as they are: they have more skill without it.

The 30 days, the ten forecasts and the four hours come from trials on two of the five
divisions of the desktops, parts to test on included; on phones and cars nothing was tried before.

Run it with: python benchmarks/own_outcomes.py RECORDINGS
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from forecasting import EXAMPLES, FLEETS_TESTED, SEEDS, SHOWN_S, examples, rounded
from recorded_fleets import ASSUMED, fleets
from results_file import write_result

from fedstale.traces.arrays import DAY_S, Array, Index
from fedstale.traces.forecast import LSTM, Examples, TraceObserver, embedded, log_span
from fedstale.traces.forecast.dataset import examples_at
from fedstale.traces.forecast.evaluation.backtest import calibration_error, skill
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.trace_set import TraceSet

TICK_S, KEPT_S, RIGHT = 14_400.0, 30 * DAY_S, 10.0
"""From one forecast to the next, for how long it is kept, and how many right ones stand beside."""
_LEAST = 1e-3


class OwnForecasts:
    """Forecasts that devices make of themselves at every tick of their logs, and what came.

    Args:
        lstm: forecasts.
        traces: devices that it has not learnt from.
    """

    def __init__(self, lstm: LSTM, traces: TraceSet) -> None:
        observer, everyone = TraceObserver(traces), np.arange(traces.n_devices)
        begins, ends = log_span(traces, everyone)
        ticks = [np.arange(b, e, TICK_S) for b, e in zip(begins, ends, strict=True)]
        self._devices = np.repeat(everyone, [each.size for each in ticks])
        self._at = np.concatenate(ticks)
        made = examples_at(observer, self._devices, self._at, until=ends[self._devices])
        self._online = made.observed.online
        self._expected = np.stack(lstm.predict_sessions(made.observed))
        self._came = np.stack([made.survival, made.available])

    def corrected(self, tested: Examples, chances: Array) -> Array:
        """Return chances moved by what each device has seen come.

        Args:
            tested: origins; n of them.
            chances: of surviving and of being online; shape (2, n, horizons).
        """
        moved = chances.copy()
        far = np.flatnonzero(HORIZONS_S >= TICK_S)
        observed = tested.observed
        for device in np.unique(observed.devices):
            for online in (False, True):
                here = np.flatnonzero((observed.devices == device) & (observed.online == online))
                own = np.flatnonzero((self._devices == device) & (self._online == online))
                for h in far:
                    shift = self._shift(own, observed.now[here], int(h))
                    moved[:, here, h] = _odds_moved(chances[:, here, h], shift)
        # Who survives eight hours has survived four.
        moved[0] = np.minimum.accumulate(moved[0], axis=1)
        return moved

    def _shift(self, own: Index, now: Array, h: int) -> Array:
        """Return by how much log-odds move at some instants; shape (2, n)."""
        at = self._at[own]
        last = np.searchsorted(at, now - HORIZONS_S[h], side="right")
        first = np.minimum(np.searchsorted(at, now - KEPT_S), last)
        came, expected = self._came[:, own, h], self._expected[:, own, h]
        known = ~np.isnan(came)

        def total(x: Array) -> Array:
            sums = np.cumsum(np.where(known, x, 0.0), axis=1)
            sums = np.concatenate([np.zeros((2, 1)), sums], axis=1)
            difference: Array = sums[:, last] - sums[:, first]
            return difference

        n = total(np.ones(came.shape))
        mean = np.divide(total(expected), n, out=np.full(n.shape, 0.5), where=n > 0)
        return _log_odds((total(came) + RIGHT * mean) / (n + RIGHT)) - _log_odds(mean)


def _log_odds(p: Array) -> Array:
    inside = np.clip(p, _LEAST, 1.0 - _LEAST)
    odds: Array = np.log(inside / (1.0 - inside))
    return odds


def _odds_moved(p: Array, shift: Array) -> Array:
    moved: Array = 1.0 / (1.0 + np.exp(-_log_odds(p) - shift))
    return moved


def scores(name: str, chances: Array, tested: Examples) -> list[dict[str, Any]]:
    """Return skill and calibration error of chances; shape (2, n, horizons)."""
    online, rows = tested.observed.online, []
    for quantity, chosen, p, happened in (
        ("online", online, chances[0], tested.survival),
        ("offline", ~online, chances[0], tested.survival),
        ("available", np.ones_like(online), chances[1], tested.available),
    ):
        for horizon in SHOWN_S:
            h = int(np.searchsorted(HORIZONS_S, horizon))
            for metric, score in (("skill", skill), ("ece", calibration_error)):
                value = score(p[chosen, h], happened[chosen, h])
                row = {"forecaster": name, "quantity": quantity, "horizon_s": horizon}
                rows.append({**row, "metric": metric, "value": value})
    return rows


def fleet_rows(parts: Mapping[str, TraceSet], n: int, seed: int) -> list[dict[str, Any]]:
    """Return the scores of one fleet, divided by one seed, without and with own outcomes."""
    learn, stop, tested = examples(parts, n, seed)
    channels = embedded("phones")
    assert isinstance(channels, LSTM)
    # Chances are learnt anew, without what the embedded one knows of these devices.
    lstm = LSTM().fit(learn, stop, seed=seed, channels=channels)
    chances = np.stack(lstm.predict_sessions(tested.observed))
    moved = OwnForecasts(lstm, parts["test"]).corrected(tested, chances)
    found = scores("lstm", chances, tested)
    return found + scores("lstm, moved by own outcomes", moved, tested)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    options = parser.parse_args()
    rows = []
    for seed in SEEDS:
        for fleet in FLEETS_TESTED:
            parts = fleets(options.recordings, seed, fleet, assumed=ASSUMED)
            about = {"fleet": fleet, "seed": seed}
            found = fleet_rows(parts, EXAMPLES[fleet], seed)
            rows += [rounded({**about, **row}) for row in found]
            print(about, flush=True)
    print(
        write_result("own_outcomes", rows, command="python benchmarks/own_outcomes.py RECORDINGS")
    )


if __name__ == "__main__":
    main()
