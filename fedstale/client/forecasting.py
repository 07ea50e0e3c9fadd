"""From one message to the forecast of the next job: what a device notes, learns and says.

The device's own past goes in by the `Device`, its own job times by `OwnCalibration`; only what is
returned leaves the device.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import RecordDict

from fedstale.client.calibration import OwnCalibration
from fedstale.client.device import Cost, Device
from fedstale.client.history import History
from fedstale.client.request import STATED, Request
from fedstale.traces.forecast.conformal import PHASES
from fedstale.traces.forecast.files import embedded
from fedstale.traces.forecast.forecaster import Forecaster, Prior
from fedstale.traces.forecast.grid import LEVELS
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Forecast, Outlook, survival
from fedstale.traces.recording.monitor import Reading
from fedstale.traces.trip import Job

VERSION = 1
"""Of the record; grows when an old reader would misread a new record."""
AVAILABLE_S = 1800.0
"""What `p_available` is told for, in s: the same for every device, so that devices compare."""

_HIGHEST_RATE = 1e30

Said = dict[str, int | float | list[float] | str]


class Forecasting:
    """Forecasts the device's next job after each message.

    Args:
        folder: of a trained forecaster; None takes the one that comes with fedstale.
        work: work units of one training where nobody states any; None where unknown.
    """

    def __init__(self, folder: str | Path | None, work: float | None) -> None:
        self._folder, self._work = folder, work
        self._forecaster: Forecaster | None = None

    def said(
        self,
        device: Device,
        arrived: Reading,
        request: Request,
        *,
        cost: Cost | None,
        reply_bytes: float,
        state: RecordDict,
    ) -> Said:
        """Note a message, learn from it, and return the record of the forecast.

        Args:
            device: which has just worked on the message.
            arrived: its reading when the message came.
            request: the message.
            cost: what the message costs, where the device knows.
            reply_bytes: bytes of the reply's arrays.
            state: of the node; the history and the calibration in it go on.

        Raises:
            TraceError: the forecaster cannot be read.
            ProtocolError: the server states a job that is none.
            ArithmeticError: the forecaster made something else than numbers.
        """
        ready = device.read()
        history, calibration = History.read(state), OwnCalibration.read(state)
        calibration.uploaded(device.uploaded_s(calibration.open_job))
        training: dict[str, float] = {}
        if request.is_training:
            training = {
                "training_s": device.worked_s(),
                "upload_bytes": reply_bytes if cost is None else cost[2],
                "work": self._work_of(request, cost),
                "deadline_s": request.ttl_s,
            }
        history.add(
            arrived=arrived.instant,
            ready=ready.instant,
            travel_s=device.travel_s(),
            download_bytes=request.bytes if cost is None else cost[1],
            processor_left=arrived.processor_left,
            battery=arrived.battery,
            charging=_number(arrived.charging),
            online=_number(arrived.online),
            **training,
        )
        history.write(state)
        forecaster = self._loaded()
        history = history.scaled(_fleet_rate(forecaster))
        outlook = forecaster.outlook(_bounded(device.past(history)))
        if request.is_training:
            # What would have been said of this job before it came, against what it took.
            this = _next_job(history, {"download_bytes": 0.0})
            assert this is not None
            raw = _one(outlook, 0).forecast(this)
            calibration.trained(request.message_id, raw, training["training_s"])
        calibration.write(state)
        now = _one(outlook, 1)
        job = _next_job(history, request.stated())
        forecast = None if job is None else calibration.corrected(now.forecast(job))
        return _record(now, forecast)

    def _work_of(self, request: Request, cost: Cost | None) -> float:
        if cost is not None:
            return cost[0]
        stated = request.job.get("work")
        # A bad number is refused below, once what happened has been noted.
        if isinstance(stated, int | float) and 0 <= stated < math.inf:
            return float(stated)
        return math.nan if self._work is None else self._work

    def _loaded(self) -> Forecaster:
        if self._forecaster is None:
            folder = self._folder
            self._forecaster = embedded() if folder is None else Forecaster.load(folder)
        return self._forecaster


def _bounded(seen: Observation) -> Observation:
    """Return a past without rates that a network in float32 cannot hold, as ideal devices have."""
    rates, before = (np.clip(x, 0.0, _HIGHEST_RATE) for x in (seen.rates, seen.day_ago_rates))
    return replace(seen, rates=rates, day_ago_rates=before)


def _next_job(history: History, stated: dict[str, float]) -> Job | None:
    """Return the job to forecast; None if it was never stated, nor done before."""
    known: dict[str, float] = {"deadline_s": math.inf}
    trainings = history.trainings
    if trainings.rows.size:
        known = {name: float(trainings[name][-1]) for name in STATED}
    known |= stated
    if len(known) < len(STATED):
        return None
    return Job(
        work=known["work"],
        download_bytes=known["download_bytes"],
        upload_bytes=known["upload_bytes"],
        ttl_s=known["deadline_s"],
    )


def _record(now: Outlook, forecast: Forecast | None) -> Said:
    """Return the record of a forecast of one device; only finite numbers leave the device."""
    stays = survival(now.stays, np.array([[AVAILABLE_S]]))[0, 0] if now.online[0] else 0.0
    said: Said = {"version": VERSION, "available_s": AVAILABLE_S, "p_available": float(stays)}
    if forecast is not None:
        said["p_finish"] = float(forecast.p_finish[0])
        said["duration_s"] = float(forecast.total_s[0, 1])
        said["levels"] = LEVELS.tolist()
        for phase in PHASES:
            said[phase] = getattr(forecast, phase)[0].tolist()
    for name, value in said.items():
        if not np.isfinite(np.asarray(value, dtype=np.float64)).all():
            raise ArithmeticError(f"{name} = {value}: the forecaster made no number of it")
    return said


def _one(outlook: Outlook, i: int) -> Outlook:
    one = slice(i, i + 1)
    return replace(
        outlook, online=outlook.online[one], stays=outlook.stays[one], rates=outlook.rates[one]
    )


def _fleet_rate(forecaster: Forecaster) -> float:
    """Return the median work units/s of the fleet that a forecaster learnt from."""
    prior = getattr(forecaster, "prior", None)
    return float(prior.rates[0, 1, 1]) if isinstance(prior, Prior) else 1.0


def _number(flag: bool | None) -> float:
    return math.nan if flag is None else float(flag)
