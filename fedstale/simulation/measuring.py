"""What an app's work costs, measured: a few clients train and evaluate for real, on this machine.

The app's own ServerApp sends the messages, so clients get the model and the settings that they
would get in a run. What is measured is processor time on one thread, several times with clients of
several sizes. It is written down as work units: seconds of the median phone of AI Benchmark's
ranking, all of its processor. What that phone does in a second follows from published times of
float networks on two phones of the ranking, scaled by the scores; what a core does is measured with
the matrix products that MobileNet's pointwise convolutions are.

References:
    TensorFlow Lite, performance measurement: times on the processor, four threads, Android 10.
    Howard et al. MobileNets. arXiv 1704.04861, 2017. Zoph et al. Learning Transferable
    Architectures. CVPR 2018. timm's model cards: multiply-adds.
    Ignatov et al. AI Benchmark. ICCV Workshops 2019: CPU_F_AI_Score of phones.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from threadpoolctl import threadpool_limits

from fedstale.compat import Replacement
from fedstale.config import Costs, SimulationConfig
from fedstale.errors import ConfigError, RunEnded, first_line, quoted
from fedstale.flower import own_copy, own_message, reply_with, trains_nothing
from fedstale.simulation.costs import (
    examples_in,
    handled_kinds,
    is_work,
    kind_of,
    missing_costs,
    undeclared_queries,
)
from fedstale.simulation.executors import ClientCall, ClientReply, Executor, InlineExecutor
from fedstale.simulation.executors.base import imported_torch
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.nodes import NodeConfigs
from fedstale.simulation.run import seed_server, serve
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.stages import StepsDone
from fedstale.traces import TraceSet

CLIENTS, RUNS, LEAST_S = 5, 5, 5.0
"""Clients measured with each kind of message, and at least so many runs of each and so many s of
runs: a machine is busy for seconds at a time."""
_BUDGET_S = 25.0
"""For all runs, though each client that is measured runs twice."""
_REPETITIONS = 20
"""Messages to clients that had such a one before, after which no new client is expected."""
_PATIENCE_S = 10.0
"""Wall time without a client to measure, after which no message of a new kind is expected."""
_SIZES_APART = 1.5
"""Sizes that differ as much tell a fixed time from the time of an example."""
_MATTERS = 0.05
"""Share of a message's time from which on a fixed time counts."""
_WIDE = 1.5
"""Ratio from which on a measurement is not to be trusted."""
_BY_EXAMPLE = {"train": "work-per-example", "evaluate": "evaluate-work-per-example"}
MEDIAN_SCORE = 1548
"""Of the ranking's 333 phones; it is that of a phone with a MediaTek Helio P60."""
SCORES = {"Pixel 3": 2324, "Pixel 4": 3212}
TIMES = {
    "MobileNet 1.0 224": (0.569, {"Pixel 3": 23.9, "Pixel 4": 14.0}),
    "NASNet Mobile": (0.564, {"Pixel 3": 56.0, "Pixel 4": 34.5}),
    "Inception-ResNet v2": (13.2, {"Pixel 4": 272.6}),
    "Inception v4": (12.3, {"Pixel 3": 486.0, "Pixel 4": 324.1}),
}
"""10^9 multiply-adds of a network, and ms of an inference by phone."""
# Pixels, channels in and channels out of MobileNet's pointwise convolutions.
_PRODUCTS = (
    (12544, 32, 64),
    (3136, 64, 128),
    (3136, 128, 128),
    (784, 128, 256),
    (784, 256, 256),
    (196, 256, 512),
    *[(196, 512, 512)] * 5,
    (49, 512, 1024),
    (49, 1024, 1024),
)
_TRIALS = 20


@dataclass
class _Client:
    """A message to a client, and what its runs took."""

    call: ClientCall
    share: float
    """That it does of a whole job."""
    examples: float | None
    """That its reply states."""
    seconds: list[float]
    """Of processor time, by run."""


class Timing(NamedTuple):
    """Processor time of a kind of message in s, by what it is charged by."""

    middle: float
    """Median over clients, of the fastest run of each."""
    low: float
    """Of the client with the lowest."""
    high: float
    """Of the client with the highest."""
    fixed: float
    """Of each message besides, whatever its examples; 0 where that hardly counts."""
    is_apart: bool
    """Whether clients differ enough in size to tell that."""
    clients: int
    runs: int
    """Of each client."""
    busy: float
    """How many times the fastest run of a client its median run takes."""

    @classmethod
    def of(cls, sizes: Sequence[float], runs: Sequence[Sequence[float]]) -> "Timing":
        """Return the time of one unit of size.

        Other programs only slow a run down, so the fastest run of each client counts. The slope is
        the median of those between clients whose sizes are far enough apart (Theil and Sen), which
        a client that was delayed does not move.

        Args:
            sizes: of clients, > 0, such as examples x epochs.
            runs: seconds of the runs of each.
        """
        x, y = np.array(sizes), np.array([min(own) for own in runs])
        i, j = np.nonzero(x[None, :] >= _SIZES_APART * x[:, None])
        slope = float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if i.size else 0.0
        fixed = float(np.median(y - slope * x)) if slope > 0.0 else 0.0
        if fixed < _MATTERS * np.median(y):
            fixed = 0.0
        each = np.maximum((y - fixed) / x, 0.0)
        return cls(
            middle=float(np.median(each)),
            low=float(min(each)),
            high=float(max(each)),
            fixed=fixed,
            is_apart=bool(i.size),
            clients=len(x),
            runs=min(map(len, runs)),
            busy=float(np.median([np.median(own) / min(own) for own in runs])),
        )


class Phones(NamedTuple):
    """Median phones that a core is worth: a second of it is as many work units."""

    middle: float
    """With the median of the published times."""
    low: float
    """With the network that phones run best."""
    high: float
    """With the network that phones run worst."""


def phones_of_core() -> Phones:
    """Measure how many median phones a core of this machine is worth."""
    products = [
        (np.ones((n, before), np.float32), np.ones((before, after), np.float32))
        for n, before, after in _PRODUCTS
    ]
    seconds: list[float] = []
    with threadpool_limits(1):
        for _ in range(_TRIALS):
            started = time.process_time()
            for x, y in products:
                x @ y
            seconds.append(time.process_time() - started)
    # Other programs only slow it down.
    rate = sum(map(np.prod, _PRODUCTS)) / 1e9 / min(seconds)
    rates = phone_rates()
    return Phones(*(float(rate / x) for x in (np.median(rates), max(rates), min(rates))))


def phone_rates() -> list[float]:
    """Return 10^9 multiply-adds a second of the median phone, by network and phone."""
    return [
        work / ms * 1e3 * MEDIAN_SCORE / SCORES[phone]
        for work, times in TIMES.values()
        for phone, ms in times.items()
    ]


@dataclass(frozen=True)
class Measured:
    """What was found out of an app's costs."""

    costs: Costs
    """In work units."""
    timings: Mapping[str, Timing]
    """By the key of the costs that follows from it."""
    phones: Phones
    """Median phones that a core of this machine is worth."""
    unmeasured: Sequence[str]
    """Keys of work that no client was asked to do, which are as declared."""
    missing: Sequence[str]
    """Those of them that are not declared either, without which messages have no cost."""

    def warnings(self) -> list[str]:
        """Return in a sentence each what makes the costs uncertain."""
        found = [
            f"{key} is uncertain, since the median run takes {timing.busy:.1f} times the fastest: "
            "measure again on a machine that does nothing else"
            for key, timing in self.timings.items()
            if timing.busy > _WIDE
        ]
        return found + [
            f"{key} is uncertain, since clients take {timing.low:.3g} to {timing.high:.3g} s: "
            "measure again with more examples on each client, or declare a function `work`"
            for key, timing in self.timings.items()
            if timing.high > _WIDE * timing.low
        ]


class MeasuringExecutor(Executor):
    """Runs some clients for each kind of message that asks for work, and measures them.

    All other clients give the reply of the last that was measured, without running. A node that
    runs after all has first to do what it was asked before, if that leaves something in its state.
    """

    description = "a few clients, measured"

    def __init__(self, client: ClientApp) -> None:
        """Measure nothing yet."""
        self._inner = InlineExecutor(client)
        self.kinds = list(filter(is_work, handled_kinds(client)))
        """What may be asked of a client that is work."""
        self._asked: set[tuple[str, int]] = set()
        self._repetitions = 0
        self._spent_s, self._latest = 0.0, time.perf_counter()
        self._replies: dict[str, Message] = {}
        self._remembered: set[str] = set()
        """Kinds of messages that change what a node remembers."""
        self._owed: dict[int, list[ClientCall]] = {}
        """What nodes were asked that would have changed it, and have not run."""
        self.clients: dict[str, list[_Client]] = {}
        """Those that were measured, by kind of message."""

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Raises:
            ConfigError: a client fails.
            RunEnded: everything is measured, or no other client is asked for what is not.
        """
        return [self._run(call) for call in calls]

    def _run(self, call: ClientCall) -> ClientReply:
        kind, node_id = kind_of(call.message), call.message.metadata.dst_node_id
        of_secagg = kind.startswith("train") and trains_nothing(call.message.content)
        if of_secagg or not is_work(kind):
            self._catch_up(call)
            return self._inner.run([call])[0]
        asked = kind, node_id
        self._repetitions += asked in self._asked
        if self._is_over():
            raise RunEnded("everything is measured")
        if asked not in self._asked and not self._is_done(kind):
            self._catch_up(call)
            self._measure(kind, call)
        elif kind in self._remembered:
            self._owed.setdefault(node_id, []).append(call)
        self._asked.add(asked)
        content = own_copy(self._replies[kind].content)
        return ClientReply(reply_with(call.message, content), call.context)

    def _is_over(self) -> bool:
        """Test if everything is measured, or nothing more is expected."""
        if all(map(self._is_done, self.kinds)):
            return True
        if all(kind in self.clients for kind in self.kinds):
            return self._repetitions > _REPETITIONS
        return self._repetitions > 0 and time.perf_counter() - self._latest > _PATIENCE_S

    def _catch_up(self, call: ClientCall) -> None:
        """Run the messages that a node was spared before, so that it remembers them.

        Raises:
            RunEnded: there is no time left for it.
        """
        started = time.perf_counter()
        for owed in self._owed.pop(call.context.node_id, ()):
            if self._spent_s + time.perf_counter() - started > _BUDGET_S:
                raise RunEnded("no time is left")
            owed.context.state = call.context.state
            call.context.state = self._timed(owed)[2]
        self._spent_s += time.perf_counter() - started

    def repeat(self) -> None:
        """Run all measured clients in turn, until the fastest run of each is known."""
        everyone = [client for own in self.clients.values() for client in own]
        runs, started = 1, time.perf_counter()
        while everyone and (runs < RUNS or time.perf_counter() - started < LEAST_S):
            for client in everyone:
                if self._spent_s + time.perf_counter() - started > _BUDGET_S:
                    return
                client.seconds.append(self._timed(client.call)[0])
            runs += 1

    def _is_done(self, kind: str) -> bool:
        """Return whether enough clients are measured, or another would take too long."""
        clients = len(self.clients.get(kind, ()))
        return clients >= CLIENTS or (clients > 0 and self._spent_s > _BUDGET_S / 2)

    def _measure(self, kind: str, call: ClientCall) -> None:
        """Measure a client, and keep the context that it leaves."""
        started = time.perf_counter()
        # The first time, a client loads data and libraries.
        self._timed(call)
        torch = imported_torch()
        if torch is not None:
            torch.set_num_threads(1)
        before = _copied(call)
        seconds, reply, call.context.state = self._timed(call)
        if call.context.state != before.context.state:
            self._remembered.add(kind)
        examples, done = examples_in(reply.content), StepsDone.of(reply.content)
        if kind in _BY_EXAMPLE and examples is None:
            units = _rounded(seconds * phones_of_core().middle)
            raise ConfigError(
                f"the reply to {kind!r} states no num-examples: add it to its metrics, or declare "
                f"the work of a whole message in [tool.fedstale.work], here about {units}"
            )
        share = 1.0 if done is None else done.share
        client = _Client(before, share, examples, [seconds])
        self.clients.setdefault(kind, []).append(client)
        if examples or kind not in self._replies:
            self._replies[kind] = reply
        self._latest = time.perf_counter()
        self._spent_s += self._latest - started

    def _timed(self, call: ClientCall) -> tuple[float, Message, RecordDict]:
        """Return the processor time of a message on one thread in s, the reply, and the state.

        Raises:
            ConfigError: the client fails.
        """
        call = _copied(call)
        with threadpool_limits(1):
            started = time.process_time()
            (answer,) = self._inner.run([call])
            seconds = time.process_time() - started
        if answer.reply.has_error():
            raise ConfigError(f"the client failed: {first_line(quoted(answer.reply.error.reason))}")
        return seconds, answer.reply, answer.context.state


def measure(config: SimulationConfig, n_devices: int, nodes: NodeConfigs | None = None) -> Measured:
    """Measure the costs of an app by training and evaluating on a few of its clients.

    Args:
        config: the settings; what they say of costs is kept where nothing is measured.
        n_devices: how many nodes the app sees, all always online.
        nodes: what the first of them have in their node config; None as of a `TraceGrid`.

    Returns:
        The costs, in work units. Epochs that are not declared are those of the only run-config key
        that speaks of epochs, or 1.

    Raises:
        FedstaleError: the app cannot be run, or a client fails, none trains, or none tells its
            number of examples.
    """
    app = FlowerApp.find(config.app)
    run_config, named = app.with_strategy(config)
    declared = Costs.from_table({**app.costs.table(), **config.costs})
    traces = TraceSet.ideal(config.devices or n_devices)
    with app.importable():
        server = app.load_server()
        executor = MeasuringExecutor(app.load_client())
        grid = TraceGrid(
            traces,
            executor,
            costs=Costs(),
            seed=config.seed,
            run_config=run_config,
            work=lambda message: 0.0,
            nodes=nodes,
        )
        # A strategy draws whom it asks, and clients differ in size.
        seed_server(config.seed)
        context = Context(1, 1, {}, RecordDict(), run_config)
        with suppress(RunEnded, SystemExit):
            serve(grid, app, server, context, Replacement(named, seed=config.seed))
        with grid.running(is_ours=True):
            executor.repeat()
    if not executor.clients:
        raise ConfigError("the app asked no client for any work: nothing was measured")
    costs, timings, phones = _costs(executor, declared, run_config)
    stated = {f"work.{kind}" for kind in costs.work}
    stated |= {key for key in _BY_EXAMPLE.values() if costs.table().get(key) is not None}
    unmeasured = sorted(stated - set(timings))
    missing = missing_costs(executor.kinds, costs) or undeclared_queries(executor.kinds, costs)
    return Measured(costs, timings, phones, unmeasured, missing)


def pasted(measured: Measured) -> str:
    """Return measured costs as the table that an app's pyproject.toml holds."""
    usual, phones = Costs().table(), measured.phones
    table = {k: value for k, value in measured.costs.table().items() if usual.get(k) != value}
    said = ["Measured on one thread of this machine, in seconds of processor time:"]
    for key, timing in measured.timings.items():
        said.append(
            f"{key}: {timing.middle:.3g}, {timing.low:.3g} to {timing.high:.3g} over "
            f"{timing.clients} clients, the fastest of {timing.runs} runs each"
        )
        if timing.fixed:
            said.append(
                f"  besides {timing.fixed:.3g} in each message whatever its examples, which is not "
                "in the table: a function `work` can charge it"
            )
        elif not timing.is_apart and not key.startswith("work."):
            said.append(
                "  with what a message takes whatever its examples: clients are too equal in size "
                "to tell it"
            )
    seconds = " ".join(f"costs.{key}={t.middle:.3g}" for key, t in measured.timings.items())
    said += [
        f"In seconds of this core: --set '{seconds}'",
        f"A core of this machine is worth {phones.middle:.2g} median phones ({phones.low:.2g} to "
        f"{phones.high:.2g}, by network), and a work unit",
        f"is a second of one, so the table holds seconds times {phones.middle:.3g}.",
    ]
    if measured.unmeasured:
        said.append(
            f"Not measured, since no client was asked for it: {', '.join(measured.unmeasured)}. "
            "That stands here as it was declared."
        )
    if measured.missing:
        said.append(
            "Neither measured nor declared, since no client was asked for it: "
            f"{', '.join(measured.missing)}. Put in what you expect."
        )
    said += [f"Warning: {text}." for text in measured.warnings()]
    comments = "".join(f"# {line}\n" for line in said)
    return f"{comments}[tool.fedstale]\n{tomli_w.dumps(table)}"


def _costs(
    executor: MeasuringExecutor, declared: Costs, run_config: Mapping[str, Any]
) -> tuple[Costs, dict[str, Timing], Phones]:
    """Put measured costs in the place of declared ones; return them, and the timings by key."""
    epochs, work = declared.epochs, dict(declared.work)
    if epochs is None:
        named = [key for key, n in run_config.items() if "epoch" in key and type(n) is int]
        epochs = named[0] if len(named) == 1 else 1
    costs = replace(declared, epochs=epochs)
    passes = costs.resolved(run_config).epochs
    assert isinstance(passes, int)
    timings: dict[str, Timing] = {}
    phones = phones_of_core()
    for kind, clients in executor.clients.items():
        main, _, action = kind.partition(".")
        whole = Timing.of([c.share for c in clients], [c.seconds for c in clients])
        units = _rounded(whole.middle * phones.middle)
        if action:
            # What is said by example holds for all actions.
            timings[f"work.{kind}"], work[kind] = whole, units
            continue
        sized = [(client.examples, client) for client in clients if client.examples]
        if not sized:
            raise ConfigError(f"no client has examples to {main} with: nothing was measured")
        each = max(passes, 1) if main == "train" else 1
        sizes = [examples * each * client.share for examples, client in sized]
        timing = Timing.of(sizes, [client.seconds for _, client in sized])
        timings[_BY_EXAMPLE[main]] = timing
        units = _rounded(timing.middle * phones.middle)
        if main == "train":
            usual = int(np.median([examples for examples, _ in sized]))
            costs = replace(costs, work_per_example=units, examples=usual)
        else:
            costs = replace(costs, evaluate_work_per_example=units)
    return replace(costs, work=work), timings, phones


def _copied(call: ClientCall) -> ClientCall:
    """Return a call whose context and records nothing else writes to."""
    context = copy(call.context)
    context.state = deepcopy(context.state)
    return ClientCall(own_message(call.message), context, call.seed)


def _rounded(value: float) -> float:
    """Return a number to three digits; a clock knows no more."""
    return float(f"{value:.3g}")
