"""From one message to the forecast of the next job: the device's history, calibration and record.

The device's history enters by the `Device`, its own job times by `OwnCalibration`; only the record
that is returned leaves the device.

A device corrects its forecasts from how its own jobs went; that is where the times of earlier jobs
enter. Each outcome is scored against the forecast from before the job: with the device's last
answer on a real device, when the job arrived on a replayed one. The scores of the last jobs, and a
few that stand for the fleet, give how far an end has to be moved, and `Calibration` (adaptive
conformal inference) how often it may be passed. Times of training, of reporting and of both
together are corrected apart.

Where the server asks for a share of the work, the next job is taken to have the share of the last
one, and the record says which that was, so that the times of a whole job follow from it.

The total is the time from a message's arrival to the last byte of its reply. Where the arrival of a
reply is unknown, as on real devices, the upload counts with its forecast median, so
that the total follows the training, and the times of reporting stay those of the fleet.

Differences from `Calibration` on a fleet: the scores are the device's own, after a few jobs; those
that stand for the fleet are log-normal with a standard deviation of `SPREAD`, and make no
correction until the device has an outcome. `SPREAD` is chosen, not measured.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Metadata, RecordDict

from fedstale.client.device import Cost, Device, MessageHistory, store, stored
from fedstale.errors import ProtocolError
from fedstale.strategies.stages import JOB_RECORD, STATED
from fedstale.traces import Array, Job
from fedstale.traces.forecast import (
    AVAILABLE_S,
    LEVELS,
    MISS,
    PHASES,
    Calibration,
    DeviceForecast,
    Forecaster,
    JobForecast,
    survival_at,
)
from fedstale.traces.recording import Reading

if TYPE_CHECKING:
    from fedstale.client.journal_history import JournalHistory

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the record; grows when an old reader would misread a new record."""

_HIGHEST_RATE = 1e30

CALIBRATION_RECORD = "fedstale.calibration"
"""Name of the record in the Context's state."""
CALIBRATION_VERSION = 1
JOBS_KEPT = 64
"""Jobs that are scored; each gives two rows, of its training and of its end: 6 KB."""
SPREAD = 0.5
"""Standard deviation of the scores that stand for the fleet, in logarithms of seconds."""
_STAND_INS = 20
_LEAST_S = 1e-6

Record = dict[str, int | float | list[float] | str]


def record(
    load: Callable[[], Forecaster],
    device: Device,
    arrived: Reading,
    about: Metadata,
    *,
    stated: Mapping[str, object],
    received_bytes: float,
    reply_bytes: float,
    state: RecordDict,
    share: float | None,
    journal: "JournalHistory | None",
) -> Record:
    """Add a message to the history, learn from it, and return the record of the forecast.

    Args:
        load: returns the forecaster; called when the message is in the history.
        device: which has just worked on the message.
        arrived: its reading when the message came.
        about: metadata of the message.
        stated: `JOB_RECORD` of the message, unchecked.
        received_bytes: bytes of the message's arrays.
        reply_bytes: bytes of the reply, as the device counts them.
        state: of the node; the history and the calibration in it go on.
        share: of a whole training that this one was; None where the message asks for no share.
        journal: of the device's recorder; None if there is none.

    Raises:
        TraceError: the forecaster cannot be read.
        ProtocolError: the server states a job that is none.
        ArithmeticError: the forecaster made something else than numbers.
    """
    ready, cost = device.read(), device.cost(share)
    history, calibration = MessageHistory.read(state), OwnCalibration.read(state)
    calibration.uploaded(device.uploaded_s(calibration.open_job))
    training: dict[str, float] = {}
    if about.message_type.split(".")[0] == "train":
        training = {
            "training_s": device.worked_s(),
            "upload_bytes": reply_bytes,
            "work": _work_of(stated, cost, 1.0 if share is None else share),
            "deadline_s": about.ttl if about.ttl > 0 else math.inf,
            "share": math.nan if share is None else share,
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
    forecaster = load()
    history = history.scaled(float(forecaster.fleet.rates[0, 1, 1]))
    observed = device.observed(history, journal)
    # A network in float32 cannot hold the rates that ideal devices have.
    rates = np.clip(observed.rates, 0.0, _HIGHEST_RATE)
    forecasts = forecaster.forecast(replace(observed, rates=rates))
    if training:
        # The forecast of this job before it came, against what it took.
        this = _job(history.last_training | {"download_bytes": 0.0})
        raw = _one(forecasts, 0).of_job(this)
        calibration.trained(about.message_id, raw, training["training_s"])
    calibration.write(state)
    now = _one(forecasts, 1)
    last = history.last_training
    known = {"deadline_s": math.inf} | last | _checked(stated)
    if not known.keys() >= set(STATED):
        return _record(now, None)
    made = _record(now, calibration.corrected(now.of_job(_job(known))))
    of_whole = last.get("share", math.nan)
    if of_whole > 0.0:
        # What the server states is another job than the last one.
        made["share"] = of_whole * (known["work"] / last["work"] if last["work"] > 0.0 else 1.0)
    return made


def _work_of(stated: Mapping[str, object], cost: Cost | None, share: float) -> float:
    """Return the work units that were done, NaN if unknown; what is stated is of a whole job."""
    if cost is not None:
        return cost[0]
    work = stated.get("work")
    # A bad number is rejected later, once the message is in the history.
    if isinstance(work, int | float) and 0 <= work < math.inf:
        return float(work) * share
    return math.nan


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
    p = survival_at(now.survival.T, np.array([[AVAILABLE_S]]))[0, 0] if now.online[0] else 0.0
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


def _stand_ins() -> Array:
    scores = np.array(NormalDist(0.0, SPREAD).quantiles(2 * _STAND_INS)[::2])
    return scores - np.quantile(scores, 1.0 - MISS)


_FLEET = _stand_ins()


@dataclass(eq=False, slots=True)
class OwnCalibration:
    """Corrections of one device, from its own outcomes."""

    miscoverage: Array = field(default_factory=lambda: np.full((len(PHASES), 2), MISS))
    """Miscoverage taken of the scores, by phase and by end; shape (3, 2)."""
    scores: Array = field(default_factory=lambda: np.empty((0, len(PHASES), 2)))
    """By how much, in logarithms, the truth lay outside an end; NaN unknown; (jobs, 3, 2)."""
    open_job: str = ""
    """Id of the message whose reply was still to be uploaded; empty if none."""
    open_times: Array = field(default_factory=lambda: np.full((2, len(PHASES), 3), np.nan))
    """Its forecast, before and after correction, by phase and quantile."""
    open_training_s: float = np.nan
    """How long it trained, in s."""

    def corrected(self, raw: JobForecast) -> JobForecast:
        """Return a forecast with the ends of its times corrected.

        Args:
            raw: of the forecaster, of one job.
        """
        return self._calibration().corrected([0], raw)

    def trained(self, message_id: str, raw: JobForecast, training_s: float) -> None:
        """Learn from the training of a job, whose upload is still to come.

        Args:
            message_id: of the job.
            raw: the forecaster's, from before it, without the download.
            training_s: how long it trained, in s.
        """
        given = self.corrected(raw)
        self._learn(raw, given, np.array([[training_s, np.nan, np.nan]]))
        self.open_job, self.open_training_s = message_id, training_s
        self.open_times = np.stack([raw.times_s[0], given.times_s[0]])

    def uploaded(self, upload_s: float) -> None:
        """Learn from the end of the open job, if there is one.

        Args:
            upload_s: how long its reply was under way, in s; NaN if unknown.
        """
        if not self.open_job:
            return
        raw, given = (
            JobForecast(p_finish=np.zeros(1), times_s=times[None]) for times in self.open_times
        )
        took = upload_s if np.isfinite(upload_s) else float(raw.reporting_s[0, 1])
        total = self.open_training_s + took
        self._learn(raw, given, np.array([[np.nan, upload_s, total]]))
        self.open_job = ""

    def _calibration(self) -> Calibration:
        table = np.empty((len(PHASES), 2, 201))
        for p in range(len(PHASES)):
            for end in (0, 1):
                own = self.scores[:, p, end]
                own = np.concatenate([_FLEET, own[np.isfinite(own)]])
                table[p, end] = np.interp(
                    np.linspace(0.0, own.size - 1.0, 201), np.arange(own.size), np.sort(own)
                )
        calibration = Calibration(1, table)
        calibration.miscoverage = self.miscoverage[None].copy()
        return calibration

    def _learn(self, raw: JobForecast, given: JobForecast, outcome: Array) -> None:
        calibration = self._calibration()
        calibration.learn([0], given, outcome)
        self.miscoverage = calibration.miscoverage[0]
        logs = np.log(np.maximum(raw.times_s[0], _LEAST_S))
        truth = np.log(np.maximum(outcome[0], _LEAST_S))
        new = np.stack([logs[:, 0] - truth, truth - logs[:, 2]], axis=1)
        self.scores = np.concatenate([self.scores, new[None]])[-2 * JOBS_KEPT :]

    @classmethod
    def read(cls, state: RecordDict) -> "OwnCalibration":
        """Read the calibration from a node's state; a new one if there is none to be read."""
        found = stored(
            state,
            CALIBRATION_RECORD,
            version=CALIBRATION_VERSION,
            asked=(len(PHASES), 2),
            scores=(-1, len(PHASES), 2),
            open_times=(2, len(PHASES), 3),
            open_job=str,
            open_training_s=float,
        )
        if found is None:
            return cls()
        del found["version"]
        miscoverage, scores = found.pop("asked"), found.pop("scores")[-2 * JOBS_KEPT :]
        if not np.isfinite(miscoverage).all():
            logger.warning("this device's calibration is not finite: it begins anew")
            return cls()
        return cls(miscoverage=miscoverage, scores=scores, **found)

    def write(self, state: RecordDict) -> None:
        """Put it into a node's state."""
        store(
            state,
            CALIBRATION_RECORD,
            version=CALIBRATION_VERSION,
            asked=self.miscoverage,
            scores=self.scores,
            open_times=self.open_times,
            open_job=self.open_job,
            open_training_s=self.open_training_s,
        )
