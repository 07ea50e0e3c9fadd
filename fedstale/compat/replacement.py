"""A strategy by name, or by hand, in the place of the one that an app starts.

Whatever an app is, as long as it starts a strategy of Flower's or of fedstale's: where it calls
`start`, the other strategy starts, with the same grid, model, number of rounds and functions. From
the app's own strategy it takes over what belongs to the app and not to the method: the keys of its
records, and how its metrics are averaged. What else a class of the app's own does is not done, and
the run says so.
"""

import re
from collections.abc import Callable, Sequence
from inspect import BoundArguments, Parameter, signature
from typing import Any

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from fedstale.errors import ConfigError
from fedstale.runs import in_words
from fedstale.strategies import StaleStrategy, parse
from fedstale.strategies.server import Callback, Runtime

_OF_THE_APP = (
    *("weighted_by_key", "arrayrecord_key", "configrecord_key"),
    *("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"),
)
_VERBS = (
    "start",
    *("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"),
)


class Replacement(Callback):
    """What takes the place of an app's strategies, if anything does, and which strategies ran."""

    def __init__(self, named: str | Strategy | None, *, seed: int) -> None:
        """Start before the app does.

        Args:
            named: a text for `fedstale.strategies.parse`, or a strategy; None replaces nothing.
            seed: of a strategy that a text describes without one.
        """
        self._named, self._seed = named, seed
        self._pairs: list[tuple[Strategy, Strategy]] = []
        """Each strategy of the app, with the one in its place."""
        self.ran: list[str] = []
        """The strategies that were started, in words."""
        self.replaced: list[str] = []
        """The classes that another strategy took the place of."""

    @property
    def callbacks(self) -> list[Callback]:
        """What listens to a run: this, if it replaces anything."""
        return [] if self._named is None else [self]

    def starting(self, runtime: Runtime, strategy: Strategy) -> Strategy:
        """Return the strategy that starts where an app starts one."""
        if runtime.n_loops or any(strategy is made for _, made in self._pairs):
            return strategy
        made = self._in_place_of(strategy)
        if made is not strategy:
            self._tell(runtime, strategy)
        words = self._named if isinstance(self._named, str) else _with_settings(made)
        if words not in self.ran:
            self.ran.append(words)
        return made

    def _in_place_of(self, strategy: Strategy) -> Strategy:
        named = self._named
        if named is None:
            return strategy
        for own, made in self._pairs:
            if own is strategy:
                return made
        made = self._made(named, strategy) if isinstance(named, str) else named
        self._pairs.append((strategy, made))
        return made

    def _made(self, text: str, own: Strategy) -> Strategy:
        """Return the strategy that a text describes, with what belongs to the app."""
        made = parse(text)
        given: dict[str, Any] = {n: getattr(own, n) for n in _OF_THE_APP if hasattr(own, n)}
        if isinstance(made, StaleStrategy):
            given["seed"] = self._seed
        for name, value in given.items():
            # What the text says comes first.
            if hasattr(made, name) and not re.search(rf"\b{name}\s*=", text):
                setattr(made, name, value)
        return made

    def _tell(self, runtime: Runtime, own: Strategy) -> None:
        """Say what of the app's own strategy is not done."""
        kind = type(own)
        if kind.__name__ in self.replaced:
            return
        self.replaced.append(kind.__name__)
        of_app = [c for c in kind.__mro__ if not c.__module__.startswith(("flwr.", "fedstale."))]
        verbs = [verb for verb in _VERBS if any(verb in vars(c) for c in of_app)]
        if verbs:
            runtime.hints.append(
                f"{self._words} is in the place of {kind.__name__}, whose own {', '.join(verbs)} "
                "did nothing"
            )

    @property
    def _words(self) -> str:
        return self._named if isinstance(self._named, str) else type(self._named).__name__

    def sending(self, run: Runtime, messages: Sequence[Message]) -> None:
        """Refuse an app that trains without starting a strategy.

        Raises:
            ConfigError: it does.
        """
        if any(message.metadata.message_type.startswith("train") for message in messages):
            self.check()

    def check(self) -> None:
        """Raise ConfigError if a strategy was to be replaced, and the app has started none."""
        if self._named is not None and not self._pairs:
            raise ConfigError(
                f"strategy = {self._words!r}: the app starts no strategy of Flower's or fedstale's "
                "that it could take the place of; leave it out"
            )

    def unheeded(self, text: str) -> str:
        """Return in words that the app has not started what its run config says; nothing if it has.

        Args:
            text: of the run config.
        """
        named = text.partition("(")[0].rpartition(".")[2].strip()
        classes = [words.partition("(")[0] for words in self.ran]
        if self._named is not None or named in classes:
            return ""
        return (
            f"the run config has strategy = {text!r}, but the app has started "
            f"{', '.join(classes) or 'none'}: its ServerApp does not read the key; remove it, and "
            "a strategy that is named takes the place of the app's own"
        )


def started(made: Strategy, call: BoundArguments, given: Sequence[object]) -> object:
    """Start a strategy with the arguments of another's `start`, as far as it has them.

    Args:
        made: the strategy.
        call: of the other's `start`.
        given: its arguments without names, should the other have none for them either.
    """
    start: Callable[..., object] = made.start
    known = signature(start).parameters
    values: dict[str, object] = {}
    for name, value in call.arguments.items():
        kind = call.signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            values |= dict(zip(known, given, strict=False))
        elif kind is Parameter.VAR_KEYWORD:
            values |= dict(value)
        else:
            values[name] = value
    return start(**{name: value for name, value in values.items() if name in known})


def _with_settings(strategy: Strategy) -> str:
    """Return a strategy of fedstale's with its settings, and another by its class."""
    said = in_words(strategy) if isinstance(strategy, StaleStrategy) else None
    return said or type(strategy).__name__
