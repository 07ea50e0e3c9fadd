"""A device's own corrections of its forecasts, from how its own jobs went.

The times of earlier jobs enter forecasts here. Each outcome is scored against the forecast from
before the job: with the device's last answer on a real device, when the job arrived on a replayed
one. The scores of the last jobs, and a few that stand for the fleet, give how far an end has to be
moved, and `Calibration` (adaptive conformal inference) how often it may be passed. Times of
training, of reporting and of both together are corrected apart.

The total is the time from a message's arrival to the last byte of its reply. Where the arrival of a
reply is unknown, as on real devices, the upload counts with its forecast median, so
that the total follows the training, and the times of reporting stay those of the fleet.

Differences from `Calibration` on a fleet: the scores are the device's own, after a few jobs; those
that stand for the fleet are log-normal with a standard deviation of `SPREAD`, and make no
correction until the device has an outcome. `SPREAD` is chosen, not measured.
"""

import logging
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.conformal import Adaptation, Calibration
from fedstale.traces.forecast.survival import PHASES, JobForecast

logger = logging.getLogger(__name__)

STATE_RECORD = "fedstale.calibration"
"""Name of the record in the Context's state."""
VERSION = 1
KEPT = 64
"""Jobs that are scored; each gives two rows, of its training and of its end: 6 KB."""
SPREAD = 0.5
"""Standard deviation of the scores that stand for the fleet, in logarithms of seconds."""
_STAND_INS = 20
_LEAST_S = 1e-6
_ADAPTATION = Adaptation()


def _stand_ins() -> Array:
    normal = NormalDist(0.0, SPREAD)
    scores = np.array([normal.inv_cdf((i + 0.5) / _STAND_INS) for i in range(_STAND_INS)])
    return scores - np.quantile(scores, 1.0 - _ADAPTATION.miss)


_FLEET = _stand_ins()


@dataclass(eq=False, slots=True)
class OwnCalibration:
    """Corrections of one device, from its own outcomes."""

    miscoverage: Array = field(default_factory=lambda: np.full((len(PHASES), 2), _ADAPTATION.miss))
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
        calibration = Calibration(1, table, _ADAPTATION)
        calibration.miscoverage = self.miscoverage[None].copy()
        return calibration

    def _learn(self, raw: JobForecast, given: JobForecast, outcome: Array) -> None:
        calibration = self._calibration()
        calibration.learn([0], given, outcome)
        self.miscoverage = calibration.miscoverage[0]
        logs = np.log(np.maximum(raw.times_s[0], _LEAST_S))
        truth = np.log(np.maximum(outcome[0], _LEAST_S))
        new = np.stack([logs[:, 0] - truth, truth - logs[:, 2]], axis=1)
        self.scores = np.concatenate([self.scores, new[None]])[-2 * KEPT :]

    @classmethod
    def read(cls, state: RecordDict) -> "OwnCalibration":
        """Return what a node's state holds; a new one if there is none to be read."""
        record = state.config_records.get(STATE_RECORD)
        if record is None:
            return cls()
        try:
            if record["version"] != VERSION:
                raise ValueError("of another version")
            asked, scores, times = (_floats(record[k]) for k in ("asked", "scores", "open_times"))
            miscoverage = asked.reshape(len(PHASES), 2)
            open_job, training_s = record["open_job"], record["open_training_s"]
            if not np.isfinite(miscoverage).all():
                raise ValueError("not finite")
            if not isinstance(open_job, str) or not isinstance(training_s, float):
                raise TypeError("of another kind")
            return cls(
                miscoverage=miscoverage.copy(),
                scores=scores.reshape(-1, len(PHASES), 2)[-2 * KEPT :].copy(),
                open_job=open_job,
                open_times=times.reshape(2, len(PHASES), 3).copy(),
                open_training_s=training_s,
            )
        except (KeyError, TypeError, ValueError) as problem:
            logger.warning("this device's calibration cannot be read (%s): it begins anew", problem)
            return cls()

    def write(self, state: RecordDict) -> None:
        """Put it into a node's state."""
        arrays = {"asked": self.miscoverage, "scores": self.scores, "open_times": self.open_times}
        state[STATE_RECORD] = ConfigRecord(
            {
                "version": VERSION,
                **{k: np.ascontiguousarray(v, "<f8").tobytes() for k, v in arrays.items()},
                "open_job": self.open_job,
                "open_training_s": self.open_training_s,
            }
        )


def _floats(data: object) -> Array:
    if not isinstance(data, bytes):
        raise TypeError("of another kind")
    return np.frombuffer(data, "<f8")
