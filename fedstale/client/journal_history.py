"""A device's own past from the journal of its recorder, instead of from its messages alone.

`fedstale traces record` reads the device every few seconds, also between messages. Its journal
becomes the trace that a simulation would replay, up to now, and is observed as a simulated device
is: sessions and gaps through `TraceObserver`, and the pace to expect at each reading of the
processor, from what the device's trainings took. What no recorder sees stays with the messages: how
long jobs and downloads took. The clock is the device's own.

The device works when it reads its journal, so it is available then, whatever the last reading says.
A journal that does not serve is said once in the log, and the messages are all there is.

Deliberately absent: the recorder. It runs on its own, and neither waits for the other.
"""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
from flwr.app import RecordDict

from fedstale.client.device import MessageHistory, expected_pace, store, stored
from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, joined
from fedstale.traces.forecast import DAYS, EDGES_S, RATES, Observation, TraceObserver
from fedstale.traces.recording import AvailableWhen, RecordingRules, journal, working_at

logger = logging.getLogger(__name__)

JOURNAL_RECORD = "fedstale.journal"
"""Name of the record in the Context's state that names the device of the journal."""
# A device that has answered a message for so long, but made no reading since, does not record.
_LATEST_S = 300.0
# Rates reach back 25 h. What is older only fills the gaps that begin before, and is mostly left
# out, since each reading of the processor is a segment of the trace.
_OLDER_READINGS = 1000


class JournalHistory:
    """The journal of this device, read when a message comes.

    Args:
        folder: of the journal; a recorder may be writing to it.
        available: when the device can take a job; a word of `RecordingRules.available`.
    """

    def __init__(self, folder: str | Path, available: str) -> None:
        self._folder, self._available, self._is_logged = Path(folder), available, False

    def observation(
        self, history: MessageHistory, instants: Array, utc_offset_s: float, state: RecordDict
    ) -> Observation:
        """Compute the device's observations of itself at some instants, by journal and messages.

        Args:
            history: of its messages.
            instants: in s since 1970, UTC, the last of them now; shape (n,).
            utc_offset_s: local time minus UTC, in s.
            state: of the node; it keeps the name of the device of the journal.

        Returns:
            What the messages alone show where the journal does not serve; never raises for that.
        """
        of_messages = history.observation(instants, utc_offset_s)
        observed = [of_messages.take(slice(i, i + 1)) for i in range(instants.size)]
        try:
            rules = RecordingRules(available=cast(AvailableWhen, self._available))
            readings, _ = journal.read(self._folder, DAYS * DAY_S)
            _check_device(readings, state)
            observed[-1] = _observed(observed[-1], readings, rules, history)
            for i in range(instants.size - 1):
                # A journal that has just begun knows nothing of earlier instants.
                with suppress(TraceError):
                    observed[i] = _observed(observed[i], readings, rules, history)
        except Exception as problem:
            # Whatever it was, it must not cost a forecast.
            self._log(problem)
            return of_messages
        self._is_logged = False
        return joined(observed)

    def _log(self, problem: Exception) -> None:
        """Log why the journal does not serve, once until it does."""
        if not self._is_logged:
            self._is_logged = True
            logger.warning("forecasts are made of messages alone: %s", problem)


def _check_device(readings: pd.DataFrame, state: RecordDict) -> None:
    """Raise a TraceError if the journal is of several devices, or of another one than before."""
    names = readings["device_id"].unique().tolist()
    if JOURNAL_RECORD not in state:
        store(state, JOURNAL_RECORD, device_id=names[-1])
    found = stored(state, JOURNAL_RECORD, device_id=str)
    own = names[-1] if found is None else found["device_id"]
    others = [name for name in names if name != own]
    if others:
        raise TraceError(
            f"device {others[0]!r} is in the journal: expected one of {own!r} alone, which is "
            "this node's"
        )


def _check_recorder(history: MessageHistory, last_reading: float, now: float) -> None:
    """Raise a TraceError if the device has answered since the last reading, but recorded nothing.

    Without that, it may have been asleep, and is awake again for less time than a reading takes.
    """
    answered = np.concatenate([history["arrived"], history["ready"]])
    awake = answered[(answered > last_reading + _LATEST_S) & (answered < now - _LATEST_S)]
    if awake.size:
        raise TraceError(
            f"the newest reading in the journal is {now - last_reading:,.0f} s old, and this "
            "device has answered since: expected readings; see that the recorder runs"
        )


def _observed(
    of_messages: Observation,
    readings: pd.DataFrame,
    rules: RecordingRules,
    history: MessageHistory,
) -> Observation:
    """Return one observation with what the journal knows better than the messages.

    Raises:
        TraceError: the journal does not say what the device did until then.
    """
    now = float(of_messages.now[0])
    pace = _pace_at_readings(readings, history, now)
    highest = float(np.nanmax(pace, initial=0.0))
    if highest > 0:
        readings = readings.assign(processor_left=pace / highest)
        rules = replace(rules, speed=highest)
    device = working_at(readings, rules, now)
    _check_recorder(history, device.last_reading, now)
    memory_s = min(device.now - device.log_began, DAYS * DAY_S)
    seen = TraceObserver(device.traces).at([0], device.now, history_s=memory_s)
    rates, compute = of_messages.rates.copy(), RATES.index("compute")
    if np.isfinite(seen.rates[:, compute]).any():
        rates[:, compute] = seen.rates[:, compute]
    return replace(
        of_messages, history_s=seen.history_s, online=seen.online, own=seen.own, rates=rates
    )


def _pace_at_readings(readings: pd.DataFrame, history: MessageHistory, now: float) -> Array:
    """Return the pace to expect at each reading, in work units/s; shape (readings,).

    While the device trained for a job itself, it is the pace of that job: its own load takes
    nothing from the next one. NaN where it is not known, or too old for any rate.
    """
    rows = history.rows[history["ready"] <= now]
    known = MessageHistory(rows[np.isfinite(MessageHistory(rows).pace)])
    pace, began, ended = known.pace, known["arrived"], known["ready"]
    instant = readings["instant"].to_numpy()
    left = readings["processor_left"].to_numpy(np.float64)
    if not pace.size:
        return np.full(instant.size, np.nan)
    # A share is of the time before its reading: the first after a training is still of it.
    order = np.argsort(began, kind="stable")
    job = order[np.maximum(np.searchsorted(began[order], instant) - 1, 0)]
    trained = (instant > began[job]) & (instant <= ended[job] + readings["interval_s"].to_numpy())
    free = pd.Series(np.where(trained, np.nan, left)).ffill().to_numpy()
    before = np.searchsorted(np.maximum.accumulate(instant), began, side="right") - 1
    left_before = np.where(before >= 0, free[np.maximum(before, 0)], np.nan)
    result = np.where(trained, pace[job], expected_pace(pace, left_before, left))
    older = np.flatnonzero((instant < now - EDGES_S[-1]) & np.isfinite(result))
    result[: older[-_OLDER_READINGS] if older.size >= _OLDER_READINGS else 0] = np.nan
    return result
