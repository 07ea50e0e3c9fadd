"""The oracle reads the future from the trace. It is no forecaster: it bounds all of them.

Published systems that "predict" availability by looking it up are this. It exists so that a table
can say how much there was to gain.
"""

from typing import Self

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.forecast.examples import Examples, targets_at
from fedstale.traces.forecast.forecaster import LEAST_RATE, Forecaster, State
from fedstale.traces.forecast.grid import HORIZONS_S, LEVELS
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Forecast, Outlook
from fedstale.traces.trace_set import TraceSet
from fedstale.traces.trip import Job, Status


class Oracle(Forecaster):
    """What the trace says will happen.

    Args:
        traces: the devices whose future is read.
    """

    kind = "oracle"
    reads_the_future = True

    def __init__(self, traces: TraceSet | None = None) -> None:
        self.traces = traces

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Learn nothing."""
        del training, validation, seed
        return self

    def outlook(self, seen: Observation) -> Outlook:
        """Return the true future, on the grids."""
        traces = self._traces()
        truth = targets_at(traces, seen.devices, seen.now, np.full(len(seen), np.inf))
        rates = np.maximum(np.nan_to_num(truth.rates, nan=1.0), LEAST_RATE)
        return Outlook(
            online=seen.online,
            stays=np.nan_to_num(truth.stays, nan=1.0),
            fresh=np.ones(HORIZONS_S.size),
            rates=np.repeat(rates[..., None], LEVELS.size, axis=3),
        )

    def predict(self, seen: Observation, job: Job) -> Forecast:
        """Return the exact times, and 1 for who will report in time, else 0.

        The times are those of a device that nothing interrupts, as forecasters say them.
        """
        traces = self._traces()
        if len(traces.known) < 4:
            return super().predict(seen, job)
        outcome = traces.trips(seen.devices, seen.now, job)
        free = super().predict(seen, job)
        made = np.isfinite(outcome.reported)

        def exact(true_s: Array, otherwise: Array) -> Array:
            return np.where(made[:, None], true_s[:, None], otherwise)

        with np.errstate(invalid="ignore"):
            training = outcome.trained - outcome.downloaded
            reporting = outcome.reported - outcome.trained
            total = outcome.reported - seen.now
        return Forecast(
            training_s=exact(training, free.training_s),
            reporting_s=exact(reporting, free.reporting_s),
            total_s=exact(total, free.total_s),
            p_finish=(outcome.status == Status.REPORTED).astype(np.float64),
        )

    def state_dict(self) -> State:
        """Refuse: there is nothing to keep.

        Raises:
            TraceError: always.
        """
        raise TraceError("the oracle reads traces and learns nothing: expected a forecaster")

    def load_state_dict(self, state: State) -> None:
        """Refuse, as `state_dict` does.

        Raises:
            TraceError: always.
        """
        del state
        raise TraceError("the oracle reads traces and learns nothing: expected a forecaster")

    def _traces(self) -> TraceSet:
        if self.traces is None:
            raise TraceError("the oracle has no traces to read: give them to Oracle(traces)")
        return self.traces
