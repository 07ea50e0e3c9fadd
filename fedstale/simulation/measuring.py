"""What an app's work costs, measured: one client trains and evaluates for real, on this machine.

The app's own ServerApp sends the messages, so the client gets the model and the settings that it
would get in a run. What is measured is processor time, and it is written down as work units: the
reference device, which does one unit a second, is then one core of this machine.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import tomli_w
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale.config import Costs, SimulationConfig
from fedstale.errors import ConfigError, RunEnded
from fedstale.flower import own_copy, own_message, reply_with, trains_nothing
from fedstale.simulation.costs import (
    examples_in,
    handled_kinds,
    is_work,
    kind_of,
)
from fedstale.simulation.executors import ClientCall, ClientReply, Executor, InlineExecutor
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.nodes import NodeConfigs
from fedstale.simulation.replacement import Replacement
from fedstale.simulation.run import seed_server
from fedstale.simulation.stock_strategies import server_fn_on, stock_strategies_reporting
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.stages import StepsDone
from fedstale.traces import TraceSet


class MeasuringExecutor(Executor):
    """Runs one client for each kind of message that asks for work, and measures it.

    All other clients give the same reply, without running.
    """

    description = "one client, measured"

    def __init__(self, client: ClientApp) -> None:
        """Measure nothing yet."""
        self._inner = InlineExecutor(client)
        self._missing = set(filter(is_work, handled_kinds(client)))
        self._asked: set[tuple[str, int]] = set()
        self.replies: dict[str, Message] = {}
        """The reply to each kind of message."""
        self.seconds: dict[str, float] = {}
        """Processor time that each took, in s."""

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Raises:
            ConfigError: the client fails.
            RunEnded: everything is measured, or the same is asked once more.
        """
        return [self._run(call) for call in calls]

    def _run(self, call: ClientCall) -> ClientReply:
        kind = kind_of(call.message)
        of_secagg = kind.startswith("train") and trains_nothing(call.message.content)
        if of_secagg or not is_work(kind):
            return self._inner.run([call])[0]
        asked = kind, call.message.metadata.dst_node_id
        if not self._missing - set(self.replies) or asked in self._asked:
            raise RunEnded("everything is measured")
        self._asked.add(asked)
        if kind not in self.replies:
            # The first time, a client loads data and libraries.
            self._inner.run([_copied(call)])
            started = time.process_time()
            (answer,) = self._inner.run([_copied(call)])
            self.seconds[kind] = time.process_time() - started
            if answer.reply.has_error():
                raise ConfigError(f"the client failed: {answer.reply.error.reason}")
            self.replies[kind] = answer.reply
            if (done := StepsDone.of(answer.reply.content)) is not None:
                self.seconds[kind] /= done.share
        content = own_copy(self.replies[kind].content)
        return ClientReply(reply_with(call.message, content), call.context)


def measure(
    config: SimulationConfig, n_devices: int, nodes: NodeConfigs | None = None
) -> tuple[Costs, list[str]]:
    """Let one client of an app train and evaluate, and return what that says of the app's costs.

    Args:
        config: the settings; what they say of costs is kept where nothing is measured.
        n_devices: how many nodes the app sees, all always online.
        nodes: what the first of them have in their node config; None as of a `TraceGrid`.

    Returns:
        The costs, in seconds of processor time of this machine as work units. Epochs that are not
        declared are those of the only run-config key that speaks of epochs, or 1. And the keys of
        work that no client was asked to do, which are as declared.

    Raises:
        FedstaleError: the app cannot be run, or its client fails, trains nothing or does not tell
            its number of examples.
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
        modules, ended = app.modules(), suppress(RunEnded, SystemExit)
        replacing = stock_strategies_reporting(grid.runtime, Replacement(named, seed=config.seed))
        with grid.running(*modules), replacing, server_fn_on(grid, *modules), ended:
            server(grid, Context(1, 1, {}, RecordDict(), run_config))
    costs = _costs(executor, declared, run_config)
    by_example = {"train": "work-per-example", "evaluate": "evaluate-work-per-example"}
    stated = {f"work.{kind}": kind for kind in costs.work}
    stated |= {key: kind for kind, key in by_example.items() if costs.table().get(key) is not None}
    return costs, [key for key, kind in stated.items() if kind not in executor.seconds]


def pasted(costs: Costs, unmeasured: Sequence[str]) -> str:
    """Return measured costs as the table that an app's pyproject.toml holds.

    Args:
        costs: in seconds of processor time as work units.
        unmeasured: keys that are as declared.
    """
    usual = Costs().table()
    table = {key: value for key, value in costs.table().items() if usual.get(key) != value}
    left = (
        f"# Not measured, since no client was asked for it: {', '.join(unmeasured)}. That stands\n"
        "# here as it was declared, in the unit of before.\n"
    )
    return (
        "# Measured: one work unit is one second of a core of this machine, so a device of the\n"
        "# traces that does 1 unit/s is as fast. For devices k times slower, multiply by k.\n"
        f"{left if unmeasured else ''}[tool.fedstale]\n{tomli_w.dumps(table)}"
    )


def _costs(executor: MeasuringExecutor, declared: Costs, run_config: Mapping[str, Any]) -> Costs:
    """Return what is declared, with what was measured in its place."""
    if not executor.seconds:
        raise ConfigError("the app asked no client for any work: nothing was measured")
    epochs, work = declared.epochs, dict(declared.work)
    if epochs is None:
        named = [key for key, n in run_config.items() if "epoch" in key and type(n) is int]
        epochs = named[0] if len(named) == 1 else 1
    costs = replace(declared, epochs=epochs)
    passes = costs.resolved(run_config).epochs
    assert isinstance(passes, int)
    for kind, seconds in executor.seconds.items():
        examples = examples_in(executor.replies[kind].content)
        main, _, action = kind.partition(".")
        if action:
            # What is said by example holds for all actions.
            work[kind] = _rounded(seconds)
        elif not examples:
            raise ConfigError(
                f"the reply to {kind!r} states no num-examples: add it to its metrics, or declare "
                f"the work of a whole message in [tool.fedstale.work], here {_rounded(seconds)}"
            )
        elif main == "train":
            each = _rounded(seconds / examples / max(passes, 1))
            costs = replace(costs, work_per_example=each, examples=int(examples))
        else:
            costs = replace(costs, evaluate_work_per_example=_rounded(seconds / examples))
    return replace(costs, work=work)


def _copied(call: ClientCall) -> ClientCall:
    """Return a call whose context and records nothing else writes to."""
    context = copy(call.context)
    context.state = deepcopy(context.state)
    return ClientCall(own_message(call.message), context, call.seed)


def _rounded(value: float) -> float:
    """Return a number to three digits; a clock knows no more."""
    return float(f"{value:.3g}")
