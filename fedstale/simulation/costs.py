"""What a message costs a device: the bytes of both ways, and the work in between.

Bytes are those of the records that cross the wire, of each message and of each reply. Work is what
the app declares for the type and action of a message. Nothing is guessed: what is not declared
raises an error that names it.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.config import Costs
from fedstale.errors import ConfigError
from fedstale.flower import Size, entries, trains_nothing
from fedstale.strategies.stages import QUERY, StepsDone, steps_of
from fedstale.strategies.types import MOST_EXAMPLES, Stateful

logger = logging.getLogger(__name__)

WorkHook = Callable[[Message], float | None]
"""Returns the work units of a message; None leaves it to what is declared."""

_BY_EXAMPLES = ("train", "evaluate")
_PASTED = {
    "work-per-example": "0.1            # work units to train one example once",
    "epochs": '1                      # or "local-epochs", the run-config key that holds it',
    "examples": "50                   # of one client, until its first reply tells",
    "evaluate-work-per-example": "0.03  # work units to evaluate one example",
}
_PASTED_WORK = "2.0  # work units of one message; 0 if it only reads what a device has"


class Charge(NamedTuple):
    """Work that a message costs its device."""

    work: float
    """Work units."""
    whole: float
    """Work units of the job in full, of which a share may be asked for."""
    is_expected: bool = False
    """Whether only the reply tells the work."""


class CostModel(Stateful):
    """What messages cost, and what is expected of their replies.

    Only delivered replies teach it, in the order of their delivery, so that a run does not depend
    on when or where clients really run.

    With `model-bytes`, each byte of values (`Size.values`) counts model-bytes / bytes of the model
    times. Bytes of the model are the values of all arrays of the first message sent that holds
    any, without NumPy's headers; a reply that comes before, such as initial parameters, is itself
    the model. Everything else of a message counts as it is.
    """

    saved = ("_examples", "_sum", "_count", "_last", "_first", "_steps", "_model_values")

    def __init__(self, costs: Costs, work: WorkHook | None = None) -> None:
        """Begin with what is declared.

        Args:
            costs: with the number of epochs resolved.
            work: says the work of messages, before what `costs` says.
        """
        self.costs, self._work = costs, work
        self._examples: dict[tuple[str, int], float] = {}
        self._sum: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._last: dict[tuple[str, int], int] = {}
        self._first: dict[str, tuple[int, int]] = {}
        self._steps: dict[tuple[str, int], int] = {}
        """Local steps of a whole job, as replies have stated them; 0 where they state none."""
        self._model_values = 0
        self._rules: dict[tuple[str, bool], tuple[float | None, float]] = {}

    def scale(self, sent: Size) -> float:
        """Return for how many bytes a byte of values stands, once a message of this size is sent.

        Returns:
            NaN while no model is known to compare with.
        """
        if self.costs.model_bytes is None:
            return 1.0
        self._model_values = self._model_values or sent.values
        return self.costs.model_bytes / self._model_values if self._model_values else np.nan

    def message_bytes(self, size: Size, scale: float) -> int:
        """Return the bytes of a message, or of a reply with the scale of its message."""
        if scale != scale:  # noqa: PLR0124 - NaN, and much faster than NumPy's question
            assert self.costs.model_bytes is not None
            return size.fixed + (self.costs.model_bytes if size.values else 0)
        return sum(size) if scale == 1.0 else size.fixed + round(size.values * scale)

    def work(self, message: Message, kind: str, node_id: int, share: float | None = None) -> Charge:
        """Return the work of a message in work units.

        The first of these that says anything: the hook; the table `work` under type and action,
        then under the type; 0 for the stages of SecAgg+ that train nothing; and the examples of
        a `train` or `evaluate` message times the work of each. All others cost 0, but for a query
        of the app's own that is sent arrays: it trains.
        The examples of an evaluation are those in its reply, so before it they are expected.

        Where a share of the local epochs is asked for, what follows from the table and from
        examples is multiplied by the share that the app does. That is as many of its local steps,
        and all of them if its replies state nothing of it; before the first such reply it is
        expected. The hook sees the share in the message, and decides itself.

        Args:
            message: to the node.
            kind: its `kind_of`.
            node_id: of the node.
            share: that the message asks for.

        Raises:
            ConfigError: the app does not declare what the message needs.
        """
        declared = self._hooked(message) if self._work is not None else None
        if declared is not None:
            return Charge(declared, declared)
        rule = kind, kind.startswith("query.") and bool(message.content.array_records)
        if rule not in self._rules:
            self._rules[rule] = self._rule(*rule)
        whole, each = self._rules[rule]
        is_training = kind.startswith("train")
        content = message.content
        if whole is None and is_training and trains_nothing(content):
            return Charge(0.0, 0.0)
        if whole is None:
            # Of the node's last reply of this kind, else the mean of all, else declared.
            n = self._count.get(kind)
            examples = self._sum[kind] / n if n else self.costs.examples
            whole = each * (self._examples.get((kind, node_id), examples) or 0.0)
            if not is_training:
                return Charge(whole, whole, is_expected=True)
        if share is None or not is_training:
            return Charge(whole, whole)
        done, is_expected = self._share_done(kind, node_id, share)
        return Charge(whole * done, whole, is_expected)

    def _share_done(self, kind: str, node_id: int, share: float) -> tuple[float, bool]:
        """Estimate the share of a job that will be done, and if it is a mere guess."""
        if share == 1.0:
            return 1.0, False
        steps = self._steps.get((kind, node_id))
        if steps:
            return steps_of(share, steps) / steps, False
        of_others = self._steps.get((kind, -1))
        if steps == 0 or of_others == 0:
            return 1.0, False
        return share, of_others is None

    def _rule(self, kind: str, is_sent_arrays: bool) -> tuple[float | None, float]:
        """Return the work of a message of a kind, None if it goes by example; and of an example.

        Args:
            kind: of the message.
            is_sent_arrays: whether it is a query with arrays.
        """
        main, whole = kind.split(".", maxsplit=1)[0], declared_work(kind, self.costs)
        if whole is not None:
            return whole, 0.0
        undeclared = undeclared_queries([kind], self.costs)
        missing = undeclared if is_sent_arrays else missing_costs([kind], self.costs)
        if missing:
            raise _undeclared(missing)
        if undeclared:
            logger.warning(
                "%s: undeclared, so it costs devices no work, and ends the run if it is sent "
                "arrays; if it does more than read what they have, declare it (--set "
                "'costs.work.%s=2.0', or work under [tool.fedstale])",
                *(kind, kind),
            )
        # Apps with client_fn also request parameters and properties, which a device has.
        return None if main in _BY_EXAMPLES else 0.0, self._work_each(main)

    def training(self, whole: float, reply: RecordDict) -> float:
        """Return the work of a training of which a share was asked for, in work units.

        Args:
            whole: work units of the job in full.
            reply: to it.
        """
        done = StepsDone.of(reply)
        return whole if done is None else whole * done.share

    def evaluation(self, node_id: int, examples: float | None, expected: float) -> float:
        """Return the work of an evaluation in work units.

        Args:
            node_id: of the client.
            examples: that its reply says were evaluated; None where it says nothing.
            expected: what the message was expected to cost, in work units.

        Raises:
            ConfigError: nothing says how many examples there are.
        """
        if examples is not None:
            return self._work_each("evaluate") * examples
        if self.costs.examples is None:
            raise ConfigError(
                f"the reply of node {node_id} to its evaluation states no num-examples: add it to "
                "the metrics of the reply, or declare examples in [tool.fedstale]"
            )
        return expected

    def promised_size(self, kind: str) -> Size | None:
        """Return the size that replies have by promise; None while that is not known.

        Args:
            kind: of what they answer, by `reply_class`.
        """
        first = self._first.get(kind)
        return None if first is None else Size(*first)

    def expected_bytes(self, kind: str, node_id: int, request_bytes: int) -> int:
        """Return the bytes that a reply is likely to have: of the node's last, else the request's.

        Nothing is charged by it: the true size follows when the client has run.

        Args:
            kind: of what it answers, by `reply_class`.
            node_id: of the client.
            request_bytes: of what it answers.
        """
        return self._last.get((kind, node_id), self._last.get((kind, -1), request_bytes))

    def check_promise(self, kind: str, node_id: int, size: Size) -> None:
        """Check that a reply has the size that the app promises, if it promises any.

        Args:
            kind: of what it answers, by `reply_class`.
            node_id: of the client.
            size: its bytes.

        Raises:
            ConfigError: it has another.
        """
        first = self.promised_size(kind)
        if first is not None and size != first:
            raise ConfigError(
                f"node {node_id} replied to {kind!r} with {sum(size):,} bytes, and the first reply "
                f"had {sum(first):,}: constant-replies promises that all have as many; take it "
                "out of [tool.fedstale]"
            )

    def learn(  # noqa: PLR0917 - one reply
        self, kind: str, node_id: int, reply: Message, size: Size, charged: int, share: float
    ) -> None:
        """Learn from a reply without an error that was delivered.

        Args:
            kind: of what it answers, by `reply_class`.
            node_id: of the client.
            reply: what came.
            size: its bytes.
            charged: the bytes that the device has uploaded for it.
            share: of the work that was asked for; NaN if none was.
        """
        if self.costs.constant_replies and kind.startswith("train"):
            self._first.setdefault(kind, size)
        self._last[(kind, node_id)] = self._last[(kind, -1)] = charged
        # A format changes no number of examples.
        kind = kind.partition(" ")[0]
        if share < 1.0:
            done = StepsDone.of(reply.content)
            steps = 0 if done is None else done.whole
            self._steps[(kind, node_id)] = self._steps[(kind, -1)] = steps
        examples = examples_in(reply.content)
        if examples is not None:
            before = self._examples.get((kind, node_id))
            self._count[kind] = self._count.get(kind, 0) + (before is None)
            # Rounding must not take it below 0, which no work is.
            self._sum[kind] = max(self._sum.get(kind, 0.0) + examples - (before or 0.0), 0.0)
            self._examples[(kind, node_id)] = examples

    def _work_each(self, main: str) -> float:
        """Return the work of one example, over all epochs; 0 of what goes by none."""
        if main not in _BY_EXAMPLES:
            return 0.0
        if main == "evaluate":
            assert self.costs.evaluate_work_per_example is not None
            return float(self.costs.evaluate_work_per_example)
        each, epochs = self.costs.work_per_example, self.costs.epochs
        assert each is not None
        assert isinstance(epochs, int)
        return float(each * epochs)

    def _hooked(self, message: Message) -> float | None:
        assert self._work is not None
        units = self._work(message)
        if units is None:
            return None
        if isinstance(units, bool) or not isinstance(units, int | float) or not 0 <= units < np.inf:
            raise ConfigError(
                f"work({kind_of(message)!r} message) returned {units!r}: expected work units, a "
                "finite number >= 0, or None for what is declared"
            )
        return float(units)


def kind_of(message: Message) -> str:
    """Return the type and action of a message; the action "default" is left out.

    Example:
        >>> kind_of(Message(RecordDict(), 1, "train.default"))  # doctest: +SKIP
        'train'
    """
    return message.metadata.message_type.removesuffix(".default")


def reply_class(kind: str, format_up: str) -> str:
    """Name the class of replies of one size: the kind that they answer, and the format asked for.

    Args:
        kind: of a message, by `kind_of`.
        format_up: that it asks for; empty for none.
    """
    return f"{kind} {format_up}" if format_up else kind


def is_work(kind: str) -> bool:
    """Return whether messages of a kind ask for work: they train or evaluate, or are own queries.

    Those stages of SecAgg+ that train nothing are of a kind that trains.
    """
    return kind.split(".", maxsplit=1)[0] in _BY_EXAMPLES or is_own_query(kind)


def is_own_query(kind: str) -> bool:
    """Return whether a kind of message is an action of an app's, named by it, among queries."""
    return kind.startswith("query.") and kind != QUERY


def declared_work(kind: str, costs: Costs) -> float | None:
    """Look up a type and action in the table `work`; None where it has no entry."""
    found = costs.work.get(kind)
    return costs.work.get(kind.split(".", maxsplit=1)[0]) if found is None else found


def missing_costs(kinds: Iterable[str], costs: Costs) -> list[str]:
    """Return the keys of [tool.fedstale] without which messages of some kinds have no cost.

    Args:
        kinds: types of messages, with their action if they have one.
        costs: what is declared; epochs may name a key of the run config.
    """
    kinds = list(kinds)
    open_kinds = {kind.split(".")[0] for kind in kinds if declared_work(kind, costs) is None}
    needed: dict[str, object] = {}
    if "train" in open_kinds:
        needed["work-per-example"] = costs.work_per_example
        needed["epochs"], needed["examples"] = costs.epochs, costs.examples
    if "evaluate" in open_kinds:
        needed["evaluate-work-per-example"] = costs.evaluate_work_per_example
    missing = [key for key, value in needed.items() if value is None]
    # Queries may cost nothing; who has to paste a table anyway says it of them as well.
    return [*missing, *undeclared_queries(kinds, costs)] if missing else []


def undeclared_queries(kinds: Iterable[str], costs: Costs) -> list[str]:
    """Return the keys that would say what queries of an app's own cost, as far as none does."""
    own = filter(is_own_query, kinds)
    return [f"work.{kind}" for kind in own if declared_work(kind, costs) is None]


def handled_kinds(client: ClientApp) -> list[str]:
    """Return the kinds of messages that a ClientApp answers; those of client_fn train and evaluate.

    Only types that may be charged by examples are told of client_fn, which is not called for it.
    """
    found = [name.removesuffix(".default") for name in client._registered_funcs]
    return found or list(_BY_EXAMPLES)


def missing_text(keys: Iterable[str]) -> str:
    """Return a sentence on keys that an app does not declare, and the table to paste."""
    keys = list(keys)
    options = " ".join(f"costs.{key}=..." for key in keys)
    names = ", ".join(key.partition(".")[0].replace("-", "_") for key in keys)
    lines = "\n".join(f"{key} = {_PASTED.get(key, _PASTED_WORK)}" for key in keys)
    return (
        f"what messages cost a device is not declared: {', '.join(keys)} missing in "
        f"[tool.fedstale] of the app's pyproject.toml (--set '{options}' on the command line, "
        f"{names} in Python); fedstale simulate APP --measure-costs measures them, or paste this "
        "and put in what you expect:\n\n"
        f"[tool.fedstale]\n{lines}"
    )


def check_costs(client: ClientApp, costs: Costs) -> None:
    """Check that everything is declared that messages to a ClientApp may need.

    Raises:
        ConfigError: keys are missing; all are named, with a table to paste.
    """
    missing = missing_costs(handled_kinds(client), costs)
    if missing:
        raise _undeclared(missing)


def _undeclared(keys: Iterable[str]) -> ConfigError:
    return ConfigError(missing_text(keys))


def examples_in(content: RecordDict) -> float | None:
    """Read how many examples a reply states, 0 if unusable; None where it states none."""
    for record in entries(content).values():
        if not isinstance(record, MetricRecord):
            continue
        # Clients made by client_fn spell it with an underscore, in a record of its own.
        metrics = entries(record)
        examples = metrics.get("num-examples", metrics.get("num_examples"))
        if examples is not None:
            usable = isinstance(examples, int | float) and 0 <= examples <= MOST_EXAMPLES
            return float(examples) if usable else 0.0
    return None
