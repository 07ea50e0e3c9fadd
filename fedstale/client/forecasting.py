"""From one message to the forecast of the next job: the device's history, calibration and record.

The device's history enters by the `Device`, its own job times by `OwnCalibration`; only the record
that is returned leaves the device.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Metadata, RecordDict

from fedstale.client.calibration import OwnCalibration
from fedstale.client.device import Cost, Device
from fedstale.client.history import MessageHistory
from fedstale.errors import ProtocolError
from fedstale.strategies.selection.forecast_request import JOB_RECORD, STATED
from fedstale.traces.forecast.base import Forecaster, embedded
from fedstale.traces.forecast.observation import AVAILABLE_S, LEVELS, Observation
from fedstale.traces.forecast.survival import PHASES, DeviceForecast, JobForecast, survival_at
from fedstale.traces.recording.monitor import Reading
from fedstale.traces.trip import Job

VERSION = 1
"""Of the record; grows when an old reader would misread a new record."""

_HIGHEST_RATE = 1e30

Record = dict[str, int | float | list[float] | str]


class Forecasting:
    """Forecasts the device's next job after each message.

    Args:
        folder: of a trained forecaster; None takes the one that comes with fedstale.
        work: work units of one training where none are stated; None where unknown.
    """

    def __init__(self, folder: str | Path | None, work: float | None) -> None:
        self._folder, self._work = folder, work
        self._forecaster: Forecaster | None = None

    def record(
        self,
        device: Device,
        arrived: Reading,
        about: Metadata,
        *,
        stated: Mapping[str, object],
        received_bytes: float,
        reply_bytes: float,
        state: RecordDict,
    ) -> Record:
        """Add a message to the history, learn from it, and return the record of the forecast.

        Args:
            device: which has just worked on the message.
            arrived: its reading when the message came.
            about: metadata of the message.
            stated: `JOB_RECORD` of the message, unchecked.
            received_bytes: bytes of the message's arrays.
            reply_bytes: bytes of the reply's arrays.
            state: of the node; the history and the calibration in it go on.

        Raises:
            TraceError: the forecaster cannot be read.
            ProtocolError: the server states a job that is none.
            ArithmeticError: the forecaster made something else than numbers.
        """
        ready, cost = device.read(), device.cost()
        history, calibration = MessageHistory.read(state), OwnCalibration.read(state)
        calibration.uploaded(device.uploaded_s(calibration.open_job))
        training: dict[str, float] = {}
        if about.message_type.split(".")[0] == "train":
            training = {
                "training_s": device.worked_s(),
                "upload_bytes": reply_bytes if cost is None else cost[2],
                "work": self._work_of(stated, cost),
                "deadline_s": about.ttl if about.ttl > 0 else math.inf,
            }
        history.add(
            arrived=arrived.instant,
            ready=ready.instant,
            travel_s=device.travel_s(),
            download_bytes=received_bytes if cost is None else cost[1],
            processor_left=arrived.processor_left,
            battery=arrived.battery,
            charging=_number(arrived.charging),
            online=_number(arrived.online),
            **training,
        )
        history.write(state)
        forecaster = self._loaded()
        history = history.scaled(float(forecaster.fleet.rates[0, 1, 1]))
        forecasts = forecaster.forecast(_bounded(device.observed(history)))
        if training:
            # The forecast of this job before it came, against what it took.
            this = _job(_last_training(history) | {"download_bytes": 0.0})
            raw = _one(forecasts, 0).of_job(this)
            calibration.trained(about.message_id, raw, training["training_s"])
        calibration.write(state)
        now = _one(forecasts, 1)
        known = {"deadline_s": math.inf} | _last_training(history) | _checked(stated)
        forecast = None
        if len(known) == len(STATED):
            forecast = calibration.corrected(now.of_job(_job(known)))
        return _record(now, forecast)

    def _work_of(self, stated: Mapping[str, object], cost: Cost | None) -> float:
        if cost is not None:
            return cost[0]
        work = stated.get("work")
        # A bad number is rejected later, once the message is in the history.
        if isinstance(work, int | float) and 0 <= work < math.inf:
            return float(work)
        return math.nan if self._work is None else self._work

    def _loaded(self) -> Forecaster:
        if self._forecaster is None:
            folder = self._folder
            self._forecaster = embedded() if folder is None else Forecaster.load(folder)
        return self._forecaster


def _bounded(observed: Observation) -> Observation:
    """Cut rates that a network in float32 cannot hold, as ideal devices have."""
    return replace(observed, rates=np.clip(observed.rates, 0.0, _HIGHEST_RATE))


def _last_training(history: MessageHistory) -> dict[str, float]:
    """Return the numbers of the device's last training; none before the first."""
    trainings = history.trainings
    return {name: float(trainings[name][-1]) for name in STATED if trainings.rows.size}


def _checked(stated: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of the job that the server states.

    Raises:
        ProtocolError: one is no such number.
    """
    numbers: dict[str, float] = {}
    for name, value in stated.items():
        number = math.nan
        if name in STATED and isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        # A job of no bytes is a job, and so is one without a deadline.
        if not (number > 0 if name == "deadline_s" else 0 <= number < math.inf):
            raise ProtocolError(
                f"{JOB_RECORD}: {name} = {value!r}: expected finite numbers >= 0 under "
                "work, download_bytes and upload_bytes, and deadline_s > 0, which may be inf"
            )
        numbers[name] = number
    return numbers


def _job(known: dict[str, float]) -> Job:
    return Job(
        work=known["work"],
        download_bytes=known["download_bytes"],
        upload_bytes=known["upload_bytes"],
        ttl_s=known["deadline_s"],
    )


def _record(now: DeviceForecast, forecast: JobForecast | None) -> Record:
    """Return the record of a forecast of one device; only finite numbers leave the device."""
    p = survival_at(now.survival, np.array([[AVAILABLE_S]]))[0, 0] if now.online[0] else 0.0
    record: Record = {"version": VERSION, "available_s": AVAILABLE_S, "p_available": float(p)}
    if forecast is not None:
        record["p_finish"] = float(forecast.p_finish[0])
        record["duration_s"] = float(forecast.total_s[0, 1])
        record["levels"] = LEVELS.tolist()
        for phase in PHASES:
            record[phase] = getattr(forecast, phase)[0].tolist()
    for name, value in record.items():
        if not np.isfinite(np.asarray(value, dtype=np.float64)).all():
            raise ArithmeticError(f"{name} = {value}: the forecaster made no number of it")
    return record


def _one(forecasts: DeviceForecast, i: int) -> DeviceForecast:
    one = slice(i, i + 1)
    return replace(
        forecasts,
        online=forecasts.online[one],
        survival=forecasts.survival[one],
        rates=forecasts.rates[one],
    )


def _number(flag: bool | None) -> float:
    return math.nan if flag is None else float(flag)
