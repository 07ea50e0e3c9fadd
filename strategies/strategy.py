"""`StaleStrategy`: a Flower strategy for devices that report late, composed of exchangeable parts.

A selector says whom to send to, a schedule when and how many to wait for, a weighting how much a
late update counts, and a server optimizer what to do with the merged update. Everything published
is a composition of these; see `aliases`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Literal, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedstale.errors import FedstaleError
from fedstale.strategies.robust.base import Rule
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.selection.base import Random, Selector
from fedstale.strategies.selection.forecast_request import ForecastRequest
from fedstale.strategies.server.buffer import Normalise
from fedstale.strategies.server.checkpoint import Checkpoints, read_checkpoint
from fedstale.strategies.server.loop import EventLoop
from fedstale.strategies.server.metrics import Progress
from fedstale.strategies.server.runtime import NoCheckpoints
from fedstale.strategies.server.superlink import without_stalls
from fedstale.strategies.server.validation import Validation
from fedstale.strategies.server_optimizer import SGD, ServerOptimizer
from fedstale.strategies.settings import is_count, require
from fedstale.strategies.weighting.base import ByAge, Weighting, constant

logger = logging.getLogger(__name__)


class StaleStrategy(Strategy):
    """Runs one event loop over a grid: select, send, receive, weigh, step, evaluate.

    A "round" of the `Result` is one version of the model, that is, one merge. Stock ClientApps work
    unchanged: they receive `server-round` in their config and answer with weights, a number of
    examples and metrics. A bad reply is refused with its reason and never ends a run.

    Integer and boolean arrays, such as BatchNorm's counters, are averaged without any staleness
    weight and rounded; neither weightings nor server optimizers see them.

    Example:
        >>> from fedstale.strategies import Gap, StaleStrategy, k_batch_async
        >>> strategy = StaleStrategy(
        ...     schedule=k_batch_async(concurrency=20, buffer_size=5), weighting=Gap(), seed=1
        ... )
        >>> strategy.weighting
        Gap(of='parameter', decay=0.97, steps='maximal')
    """

    def __init__(
        self,
        *,
        selector: Selector | None = None,
        schedule: Schedule | None = None,
        weighting: Weighting | None = None,
        server_optimizer: ServerOptimizer | None = None,
        normalise: Normalise = "examples",
        update: Literal["delta", "model"] = "delta",
        robust: Rule | None = None,
        validation: Validation | None = None,
        forecast_request: ForecastRequest | None = None,
        train_config: Mapping[str, float | str] | None = None,
        evaluate_nodes: int = 0,
        evaluate_every: int = 1,
        stop_when: Callable[[Progress], bool] | None = None,
        config_key: str = "config",
        loss_key: str = "train_loss",
        square_loss_key: str = "square_loss",
        recheck_s: float = 30.0,
        checkpoints: Checkpoints | str | Path | None = None,
        resume: str | Path | None = None,
        version_memory_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Compose a strategy.

        Args:
            selector: whom to send to; `Random()` if not given.
            schedule: when to send and what to wait for; if not given, all nodes and all replies.
            weighting: of late updates; if not given, age does not matter.
            server_optimizer: `SGD(rate=1)` if not given.
            normalise: divide the sum of a merge by the "examples" behind it (FedAvg), by its
                "buffer_size" (FedBuff) or by the sum of "weights".
            update: "delta" adds what a device changed; "model" pulls the server towards the
                device's whole model, as FedAsync does.
            robust: rule that merges although some nodes are adversarial, as `TrimmedMean(f=2)`;
                it keeps the updates of one merge. If not given, updates are averaged as they come.
            validation: what checks replies, with the keys of records.
            forecast_request: which nodes to ask for a forecast before any is chosen, as
                `ForecastRequest()`; none if not given: a selector then sees the forecasts that came
                with replies.
            train_config: sent with every training job; what `start` is given comes first.
            evaluate_nodes: nodes that evaluate a version, chosen at random; 0 for none.
            evaluate_every: versions from one evaluation to the next, on nodes and on the server.
            stop_when: checked after each merge; see `StopWhen`.
            config_key: name of the ConfigRecord in messages.
            loss_key: metric with a device's mean training loss.
            square_loss_key: metric with the mean of its squared per-example losses over the round.
            recheck_s: how long to wait before looking again for nodes, in s, when too few are
                online.
            checkpoints: where to keep what a run must not lose: a folder, or `Checkpoints` for
                one in some versions only. A grid that keeps the run itself, as a simulation does,
                comes first.
            resume: a checkpoint, or a folder of them, to go on from; jobs that were out then are
                lost, and their devices free.
            version_memory_bytes: memory that model versions in flight may take together, the
                current one included, >= 0; past it the oldest ones wait on disk, in the folder of
                `checkpoints` or else the system's temporary folder (TMPDIR), in files that vanish
                with the process. No limit if not given. Results are the same to the last bit.
            seed: of all choices.

        Raises:
            ConfigError: a setting is out of range.
        """
        self.selector = Random() if selector is None else selector
        self.schedule = Schedule() if schedule is None else schedule
        self.weighting = ByAge(constant()) if weighting is None else weighting
        self.server_optimizer = SGD() if server_optimizer is None else server_optimizer
        self.normalise: Normalise = normalise
        self.update: Literal["delta", "model"] = update
        self.validation = Validation() if validation is None else validation
        self.robust, self.forecast_request = robust, forecast_request
        self.rejections: Counter[str] = Counter()
        """What the gate of the latest run refused, capped and clipped; see `Reputation.counts`."""
        self.train_config = dict(train_config or {})
        self.evaluate_nodes, self.evaluate_every = evaluate_nodes, evaluate_every
        self.stop_when = stop_when or (lambda _: False)
        self.config_key, self.loss_key = config_key, loss_key
        self.square_loss_key, self.recheck_s, self.seed = square_loss_key, recheck_s, seed
        if isinstance(checkpoints, str | Path):
            checkpoints = Checkpoints(checkpoints)
        self.checkpoints, self.resume = checkpoints, resume
        self.version_memory_bytes = version_memory_bytes
        self.result = Result()
        """What the latest run has reached so far; the same object that `start` returns."""
        self._check()

    def _check(self) -> None:
        require(
            self.normalise in {"examples", "buffer_size", "weights"},
            *("normalise", self.normalise, "examples|buffer_size|weights"),
        )
        require(self.update in {"delta", "model"}, "update", self.update, "delta|model")
        require(
            self.evaluate_nodes == 0 or is_count(self.evaluate_nodes),
            *("evaluate_nodes", self.evaluate_nodes, "an integer >= 0 (0 asks nobody)"),
        )
        require(
            is_count(self.evaluate_every),
            *("evaluate_every", self.evaluate_every, "an integer >= 1 (1 evaluates each version)"),
        )
        size = self.schedule.buffer_size
        if self.robust is not None and isinstance(size, int):
            require(
                size >= self.robust.least,
                *(
                    "schedule.buffer_size",
                    size,
                    f"at least {self.robust.least} for {self.robust!r}",
                ),
            )
            require(
                self.schedule.send == "after_step" or self.schedule.distinct,
                *("schedule.distinct", False, "True: a rule counts nodes, not updates"),
            )
        limit = self.version_memory_bytes
        require(
            limit is None or limit == 0 or is_count(limit),
            *("version_memory_bytes", limit, "a whole number of bytes >= 0, or None for no limit"),
        )
        require(self.recheck_s > 0, "recheck_s", self.recheck_s, "seconds > 0")
        if self.normalise == "weights" and self.schedule.buffer_size == 1:
            logger.warning(
                "normalise = 'weights' with buffer_size = 1 divides each update by its own weight, "
                "which undoes every penalty: choose 'buffer_size' or 'examples'"
            )

    def start(  # noqa: PLR0917 - Flower's signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train until `num_rounds` versions have been made, or `stop_when` holds.

        Each call starts anew, or from `resume`: what selector, weighting and server optimizer
        learn on the way is learnt by copies.

        Args:
            grid: where the nodes are.
            initial_arrays: version 0 of the model.
            num_rounds: versions to make, >= 0, with those of the run that is resumed.
            timeout: seconds after which a job is given up; also the messages' time to live.
            train_config: sent with every training job.
            evaluate_config: sent with every evaluation job.
            evaluate_fn: called with (version, arrays) for version 0, every `evaluate_every`
                versions, and the last.

        Returns:
            The last model and all metrics, by version.

        Raises:
            ConfigError: the model or an argument is unusable, or the selector breaks its contract.
            FedstaleError: jobs fail one after the other and none succeeds.
            ResumeError: there is no whole checkpoint, or it belongs to another model.
        """
        require(num_rounds >= 0, "num_rounds", num_rounds, "an integer >= 0")
        require(timeout > 0, "timeout", timeout, "seconds > 0")
        self.summary()
        self.result = Result(arrays=initial_arrays)
        with without_stalls(grid) as own:
            checkpointer = own.runtime.checkpointer or self.checkpoints or NoCheckpoints()
            state = checkpointer.restored()
            # Of another grid's run, nothing is in flight here.
            survive = state is not None and checkpointer.jobs_survive
            if state is None and self.resume is not None:
                state = read_checkpoint(self.resume)
            loop = EventLoop(
                self,
                deepcopy((self.selector, self.weighting, self.server_optimizer)),
                own,
                initial_arrays,
                timeout_s=timeout,
                configs={
                    "train": {**self.train_config, **(train_config or {})},
                    "evaluate": dict(evaluate_config or {}),
                },
                evaluate_fn=evaluate_fn,
                checkpointer=checkpointer,
            )
            loop.run(num_rounds, state, jobs_survive=survive)
        return self.result

    def summary(self) -> None:
        """Log the settings."""
        logger.info("%s:", type(self).__name__)
        for name in (
            "selector",
            "schedule",
            "weighting",
            "server_optimizer",
            "normalise",
            "update",
            "robust",
            "validation",
            "forecast_request",
        ):
            logger.info("  %s = %s", name, getattr(self, name))

    # Flower's verbs of a round. There are no rounds here.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise: see `start`."""
        self._no_rounds()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Raise: see `start`."""
        self._no_rounds()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raise: see `start`."""
        self._no_rounds()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Raise: see `start`."""
        self._no_rounds()

    def _no_rounds(self) -> NoReturn:
        raise FedstaleError(
            f"{type(self).__name__} merges replies as they come and has no separate steps of a "
            "round: call start(), and do not wrap it in a strategy that calls them itself"
        )
