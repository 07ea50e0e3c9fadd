"""The executor that trains many clients as one program, on the CPU or on an accelerator.

An app declares what it needs (see `BatchedFunctions`). The clients of training messages run
together; all others, and those that the program cannot take, run one after the other as in
`inline`.
Results equal those of `inline` but for rounding: sums of float32 are formed in another order.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.client import StepRecorder
from fedstale.errors import ConfigError, first_line
from fedstale.flower import filled, read_array, reply_with, with_content, written_array
from fedstale.simulation.executors.base import (
    ClientCall,
    ClientReply,
    Executor,
    ServerStreams,
    failed_reply,
    run_client,
    seed_streams,
    version_of,
    written_to,
)
from fedstale.simulation.executors.many_sgd import ManySGD, Models, TrainingTask
from fedstale.simulation.flower_app import BatchedFunctions
from fedstale.strategies.messages import decoded, has_quantised
from fedstale.strategies.server import records_in

logger = logging.getLogger(__name__)

FitMany = Callable[[Models, Sequence[TrainingTask]], tuple[Models, Sequence[float]]]

_TRAIN = ("train", "train.default")
_ARRAYS, _METRICS, _CONTENT = ArrayRecord(), MetricRecord(), RecordDict()


class BatchedExecutor(Executor):
    """Trains the clients of many calls as one program."""

    def __init__(
        self,
        client_app: ClientApp,
        functions: BatchedFunctions,
        *,
        batch: int = 256,
        device: str = "cpu",
    ) -> None:
        """Prepare the program.

        Args:
            client_app: runs for every message but those of training.
            functions: what the app declares.
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
        self._client_app, self._job, self._device = client_app, functions.job, device
        self._limit(batch)
        self._fit: FitMany = ManySGD(functions.network, functions.losses, device)

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Raises:
            ConfigError: what the app declares does not work.
        """
        replies: dict[int, ClientReply] = {}
        tasks: dict[int, TrainingTask] = {}
        messages: dict[int, Message] = {}
        # Models of one version are read once.
        models: dict[tuple[int, ...], RecordDict] = {}
        with ServerStreams():
            for i, call in enumerate(calls):
                if call.message.metadata.message_type not in _TRAIN:
                    replies[i] = run_client(self._client_app, call)
                    continue
                seed_streams(call.seed)
                config = call.context.run_config.copy()
                try:
                    messages[i] = _in_full(call.message, models)
                    with StepRecorder() as recorder:
                        given = self._job(messages[i], call.context)
                    if call.context.run_config != config:
                        raise written_to(call.context, config)
                    tasks[i] = TrainingTask.of(given, recorder.done)
                except ConfigError:
                    raise
                except (Exception, SystemExit, KeyboardInterrupt) as problem:
                    call.context.run_config = config
                    replies[i] = failed_reply(call, problem)
            # Clients of about as many steps are trained together.
            todo = sorted(tasks, key=lambda i: (-tasks[i].n_steps, i))
            while todo:
                now, todo = todo[: self.batch], todo[self.batch :]
                trained = self._trained(
                    [calls[i] for i in now], [messages[i] for i in now], [tasks[i] for i in now]
                )
                if trained is None:
                    todo = now + todo
                    continue
                replies.update(zip(now, trained, strict=True))
        return [replies[i] for i in range(len(calls))]

    def _limit(self, batch: int) -> None:
        self.batch = batch
        self.description = f"batched on {self._device}, up to {batch} clients in a program"

    def _trained(
        self,
        calls: Sequence[ClientCall],
        messages: Sequence[Message],
        tasks: Sequence[TrainingTask],
    ) -> list[ClientReply] | None:
        """Return the replies of some calls, or None if memory ran out and the batch was halved.

        Args:
            calls: of clients.
            messages: that they are called with, in full arrays.
            tasks: what they do.
        """
        try:
            received = [_model_of(message) for message in messages]
            models, losses = self._fit(_stacked([record for _, record in received]), tasks)
        except ConfigError:
            raise
        except (RuntimeError, MemoryError) as problem:
            if not _is_out_of_memory(problem):
                raise _not_one_program(problem) from problem
            if len(calls) == 1:
                return [run_client(self._client_app, calls[0])]
            self._limit(max(1, min(self.batch, len(calls)) // 2))
            logger.warning("out of memory: from now on %d clients in a batch", self.batch)
            return None
        except Exception as problem:
            raise _not_one_program(problem) from problem
        trained = {name: written_each(stack.numpy()) for name, stack in models.items()}
        return [
            self._reply(
                call,
                messages[i],
                received[i][0],
                {name: each[i] for name, each in trained.items()},
                float(losses[i]),
                tasks[i],
            )
            for i, call in enumerate(calls)
        ]

    def _reply(  # noqa: PLR0917 - one client of `_trained`
        self,
        call: ClientCall,
        message: Message,
        name: str,
        arrays: dict[str, Any],
        loss: float,
        task: TrainingTask,
    ) -> ClientReply:
        """Return a client's reply, with what the app adds around every one, such as a forecast."""
        around = getattr(self._client_app, "around", None)
        metrics = {"train_loss": loss, "num-examples": task.n_examples}
        try:
            records = {name: filled(_ARRAYS, arrays), "metrics": filled(_METRICS, metrics)}
            made = reply_with(message, filled(_CONTENT, records))
            if around is not None:
                # What `job` has recorded is what the mods around would have found.
                with StepRecorder(task.done):
                    made = around(call.message, call.context, lambda *_: made)
        except (Exception, SystemExit, KeyboardInterrupt) as problem:
            return failed_reply(call, problem)
        return ClientReply(made, call.context)


def _in_full(message: Message, models: dict[tuple[int, ...], RecordDict]) -> Message:
    """Return a message as its app sees it; quantised arrays become numbers.

    Args:
        message: of training.
        models: what was read before, which is added to.
    """
    if not has_quantised(message.content):
        return message
    arrays = records_in(message.content, ArrayRecord)
    key = tuple(part for record in arrays.values() for part in version_of(record))
    if key not in models:
        models[key] = decoded(RecordDict(dict(arrays)))
    return with_content(message, RecordDict({**message.content, **models[key]}))


def _model_of(message: Message) -> tuple[str, ArrayRecord]:
    """Return the name and the record of the model in a training message."""
    records = list(records_in(message.content, ArrayRecord).items())
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
        key = version_of(record)
        if key not in versions:
            versions[key] = len(distinct)
            distinct.append(record)
        which.append(versions[key])
    if any(list(record) != list(distinct[0]) for record in distinct):
        raise ConfigError("training messages hold arrays of different names: expected one model")
    stacks = {
        name: [torch.from_numpy(read_array(record[name])) for record in distinct]
        for name in distinct[0]
    }
    if len(distinct) == 1:
        return {name: one.expand(len(records), *one.shape) for name, (one,) in stacks.items()}
    place = torch.tensor(which)
    return {name: torch.stack(stack)[place] for name, stack in stacks.items()}


def written_each(stack: npt.NDArray[Any]) -> list[Array]:
    """Return the arrays of a stack, one for each place of its first axis, as Flower stores them."""
    return [written_array(np.asarray(stack[i, ...], order="C")) for i in range(len(stack))]


def _is_out_of_memory(problem: Exception) -> bool:
    return (
        isinstance(problem, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in str(problem)
        or "out of memory" in str(problem)
    )


def _not_one_program(problem: Exception) -> ConfigError:
    text = f"{type(problem).__name__}: {problem}"
    return ConfigError(
        f"the app's clients cannot be trained as one program: {first_line(text)}; "
        "correct [tool.fedstale.batched], or use executor = 'inline' or 'processes'"
    )
