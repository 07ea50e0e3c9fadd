"""A Flower app directory, as `flwr run` accepts it, loaded into this process.

pyproject.toml says where the ServerApp and the ClientApp are. The run config is combined as Flower
combines it. The table `[tool.fedstale]` holds what fedstale needs besides: what messages cost, how
clients can be trained together, and which key of the run config takes the seed of a run.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from fedstale.app_folder import BUILT_IN, app_folder
from fedstale.config import Costs, SimulationConfig
from fedstale.errors import ConfigError, nearest, not_installed
from fedstale.flower import command_line, features, legacy
from fedstale.simulation.costs import WorkHook

_STRATEGY = "strategy"
"""Key of a run config under which apps have their strategy as a text."""
_SEED, _SEED_KEY = "seed", "seed-key"
_LIKE_SEED = re.compile(r"(?i:(?<![^\W_])seeds?(?![^\W_])|random[-_.]?state)|[a-z]Seed(?![a-z])")
LIBRARIES = {"site-packages", "dist-packages"}
"""Names of folders of what is installed, which may lie in an app's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedFunctions:
    """What an app declares so that its clients can be trained as one program.

    Three lines in the pyproject.toml of the app, each `module:attribute`:

        [tool.fedstale.batched]
        job = "my_app.client_app:job"
        network = "my_app.task:Network"
        losses = "my_app.task:losses"

    `job(message, context)` returns what one client trains on, a mapping with

    - `data`: tensors whose first axis is the examples;
    - `order`: the examples in the order of training, an array of shape (epochs, examples), and
      `batch_size`: how many of them make a step, fewer at the end of an epoch;
    - `learning_rate`, and if they are not 0: `momentum`, `weight_decay`, `max_norm` (the
      gradient's), `proximal_mu` (FedProx's).

    `network()` makes the model, and `losses(network, *batch)` returns the loss of each example of
    a batch. Replies hold the arrays, and the metrics `train_loss` and `num-examples`.
    """

    job: Callable[[Message, Context], Mapping[str, Any]]
    """What a client trains on."""
    network: Callable[[], Any]
    """Makes the model."""
    losses: Callable[..., Any]
    """The loss of each example of a batch."""

    @classmethod
    def check(cls, table: Mapping[str, Any]) -> None:
        """Check what an app declares, without importing it.

        Raises:
            ConfigError: a key means nothing or is missing, or a value is no reference.
        """
        for key, value in table.items():
            if not isinstance(value, str) or value.count(":") != 1:
                raise ConfigError(
                    f"[tool.fedstale.batched] {key} = {value!r}: expected module:attribute"
                )
        if table.keys() != {"job", "network", "losses"}:
            raise ConfigError(
                f"[tool.fedstale.batched] has {sorted(table)}: expected job, network and losses"
            )

    @classmethod
    def load(cls, table: Mapping[str, str], directory: Path) -> "BatchedFunctions":
        """Import what an app declares.

        Args:
            table: that `check` has found to be right.
            directory: of the app.

        Raises:
            ConfigError: something cannot be imported, or cannot be called.
        """
        return cls(
            **{
                key: _loaded(reference, directory, f"[tool.fedstale.batched] {key} = {reference!r}")
                for key, reference in table.items()
            }
        )


@dataclass(frozen=True, slots=True)
class FlowerApp:
    """Where an app is and what its pyproject.toml says, or the objects that it is."""

    directory: Path
    name: str
    server: str | ServerApp
    """Reference of the ServerApp, module:attribute; or the ServerApp itself."""
    client: str | ClientApp
    """Reference of the ClientApp, module:attribute; or the ClientApp itself."""
    defaults: Mapping[str, Any]
    """The run config of pyproject.toml, flat."""
    costs: Costs
    batched: Mapping[str, str] | None = None
    """How its clients are trained as one program, if it declares so; see `BatchedFunctions`."""
    dependencies: Sequence[str] = ()
    """The packages that pyproject.toml declares, as requirements."""
    work: str | WorkHook | None = None
    """Reference of the function that says the work of a message, module:attribute; or itself."""
    strategy: Strategy | None = None
    """What takes the place of the app's own strategy, if it is an object."""
    seed_key: str | None = None
    """Key of the run config that takes the seed of a run; None for `seed` if the app has it."""
    is_ours: bool = False
    """Whether its server runs nobody's code but fedstale's."""

    @classmethod
    def find(cls, app: str | Path) -> "FlowerApp":
        """Read an app's pyproject.toml.

        Args:
            app: a directory, or the name of a built-in app.

        Raises:
            ConfigError: there is no such app, or its pyproject.toml is not one of a Flower app.
        """
        directory = app_folder(app)
        features.require("apps")
        try:
            project = command_line.project_config(directory)
        except (OSError, ValueError, RecursionError) as problem:
            raise ConfigError(f"app = {str(app)!r} is no Flower app: {problem}") from None
        flower, own = project["tool"]["flwr"]["app"], dict(project["tool"].get("fedstale", {}))
        batched = own.pop("batched", None)
        if batched is not None:
            BatchedFunctions.check(batched)
        work = own.pop("work") if isinstance(own.get("work"), str) else None
        if work is not None and work.count(":") != 1:
            raise ConfigError(
                f"[tool.fedstale] work = {work!r}: expected module:attribute of a function, or a "
                "table of work units by type of message"
            )
        seed_key = own.pop(_SEED_KEY, None)
        if not isinstance(seed_key, str | None):
            raise ConfigError(
                f"[tool.fedstale] seed-key = {seed_key!r}: expected a key of the run config"
            )
        return cls(
            directory=directory,
            name=project["project"]["name"],
            server=flower["components"]["serverapp"],
            client=flower["components"]["clientapp"],
            defaults=command_line.flat(flower.get("config", {})),
            costs=Costs.from_table(own),
            batched=batched,
            dependencies=project["project"].get("dependencies", []),
            work=work,
            seed_key=seed_key,
        )

    def run_config(self, overrides: str | Mapping[str, Any]) -> UserConfig:
        """Return the run config with some values replaced.

        Args:
            overrides: values by key, or a text of them as `flwr run` takes it.

        Raises:
            ConfigError: the text is none, or a key is not in the app's pyproject.toml.
        """
        if isinstance(overrides, str):
            overrides = overrides_in([overrides], "run-config")
        unknown = [
            f"run-config key {key!r} is unknown: expected {nearest(key, sorted(self.defaults))}"
            for key in overrides
            if key not in self.defaults
        ]
        if unknown:
            raise ConfigError("; ".join(unknown))
        return {**self.defaults, **overrides}

    def resolved(self, config: SimulationConfig) -> SimulationConfig:
        """Return the settings of a run with the app's whole run config and all costs.

        Paths of an app and of traces are whole, so that they mean the same from any directory.

        Raises:
            ConfigError: a key is not one of the app's or of costs, or a cost is none.
        """
        run_config, strategy = self.with_strategy(config)
        costs = Costs.from_table({**self.costs.table(), **config.costs}).resolved(run_config)
        # An app of objects has no place, and one that comes with fedstale is known by its name.
        has_place = isinstance(self.client, str) and Path(config.app).is_dir()
        traces, nodes = Path(config.traces), config.node_config
        return replace(
            config,
            # On a node of a cluster the app is elsewhere, and the settings stay what they are.
            app=str(Path(config.app).resolve()) if has_place else config.app,
            traces=str(traces.resolve()) if traces.exists() else config.traces,
            node_config=str(Path(nodes).resolve()) if isinstance(nodes, str) else nodes,
            strategy=strategy,
            run_config=run_config,
            costs=costs.table(),
        )

    def takes_seed(self, named: str | None = None) -> str | None:
        """Return the key of the run config that takes the seed of a run, if there is one.

        Args:
            named: `seed_key` of the settings.

        Raises:
            ConfigError: the key that is named is not one of the app's that has a whole number.
        """
        named = self.seed_key if named is None else named
        key = _SEED if named is None else named
        if not key or type(self.defaults.get(key)) is int:
            return key or None
        is_whole_config = isinstance(self.client, ClientApp)
        if named is None or (is_whole_config and key not in self.defaults):
            # What is made of objects has in its run config what it is given.
            return named
        numbers = sorted(key for key, value in self.defaults.items() if type(value) is int)
        raise ConfigError(
            f"seed-key = {key!r}: expected a run-config key with a whole number, such as "
            f"{nearest(key, numbers)}; or an empty text for none"
        )

    def own_seed(self, config: SimulationConfig) -> str:
        """Return in a sentence that the app draws from another seed than the run, or nothing.

        Args:
            config: resolved.
        """
        key, values = self.takes_seed(config.seed_key), config.run_config
        if key is not None and values[key] != config.seed:
            return (
                f"the app draws from seed {values[key]!r} of its own (run-config {key}), "
                f"all else from the run's, which is {config.seed}"
            )
        is_left_out = "" in (config.seed_key, self.seed_key)
        alike = [k for k, v in values.items() if type(v) is int and _LIKE_SEED.search(k)]
        if key is not None or is_left_out or not alike:
            return ""
        return (
            f"the app draws from a seed of its own (run-config {alike[0]} = {values[alike[0]]}): "
            f"--set 'seed-key=\"{alike[0]}\"', or seed-key in its [tool.fedstale], gives it the "
            "run's"
        )

    def with_strategy(self, config: SimulationConfig) -> tuple[UserConfig, str | None]:
        """Return the run config of a run, and the strategy that is named and not said there.

        The seed of the run stands in it, unless the settings have another one there.

        Raises:
            ConfigError: a key is not one of the app's, or there is no such strategy.
        """
        # What an app says by itself needs no strategies here.
        from fedstale.strategies import parse, with_whole_paths  # noqa: PLC0415

        run_config, named = self.run_config(config.run_config), config.strategy
        key = self.takes_seed(config.seed_key)
        if key is not None and key not in config.run_config:
            run_config[key] = config.seed
        if named is not None and self.strategy is None:
            parse(named)
            named = with_whole_paths(named)
            if self.says_strategy:
                run_config, named = {**run_config, _STRATEGY: named}, None
        if isinstance(text := run_config.get(_STRATEGY), str):
            run_config[_STRATEGY] = with_whole_paths(text)
        return run_config, named

    @property
    def says_strategy(self) -> bool:
        """Whether its run config has its strategy as a text, of which the app makes it."""
        from fedstale.strategies import parse  # noqa: PLC0415

        try:
            parse(str(self.defaults.get(_STRATEGY, "")))
        except ConfigError:
            return False
        return True

    @property
    def is_built_in(self) -> bool:
        """Whether the app comes with fedstale."""
        return self.directory.parent == BUILT_IN.resolve()

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Import the app's modules afresh inside, and put everything back afterwards.

        Two apps may use the same module names: neither may see the other's.
        """
        if not (packages := self.packages):
            yield
            return
        before, path = dict(sys.modules), list(sys.path)
        for name in before:
            if name.split(".")[0] in packages:
                del sys.modules[name]
        try:
            yield
        finally:
            sys.path[:] = path
            # Others are thousands in a process that has loaded torch.
            new = {k: v for k, v in sys.modules.items() if before.get(k) is not v}
            for name, module in new.items():
                file = getattr(module, "__file__", None)
                if file is not None and Path(file).is_relative_to(self.directory):
                    del sys.modules[name]
            sys.modules.update({k: v for k, v in before.items() if k not in sys.modules})

    def load_server(self) -> ServerApp:
        """Import the ServerApp.

        Raises:
            ConfigError: it cannot be imported, is no ServerApp, holds nothing to run, or is of an
                API that this Flower does not have as we know it.
        """
        server: ServerApp = self._app_of(self.server, ServerApp)
        if not features.has("parts of a ServerApp"):
            return server
        if legacy.is_empty(server):
            raise ConfigError(
                f"serverapp {self.server} holds nothing to run: expected a function under "
                "@app.main(), or ServerApp(server_fn=...)"
            )
        if legacy.is_older(server):
            features.require("older API")
        return server

    def load_client(self) -> ClientApp:
        """Import the ClientApp, in any process.

        Raises:
            ConfigError: it cannot be imported or is no ClientApp.
        """
        client: ClientApp = self._app_of(self.client, ClientApp)
        return client

    def _app_of(self, given: object, kind: type) -> Any:
        return _loaded(given, self.directory, given, kind) if isinstance(given, str) else given

    def load_work(self) -> WorkHook | None:
        """Import the function that says the work of a message, if the app declares one.

        Raises:
            ConfigError: it cannot be imported, or cannot be called.
        """
        if isinstance(self.work, str):
            where = f"[tool.fedstale] work = {self.work!r}"
            hook: WorkHook = _loaded(self.work, self.directory, where)
            return hook
        return self.work

    @property
    def packages(self) -> tuple[str, ...]:
        """Names of the top-level packages or modules that hold the two apps."""
        references = [ref for ref in (self.server, self.client) if isinstance(ref, str)]
        return tuple({ref.split(":")[0].split(".")[0] for ref in references})

    def modules(self) -> tuple[str, ...]:
        """Return the names of the app's own modules, of those that are loaded.

        They are its packages, and what else it has imported from its directory; of an app of
        objects the directory is that of the module with its functions.
        """
        found, directory = set(self.packages), self.directory
        if isinstance(self.server, ServerApp):
            home = legacy.home_of(self.server)
            file = getattr(sys.modules.get(home), "__file__", None)
            found.add(home)
            if file is None:
                return tuple(found)
            directory = Path(file).absolute().parent
        own = f"{directory}{os.sep}"
        for name, module in list(sys.modules.items()):
            # Thousands, once torch is loaded.
            file = getattr(module, "__file__", None)
            if file is None or not file.startswith(own) or name.split(".")[0] == "fedstale":
                continue
            if not LIBRARIES & {*Path(file).parts}:
                found.add(name)
        return tuple(found)


def overrides_in(texts: Sequence[str], name: str) -> UserConfig:
    """Return the overrides in texts of the form key=value, or in .toml files, as Flower does.

    Args:
        texts: as they were given.
        name: of the option, for the message.

    Raises:
        ConfigError: there is a text, but it is no such thing.
    """
    given = [text for text in texts if text.strip()]
    where = f"{name} = {' '.join(map(repr, given))}"
    try:
        overrides = command_line.flat(command_line.parsed_config(given))
    except (click.ClickException, ValueError, OSError) as problem:
        raise ConfigError(f"{where}: {problem}") from None
    if given and not overrides:
        raise ConfigError(f"{where}: expected 'key=value' pairs or a .toml file")
    return overrides


def _loaded(reference: str, directory: Path, where: str, kind: type | None = None) -> Any:
    """Import what a reference in an app's pyproject.toml names.

    Args:
        reference: module:attribute.
        directory: of the app.
        where: begins the message.
        kind: of the object; None for a function or a class.
    """
    expected = "a function or a class" if kind is None else f"a flwr {kind.__name__}"
    try:
        found = command_line.load_app(reference, ConfigError, directory)
    except ConfigError:
        raise ConfigError(f"{where} has no such attribute: expected {expected}") from None
    except Exception as problem:
        raise ConfigError(f"{where} {_why_not(problem)}") from problem
    if not (callable(found) if kind is None else isinstance(found, kind)):
        raise ConfigError(f"{where} is a {type(found).__name__}: expected {expected}")
    return found


def _why_not(problem: Exception) -> str:
    """Return why something of an app cannot be imported."""
    needed = not_installed(problem) if isinstance(problem, ModuleNotFoundError) else None
    is_older = isinstance(problem, ImportError) and (problem.name or "").startswith("flwr.")
    hint = "; fedstale check says what of Flower the app imports is gone, and where it is now"
    return needed or f"cannot be imported: {type(problem).__name__}: {problem}{hint * is_older}"


def changed(
    config: SimulationConfig,
    settings: Mapping[str, Any],
    *,
    run_config: Mapping[str, Any] | list[str],
    costs: Mapping[str, Any],
) -> SimulationConfig:
    """Override settings, as options of a command line do.

    Args:
        config: of an app alone, or of a file.
        settings: by the names of their fields.
        run_config: overrides, or texts of them, as flwr run takes them.
        costs: overrides, with the keys of [tool.fedstale].
    """
    if not isinstance(run_config, Mapping):
        run_config = overrides_in(run_config, "run-config")
    before, own = dict(config.costs), dict(config.run_config)
    if own and (run_config or "seed" in settings):
        app = FlowerApp.find(config.app)
        if run_config:
            # A file holds the number of epochs and not the key that it comes from.
            usual = app.resolved(replace(config, costs={})).costs
            before = {key: value for key, value in before.items() if usual.get(key) != value}
        if "seed" in settings:
            # It holds what the app's key has got of the seed, and not that it has.
            key = app.takes_seed(config.seed_key)
            if key is not None and own.get(key) == config.seed:
                del own[key]
    merged = {**own, **run_config}
    return replace(config, **settings, run_config=merged, costs={**before, **costs})
