"""The executor that trains many clients as one program, on the CPU or on an accelerator.

An app declares what it needs (see `declaration`). Training messages are answered together; all
others, and those of clients that the program cannot take, run one after the other as in `inline`.
Results equal those of `inline` but for rounding: sums of float32 are formed in another order.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.errors import ConfigError
from fedstale.simulation.compat import filled, reply_with
from fedstale.simulation.executors.base import (
    Answer,
    Call,
    Executor,
    answer,
    failed,
    own_random_streams,
    seed_streams,
)
from fedstale.simulation.executors.declaration import Parts
from fedstale.simulation.executors.many_sgd import Job, ManySGD, Models
from fedstale.simulation.quick_arrays import quick_arrays, read, written_each
from fedstale.strategies.server.validation import records_in

logger = logging.getLogger(__name__)

FitMany = Callable[[Models, Sequence[Job]], tuple[Models, Sequence[float]]]

_TRAIN = ("train", "train.default")
_ARRAYS, _METRICS, _CONTENT = ArrayRecord(), MetricRecord(), RecordDict()


class BatchedExecutor(Executor):
    """Trains the clients of many calls as one program."""

    def __init__(
        self,
        client_app: ClientApp,
        parts: Parts,
        *,
        batch: int = 256,
        device: str = "cpu",
    ) -> None:
        """Prepare the program.

        Args:
            client_app: answers everything but training.
            parts: what the app declares.
            batch: most clients in one program, >= 1; halved for as long as memory runs out.
            device: where torch trains: cpu, cuda, ...

        Raises:
            ConfigError: the app's clients cannot be trained as one program.
        """
        function = client_app._registered_funcs.get("train.default")
        if function is None or function.__module__.split(".")[0] == "flwr":
            what = "holds no function under @app.train()" if function is None else "has mods"
            raise ConfigError(
                f"executor = 'batched': the ClientApp {what}, but a batch of clients is trained "
                "by the declared functions alone; use 'inline' or 'processes'"
            )
        self._client_app, self._parts = client_app, parts
        self._device, self.batch = device, batch
        self._fit = self._program()

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls.

        Raises:
            ConfigError: what the app declares does not work.
        """
        answers: dict[int, Answer] = {}
        jobs: dict[int, Job] = {}
        with own_random_streams(), quick_arrays():
            for i, call in enumerate(calls):
                if call.message.metadata.message_type not in _TRAIN:
                    answers[i] = answer(self._client_app, call)
                    continue
                seed_streams(call.seed)
                try:
                    jobs[i] = Job.of(self._parts.job(call.message, call.context))
                except ConfigError:
                    raise
                except (Exception, SystemExit) as problem:
                    answers[i] = failed(call, problem)
            # Clients of about as many steps are trained together.
            todo = sorted(jobs, key=lambda i: (-jobs[i].n_steps, i))
            while todo:
                now, todo = todo[: self.batch], todo[self.batch :]
                trained = self._trained([calls[i] for i in now], [jobs[i] for i in now])
                if trained is None:
                    todo = now + todo
                    continue
                answers.update(zip(now, trained, strict=True))
        return [answers[i] for i in range(len(calls))]

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return f"batched on {self._device}, up to {self.batch} clients in a program"

    def _program(self) -> FitMany:
        parts = self._parts
        if parts.fit_many is not None:
            many = parts.fit_many
            return lambda models, jobs: many(_writable(models), [job.given for job in jobs])
        assert parts.network is not None
        assert parts.losses is not None
        return ManySGD(parts.network, parts.losses, self._device)

    def _trained(self, calls: Sequence[Call], jobs: Sequence[Job]) -> list[Answer] | None:
        """Return the answers of some calls, or None if memory ran out and the batch was halved."""
        try:
            received = [_model_of(call) for call in calls]
            models, losses = self._fit(_stacked([record for _, record in received]), jobs)
        except ConfigError:
            raise
        except (RuntimeError, MemoryError) as problem:
            if not _is_out_of_memory(problem):
                raise _refusal(problem) from problem
            if len(calls) == 1:
                return [answer(self._client_app, calls[0])]
            self.batch = max(1, min(self.batch, len(calls)) // 2)
            logger.warning("out of memory: from now on %d clients in a batch", self.batch)
            return None
        except Exception as problem:
            raise _refusal(problem) from problem
        trained: dict[str, Sequence[Array] | torch.Tensor] = {
            name: stack if self._parts.reply is not None else written_each(stack.numpy())
            for name, stack in models.items()
        }
        return [
            self._answered(
                call,
                received[i][0],
                {name: each[i] for name, each in trained.items()},
                float(losses[i]),
                jobs[i],
            )
            for i, call in enumerate(calls)
        ]

    def _answered(
        self, call: Call, name: str, arrays: dict[str, Any], loss: float, job: Job
    ) -> Answer:
        """Return a client's answer, with what the app adds around every one, such as a forecast."""
        made = self._made(call, name, arrays, loss, job)
        around = getattr(self._client_app, "around", None)
        if around is None or made.reply.has_error():
            return made
        try:
            reply = around(call.message, call.context, lambda *_: made.reply)
        except (Exception, SystemExit) as problem:
            return failed(call, problem)
        return Answer(reply, call.context)

    def _made(self, call: Call, name: str, arrays: dict[str, Any], loss: float, job: Job) -> Answer:
        if self._parts.reply is not None:
            try:
                reply = self._parts.reply(call.message, arrays, loss, job.given)
                return Answer(reply, call.context)
            except (Exception, SystemExit) as problem:
                return failed(call, problem)
        metrics = {"train_loss": loss, "num-examples": job.n_examples}
        records = {name: filled(_ARRAYS, arrays), "metrics": filled(_METRICS, metrics)}
        return Answer(reply_with(call.message, filled(_CONTENT, records)), call.context)


def _model_of(call: Call) -> tuple[str, ArrayRecord]:
    """Return the model in a training message, and what it is called there."""
    records = list(records_in(call.message.content, ArrayRecord).items())
    if len(records) != 1:
        raise ConfigError(
            f"a training message holds {len(records)} sets of arrays: expected the model alone "
            "for executor = 'batched'"
        )
    return records[0]


def _stacked(records: Sequence[ArrayRecord]) -> Models:
    """Return the models of some messages on top of one another; most hold the same version."""
    versions: dict[tuple[int, ...], int] = {}
    distinct: list[ArrayRecord] = []
    which = []
    for record in records:
        key = tuple(id(array.data) for array in record.values())
        if key not in versions:
            versions[key] = len(distinct)
            distinct.append(record)
        which.append(versions[key])
    if any(list(record) != list(distinct[0]) for record in distinct):
        raise ConfigError("training messages hold arrays of different names: expected one model")
    stacks = {name: [_tensor(record[name]) for record in distinct] for name in distinct[0]}
    if len(distinct) == 1:
        return {name: one.expand(len(records), *one.shape) for name, (one,) in stacks.items()}
    place = torch.tensor(which)
    return {name: torch.stack(stack)[place] for name, stack in stacks.items()}


def _writable(models: Models) -> Models:
    """Return models each of which has memory of its own."""
    return {name: stack.contiguous() for name, stack in models.items()}


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(read(array))


def _is_out_of_memory(problem: Exception) -> bool:
    return (
        isinstance(problem, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in str(problem)
        or "out of memory" in str(problem)
    )


def _refusal(problem: Exception) -> ConfigError:
    first = str(problem).strip().split("\n")[0]
    return ConfigError(
        f"the app's clients cannot be trained as one program: {type(problem).__name__}: {first}; "
        "correct [tool.fedstale.batched], or use executor = 'inline' or 'processes'"
    )
