"""Clients of Flower's older API (`client_fn`, `NumPyClient`) under a strategy of fedstale's.

Such a client knows one set of records: a request holds `fitins.parameters` and `fitins.config`, its
answer `fitres.parameters`, `fitres.num_examples`, `fitres.metrics` and `fitres.status`; those of an
evaluation begin with `evaluateins` and `evaluateres`, and hold a loss. Arrays travel in their
order, without names. Both forms carry the same arrays, examples and metrics.
"""

import logging
from collections.abc import Mapping

from flwr.app import ArrayRecord, MetricRecord, MetricRecordValues, RecordDict

from fedstale.strategies.stages.base import SharedContent, Stage, StageRun
from fedstale.strategies.types import End, Job, RejectionError

logger = logging.getLogger(__name__)

_KINDS = {"train": ("fitins", "fitres"), "evaluate": ("evaluateins", "evaluateres")}
_OK = 0
_MOST_MESSAGE = 200


class OlderClients(Stage):
    """Translates messages and answers of clients of the older API.

    The metrics of an answer are those of its mapping that are numbers; the number of examples
    stands under `num-examples`, and the loss of an evaluation under `eval_loss`.

    A simulation has it where the ClientApp is of the older API, and a strategy on real devices
    where a client has failed for want of these records: the jobs that are out then are lost.

    Args:
        is_on: whether it is known that clients are of the older API.
    """

    requires = frozenset({"start", "last", "any settings"})
    saved = ("is_on",)

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._shared = SharedContent()

    def begin(self, run: StageRun, state: Mapping[str, object] | None) -> None:
        """Prepare for a run."""
        super().begin(run, state)
        self._model, self._config = run.arrays_key, run.config_key
        self._names: tuple[str, ...] = ()

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Put the model and the config under the names that the client looks for."""
        is_done = self._model not in content.array_records
        if not self.is_on or job.purpose not in _KINDS or is_done:
            return content
        request, _ = _KINDS[job.purpose]
        self._names = tuple(content.array_records[self._model])

        def rename(made: RecordDict) -> None:
            made[f"{request}.parameters"] = made.pop(self._model)
            made[f"{request}.config"] = made.pop(self._config)

        return self._shared.of(content, rename, request)

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Put what came under the names that replies have.

        Raises:
            RejectionError: the client says that it failed, or something is missing or too much.
        """
        _, answer = _KINDS.get(job.purpose, ("", ""))
        if not answer or f"{answer}.status" not in content.config_records:
            return
        status = content.config_records[f"{answer}.status"]
        if status.get("code") != _OK:
            text = str(status.get("message"))[:_MOST_MESSAGE]
            raise RejectionError(
                "status", f"the client says {text!r} (code {status.get('code')!r})"
            )
        metrics = dict(content.config_records.get(f"{answer}.metrics", {}))
        found: dict[str, MetricRecordValues] = {
            name: value for name, value in metrics.items() if isinstance(value, int | float)
        }
        for name, key in (("num_examples", "num-examples"), ("loss", "eval_loss")):
            stated = content.metric_records.get(f"{answer}.{name}")
            if stated is not None and name in stated:
                found[key] = stated[name]
        arrays = content.array_records.get(f"{answer}.parameters")
        for record in [record for record in content if record.startswith(f"{answer}.")]:
            del content[record]
        content["metrics"] = MetricRecord(found)
        if arrays is not None:
            if len(arrays) != len(self._names):
                n, most = len(arrays), len(self._names)
                raise RejectionError("names", f"{n} arrays do not fit the model, which has {most}")
            content[self._model] = ArrayRecord(dict(zip(self._names, arrays.values(), strict=True)))

    def ended(self, job: Job, end: End) -> None:
        """Begin when a client has looked for these records in vain."""
        if self.is_on or job.purpose not in _KINDS or end.how != "failed":
            return
        request, _ = _KINDS[job.purpose]
        if f"{request}.parameters" in end.reason:
            self.is_on = True
            logger.warning(
                "clients are of Flower's older API (client_fn): from here on messages carry its "
                "records; what is out is lost"
            )
