"""`StaleStrategy`: a Flower strategy for devices that report late, composed of exchangeable parts.

A selector says which nodes to send to, a schedule when and how many updates to wait for, a
weighting how much a stale update counts, and a server optimizer what to do with the aggregated
update. Everything published is a composition of these; see `methods`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from math import ceil
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, get_args

from annotated_types import MinLen
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies.pace import Pace, Progress
from fedstale.strategies.robust import Rule
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.selection import Random, Selector
from fedstale.strategies.server.buffer import Normalise
from fedstale.strategies.server.checkpoint import Checkpoints
from fedstale.strategies.server.checks import Validation
from fedstale.strategies.server.flower_rounds import FlowerRounds
from fedstale.strategies.server.loop import EventLoop
from fedstale.strategies.server.superlink import without_stalls
from fedstale.strategies.server_optimizer import SGD, ServerOptimizer
from fedstale.strategies.stages import LocalWork, Requirement, Stage
from fedstale.strategies.types import Checked, Count, Share, Whole, is_count, require, require_known
from fedstale.strategies.weighting import ByAge, Weighting, constant
from fedstale.until import Until

logger = logging.getLogger(__name__)

UpdateForm = Literal["delta", "model"]
Key = Annotated[str, MinLen(1), "a name"]

_SELECTOR = "a selector such as Oort(), or AgentSelector('agents/mine') of a folder"
_STAGES = "instances of Stage, one of a name, such as [Compression('int8')]"
_LIMIT = "a limit such as 'accuracy 0.9' or '2h'"


class Options(TypedDict, total=False):
    """The settings of `StaleStrategy`, for the signature of a strategy that passes them on.

    `def __init__(self, mine: float, **options: Unpack[Options])` completes in an editor and is
    checked by mypy and pyright.
    """

    selector: Selector | None
    schedule: Schedule | None
    pace: Pace | None
    weighting: Weighting | None
    server_optimizer: ServerOptimizer | None
    normalise: Normalise
    update: UpdateForm
    robust: Rule | None
    validation: Validation | None
    stages: Sequence[Stage]
    fraction_evaluate: float
    min_evaluate_nodes: int
    evaluate_every: int
    until: Until | str | None
    arrayrecord_key: str
    configrecord_key: str
    weighted_by_key: str
    checkpoints: Checkpoints | str | Path | None
    resume: str | Path | None
    seed: int


class _WholeSignature:
    """The signature of a strategy, with the settings that it passes on by `**options`."""

    def __get__(self, strategy: object, cls: "type[StaleStrategy]") -> Signature:
        """Return the arguments of a class, then those of its parents that are not among them.

        A default of a parent is shown as `...`, since the class may compose another.
        """
        own = list(signature(cls.__init__).parameters.values())[1:]
        if own and own[-1].kind is Parameter.VAR_KEYWORD:
            names = {parameter.name for parameter in own}
            parent = next(base for base in cls.__mro__[1:] if issubclass(base, StaleStrategy))
            own[-1:] = [
                Parameter(
                    passed.name,
                    Parameter.KEYWORD_ONLY,
                    default=passed.default if passed.default is Parameter.empty else ...,
                    annotation=passed.annotation,
                )
                for passed in signature(parent).parameters.values()
                if passed.name not in names and passed.kind is not Parameter.VAR_POSITIONAL
            ]
        return Signature(own)


class StaleStrategy(Checked, Strategy):
    """Runs one event loop over a grid: select, send, receive, weigh, step, evaluate.

    A "round" of the `Result` is one version of the model, that is, one server step. Stock
    ClientApps work unchanged: they receive `server-round` in their config and answer with weights,
    a number of examples and metrics. A bad reply is rejected with its reason and never ends a run.

    Integer and boolean arrays, such as BatchNorm's counters, are averaged without any staleness
    weight and rounded; neither weightings nor server optimizers see them.

    Settings that Flower's strategies have too carry Flower's names; where one differs, its
    description says how.

    Args:
        selector: which nodes to send to; `Random()` if not given.
        schedule: when to send and what to wait for; if not given, all nodes and all replies.
        pace: decides anew for each step how many jobs are in flight and how many updates make it,
            such as `Ramp(50)`; if not given, the selector if it is a `Pace`, or the schedule.
        weighting: of stale updates; if not given, age does not matter.
        server_optimizer: `SGD(eta=1)` if not given.
        normalise: divide the sum of a buffer by the "examples" behind it (FedAvg), by its
            "buffer_size" (FedBuff) or by the sum of "weights". By "steps" (FedNova), each update is
            divided by its number of local steps, and their mean by examples is multiplied by the
            mean of these numbers: devices that train longer pull no harder. Replies must state
            their steps, as apps do that call `fedstale.client.local_steps`; others are rejected.
        update: "delta" adds what a device changed; "model" pulls the server towards the device's
            whole model, as FedAsync does.
        robust: rule that aggregates although some nodes are adversarial, as `TrimmedMean(f=2)`; it
            keeps the updates of one buffer, in which no node is twice, since it counts nodes. If
            not given, updates are averaged as they come.
        validation: what checks replies, and rejects updates that are too stale.
        stages: what happens to messages, replies and steps besides, in this order: `Compression`,
            `LocalWork`, `Adapters`, `Relay`, `ForecastRequest`, `Privacy`, `AuditRecord`, or a
            `Stage` of your own.
        fraction_evaluate: share of the online nodes that evaluate a version, chosen at random, in
            [0, 1]. Flower's default is 1; and its 0 switches `min_evaluate_nodes` off.
        min_evaluate_nodes: nodes that evaluate a version at least, of those online; 0 for none.
            Flower's default is 2, and it waits until so many are online.
        evaluate_every: versions from one evaluation to the next, on nodes and on the server.
        until: what ends a run besides the number of versions, checked after each server step: a
            metric of any source and its target, such as "accuracy 0.9", or a time since the start,
            such as "2h".
        arrayrecord_key: name of the ArrayRecord with the model in messages, and in replies that
            hold several.
        configrecord_key: name of the ConfigRecord in messages.
        weighted_by_key: metric with the number of examples behind an update, > 0.
        checkpoints: where to keep what a run must not lose: a folder, or `Checkpoints`. A grid that
            keeps the run itself, as a simulation does, comes first.
        resume: a checkpoint, or a folder of them, to go on from.
        seed: of all choices.

    Raises:
        ConfigError: a setting is unknown or out of range.

    Example:
        >>> from fedstale.strategies import schedule, weighting
        >>> StaleStrategy(
        ...     schedule=schedule.k_batch_async(concurrency=20, buffer_size=5),
        ...     weighting=weighting.ByAge(weighting.polynomial(0.5)),
        ...     seed=1,
        ... )  # doctest: +NORMALIZE_WHITESPACE
        StaleStrategy(concurrency=20, buffer_size=5, send='after_reply', stragglers='keep',
        weighting=ByAge(polynomial(a=0.5)), seed=1)
    """

    __signature__ = _WholeSignature()

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Refuse settings that the class does not have; a subclass names its own in `__init__`."""
        known = signature(cls).parameters
        parts = {
            f"{name}={part.__name__}": [field.name for field in fields(part)]
            for name, part in (("schedule", Schedule), ("validation", Validation))
        }
        parts["checkpoints=Checkpoints"] = list(signature(Checkpoints).parameters)
        for name in settings:
            require_known(name, known, cls.__name__, parts)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        selector: Annotated[Selector, _SELECTOR] | None = None,
        schedule: Annotated[Schedule, "a schedule such as k_async(20, 5)"] | None = None,
        pace: Annotated[Pace, "a pace such as Ramp(50)"] | None = None,
        weighting: Annotated[Weighting, "a weighting such as Gap()"] | None = None,
        server_optimizer: Annotated[ServerOptimizer, "an optimizer such as Adam()"] | None = None,
        normalise: Normalise = "examples",
        update: UpdateForm = "delta",
        robust: Annotated[Rule, "a rule such as TrimmedMean(f=1)"] | None = None,
        validation: Annotated[Validation, "checks of replies such as Validation(norm_cap=1.5)"]
        | None = None,
        stages: Annotated[Sequence[Stage], _STAGES] = (),
        fraction_evaluate: Annotated[Share, "a share in [0, 1] (0 asks no node)"] = 0.0,
        min_evaluate_nodes: Annotated[Whole, "an integer >= 0 (0 asks no node)"] = 0,
        evaluate_every: Annotated[Count, "an integer >= 1 (1 evaluates each version)"] = 1,
        until: Annotated[Until, _LIMIT] | str | None = None,
        arrayrecord_key: Key = "arrays",
        configrecord_key: Key = "config",
        weighted_by_key: Key = "num-examples",
        checkpoints: Checkpoints | str | Path | None = None,
        resume: str | Path | None = None,
        seed: Whole = 0,
    ) -> None:
        self.selector = Random() if selector is None else selector
        self.schedule = Schedule() if schedule is None else schedule
        if robust is not None and self.schedule.send == "after_reply":
            self.schedule = replace(self.schedule, distinct=True)
        self.pace = pace
        self.weighting = ByAge(constant()) if weighting is None else weighting
        self.server_optimizer = SGD() if server_optimizer is None else server_optimizer
        self.normalise: Normalise = normalise
        self.update: UpdateForm = update
        self.validation = Validation() if validation is None else validation
        self.robust = robust
        self.stages = tuple(stages)
        self.rejections: Counter[str] = Counter()
        """Replies of the latest run that were rejected, capped or clipped, by reason."""
        self.train_config: dict[str, float | str] = {}
        """Sent with every training job; what `start` is given comes first."""
        self.fraction_evaluate = fraction_evaluate
        self.min_evaluate_nodes, self.evaluate_every = min_evaluate_nodes, evaluate_every
        if isinstance(until, str):
            until = Until.parse(until, name=f"strategy.{type(self).__name__}.until")
        self.until = until
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.weighted_by_key, self.seed = weighted_by_key, seed
        if isinstance(checkpoints, str | Path):
            checkpoints = Checkpoints(checkpoints)
        self.checkpoints = Checkpoints() if checkpoints is None else checkpoints
        self.resume = None if resume is None else Path(resume)
        self.result = Result()
        """What the latest run has reached so far; the same object that `start` returns."""
        self._rounds: FlowerRounds | None = None
        self._check()

    def _check(self) -> None:
        size, rule = self.schedule.buffer_size, self.robust
        if rule is not None and isinstance(size, int):
            accepted = f"at least {rule.least} for {rule!r}"
            require(size >= rule.least, "schedule.buffer_size", size, accepted)
        accepted, jobs = (
            "an integer >= 1 with a pace: the most in flight",
            self.schedule.concurrency,
        )
        require(self.pace is None or jobs is not None, "schedule.concurrency", jobs, accepted)
        accepted = "another one with a robust rule: numbers of steps are a device's own"
        by_steps = self.normalise == "steps"
        require(rule is None or not by_steps, "normalise", self.normalise, accepted)
        is_known = len(self.stages) == len({stage.name for stage in self.stages})
        require(is_known, "stages", self.stages, _STAGES)
        asking = [stage.name for stage in self.stages if stage.query]
        accepted = "one that sends queries at most: answers are waited for once"
        require(len(asking) < 2, "stages", asking, accepted)
        for stage in self.stages:
            known = frozenset(get_args(Requirement))
            accepted = f"some of {sorted(known)}"
            require(stage.requires <= known, f"{stage.name}.requires", stage.requires, accepted)
            stage.check(self)
        if self.normalise == "weights" and size == 1:
            logger.warning(
                "normalise = 'weights' with buffer_size = 1 divides each update by its own weight, "
                "which undoes every penalty: choose 'buffer_size' or 'examples'"
            )

    @property
    def run_pace(self) -> Pace | None:
        """The pace of a run: a selector may be one, where the schedule states a concurrency."""
        if self.pace is None and self.schedule.concurrency and isinstance(self.selector, Pace):
            return self.selector
        return self.pace

    def progress(self, **where: Any) -> Progress:
        """Describe to the pace where a run stands, by fields of `Progress`, and its schedule."""
        return Progress(
            concurrency=self.schedule.concurrency or 1,
            buffer_size=self.schedule.buffer_size,
            after_step=self.schedule.send == "after_step",
            least=1 if self.robust is None else self.robust.least,
            **where,
        )

    @property
    def run_stages(self) -> tuple[Stage, ...]:
        """The stages of a run: numbers of steps are asked for where updates are divided by them."""
        asks = any(isinstance(stage, LocalWork) for stage in self.stages)
        if self.normalise == "steps" and not asks:
            return (*self.stages, LocalWork())
        return self.stages

    def start(  # noqa: PLR0917 - Flower's signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Train until `num_rounds` versions have been made, or a rule says stop.

        Each call starts anew, or from a checkpoint: what selector, weighting and server optimizer
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
            should_stop: called with (version, result) after each server step; true ends the run, as
                `until` does. What nodes measure of a version comes later than that.

        Returns:
            The last model and all metrics, by version.

        Raises:
            ConfigError: the model or an argument is unusable, the selector breaks its contract, or
                another process goes on from the same checkpoints.
            FedstaleError: jobs fail one after the other and none succeeds.
            ResumeError: there is no whole checkpoint, or it belongs to another strategy, seed or
                model.
        """
        require(is_count(num_rounds, 0), "num_rounds", num_rounds, "an integer >= 0")
        seconds: object = timeout
        is_time = isinstance(seconds, Real) and float(seconds) > 0
        require(is_time, "timeout", timeout, "seconds > 0")
        self.summary()
        self.result = Result(arrays=initial_arrays)
        with without_stalls(grid) as own:
            checkpointer = own.runtime.checkpointer or self.checkpoints
            state = checkpointer.restored()
            # Of another grid's run, nothing is in flight here.
            survive = state is not None and checkpointer.jobs_survive
            if state is None:
                state = self.checkpoints.to_resume(self.resume)
            for hint in self._hints(num_rounds):
                own.runtime.hint(hint)
            with own.runtime.loop(self, tells=True, resumes=state is not None):
                loop = EventLoop(
                    self,
                    own,
                    initial_arrays,
                    timeout_s=timeout,
                    configs={
                        "train": {**self.train_config, **(train_config or {})},
                        "evaluate": dict(evaluate_config or {}),
                    },
                    evaluate_fn=evaluate_fn,
                    should_stop=should_stop,
                    checkpointer=checkpointer,
                )
                loop.run(num_rounds, state, jobs_survive=survive)
        return self.result

    def _hints(self, num_rounds: int) -> Iterator[str]:
        """Yield what may not be as it was meant."""
        jobs, size = self.schedule.concurrency, self.schedule.buffer_size
        if num_rounds == 0:
            yield "num_rounds = 0 trains nothing: the first model is evaluated, and stays"
        if jobs is not None and isinstance(size, int) and size > jobs:
            yield (
                f"buffer_size = {size} is above concurrency = {jobs}: each server step waits for "
                f"{ceil(size / jobs)} jobs or more one after the other, and may count a node more "
                "than once"
            )

    def summary(self) -> None:
        """Log the algorithm and its settings; those at their default are left out."""
        logger.info("%r", self)

    def settings(self) -> dict[str, str]:
        """Return the settings that are not at their default, as text by name."""
        usual = StaleStrategy()
        of_schedule = [field.name for field in fields(Schedule)]
        others = [name for name in Options.__annotations__ if name != "schedule"]
        return {
            **_changed(self.schedule, usual.schedule, of_schedule),
            **_changed(self, usual, others),
        }

    def __repr__(self) -> str:
        changed = (f"{name}={value}" for name, value in self.settings().items())
        return f"{type(self).__name__}({', '.join(changed)})"

    # Flower's verbs, which a strategy that wraps this one calls; `start` does without them.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round; round 1 starts a run anew.

        Raises:
            ConfigError: it has no rounds, or a setting that only `start` can keep.
        """
        if server_round == 1 or self._rounds is None:
            self._check_rounds()
            self.result = Result()
            self._rounds = FlowerRounds(self, grid, arrays)
        return self._rounds.configure_train(server_round, arrays, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the server step of a round, and the metrics of its training."""
        return self._running_rounds().aggregate_train(replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages to the nodes that evaluate a model, by `fraction_evaluate`."""
        return self._running_rounds().configure_evaluate(server_round, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of what nodes measured, by examples."""
        return self._running_rounds().aggregate_evaluate(server_round, replies)

    def _check_rounds(self) -> None:
        """Raise unless each server step waits for all that was sent, and nothing needs `start`."""
        usual = StaleStrategy()
        for part, default, names in (
            (self.schedule, usual.schedule, ("send", "buffer_size", "deadline_s")),
            (self, usual, ("pace", "until", "checkpoints", "resume")),
        ):
            for name in names:
                value = getattr(part, name)
                if repr(value) != repr(getattr(default, name)):
                    raise ConfigError(
                        f"{type(self).__name__} cannot be wrapped: with {name}={value!r} it has no "
                        "rounds that another strategy's loop could run; wrap a synchronous "
                        "strategy without it, such as FedAvg, FedProx or FedAdam"
                    )

        for stage in self.stages:
            if "start" in stage.requires:
                raise ConfigError(
                    f"{type(self).__name__} cannot be wrapped with the stage {stage!r}, which "
                    "changes messages and replies that another strategy's loop takes as they are"
                )

    def _running_rounds(self) -> FlowerRounds:
        if self._rounds is None:
            raise FedstaleError(f"{type(self).__name__}: configure_train begins a round")
        return self._rounds


def _changed(part: object, usual: object, names: Iterable[str]) -> dict[str, str]:
    """Return the attributes that are not at their default, as text by name."""
    values = {name: repr(getattr(part, name)) for name in names}
    return {name: value for name, value in values.items() if value != repr(getattr(usual, name))}
