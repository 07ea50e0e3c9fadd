"""The fleet by the hour: a chain of two states for staying, and a profile for rates.

Links and processors are at their own mean times what the fleet's are at that hour.
"""

from typing import Self

import numpy as np

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.chain import HOURS, WITHIN, Chain, hour_of
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.forecaster import State
from fedstale.traces.forecast.grid import RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.naive import Simple, log_rate, long_mean
from fedstale.traces.forecast.observation import Observation


class HourlyMarkov(Simple):
    """Two-state Markov chain with hourly rates; rates of links and processors by hour."""

    kind = "hourly-markov"

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(leaving=np.zeros((2, HOURS)))
        self.profile: Array = np.zeros((len(RATES), HOURS))

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count changes and mean rates for each hour of the training devices."""
        self.chain = Chain.of(training)
        hour = hour_of(training.seen.time_of_day_s)
        known = hour >= 0
        mean = long_mean(training.seen)
        ratio = log_rate(training.targets.rates[:, :, WITHIN]) - log_rate(mean)
        for channel in range(len(RATES)):
            here = known & ~np.isnan(ratio[:, channel])
            n = np.bincount(hour[here], minlength=HOURS)
            total = np.bincount(hour[here], weights=ratio[here, channel], minlength=HOURS)
            self.profile[channel] = total / (n + 50.0)
        return super().fit(training, validation, seed=seed)

    def level(self, seen: Observation) -> Array:
        """Return the device's own mean times the fleet's at the hour in the middle of a horizon."""
        middle = seen.time_of_day_s[:, None] + 0.5 * RATE_HORIZONS_S
        hour = hour_of(middle)
        # Without a clock there is no hour, and the device's own mean stands alone.
        factor = np.where(hour[:, None] >= 0, self.profile[:, hour].transpose(1, 0, 2), 0.0)
        return long_mean(seen)[:, :, None] * np.exp(factor)

    def staying(self, seen: Observation) -> Array:
        """Return the probability that the chain does not leave its state."""
        return self.chain.staying(seen.online, seen.time_of_day_s)

    def state_dict(self) -> State:
        """Return also the hourly rates."""
        return super().state_dict() | {"leaving": self.chain.leaving, "profile": self.profile}

    def load_state_dict(self, state: State) -> None:
        """Take over also the hourly rates."""
        super().load_state_dict(state)
        self.chain, self.profile = Chain(leaving=state["leaving"]), state["profile"]
