"""Worlds: many settings of the learning constants at once, played on the same devices.

The learning proxy's constants come from fits, and fits of other runs, data and apps scatter. A
world is one draw of the constants around some: each is multiplied by exp(spread * z), z standard
normal, independently, so that the effect of each can be told from those of the others.

What a device does with a job does not depend on the constants, and what a server picks depends on
them through the losses alone that devices report. So a simulator of worlds plays each episode in
one world, and can let the model of every world learn from the same updates beside it: that costs a
few numbers for each world instead of a window.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import Episodes, JobKinds
from fedstale.agents.env.learning_proxy import CONSTANTS, LearningProxy
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Simulator
from fedstale.errors import ConfigError
from fedstale.strategies.types import is_count
from fedstale.traces import Array, Index, stream

VARIED = tuple(f.name for f in fields(LearningProxy) if f.name != "first_loss")
"""Constants that worlds differ in. The first loss is that of an untrained model, which is known;
where it and the ceiling are multiplied by the same factor, nothing else changes."""

LIMIT = 10.0
"""Most that a server step counts for, up or down, in steps with the fleet's own mixture. In worlds
that forget fast and have learnt much already, one collapse would otherwise outweigh a window."""

FACTOR = 2.0
"""From 1 / FACTOR of the least to FACTOR times the most of a fit is taken for known."""

Spread = Mapping[str, float]
"""Standard deviation of the logarithm of each constant of `VARIED`, >= 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(LearningProxy):
    """Constants that differ from row to row: columns of shape (m, 1) in the place of numbers."""

    def __post_init__(self) -> None:
        """Accept columns; worlds are drawn from constants that were checked."""

    def reported(self, losses: Array, entropy: npt.ArrayLike, noise: npt.ArrayLike) -> Array:
        """Return the losses that devices report, each in the world of its row."""
        if losses.ndim > 1:
            return LearningProxy.reported(self, losses, entropy, noise)
        columns = np.asarray(entropy)[:, None], np.asarray(noise)[:, None]
        return LearningProxy.reported(self, losses[:, None], *columns)[:, 0]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Worlds:
    """Learning constants of some worlds; see `Worlds.around`."""

    constants: Mapping[str, Array]
    """Each constant of `LearningProxy` in every world; shape (w,) each."""

    def __len__(self) -> int:
        return self.constants["eta"].size

    def __getitem__(self, world: int) -> LearningProxy:
        return LearningProxy(**{name: float(c[world]) for name, c in self.constants.items()})

    @classmethod
    def of(cls, proxy: LearningProxy) -> "Worlds":
        """Return the one world with some constants."""
        return cls(constants={name: np.array([value]) for name, value in asdict(proxy).items()})

    @classmethod
    def around(cls, proxy: LearningProxy, spread: Spread, n: int, *, seed: int) -> "Worlds":
        """Draw worlds around some constants.

        Args:
            proxy: the median of each constant.
            spread: see `Spread`; one of exactly these names.
            n: how many, >= 1.
            seed: of the draw; the first worlds of more are the same.

        Raises:
            ConfigError: n is no integer >= 1, or the spread is not one of these constants.
        """
        if not is_count(n):
            raise ConfigError(f"worlds = {n!r}: expected an integer >= 1")
        check_spread(spread)
        z = stream(seed, 71).standard_normal((n, len(VARIED)))
        constants = {name: np.full(n, value) for name, value in asdict(proxy).items()}
        for place, name in enumerate(VARIED):
            constants[name] = constants[name] * np.exp(spread[name] * z[:, place])
        # A model that has forgotten a group knows no more of it than an untrained one.
        constants["ceiling"] = np.maximum(constants["ceiling"], constants["first_loss"])
        return cls(constants=constants)

    def rows(self, world: Index) -> LearningProxy:
        """Return how models learn that are each in a world; constants of shape (m, 1)."""
        return _Rows(**{name: c[world, None] for name, c in self.constants.items()})  # type: ignore[arg-type]


class WorldSimulator(Simulator):
    """Plays every episode in a world, while the models of other worlds learn from its updates.

    Args:
        scenario: where episodes take place; its own proxy is not used.
        b: number of episodes at a time.
        worlds: that are played.
        following: worlds whose models learn beside each episode; none if None.
    """

    def __init__(
        self, scenario: Scenario, b: int, worlds: Worlds, following: Worlds | None = None
    ) -> None:
        super().__init__(scenario, b)
        self.worlds, self.following = worlds, following
        self.world = np.zeros(b, dtype=np.int64)
        """The world of each episode; set it before `reset`; shape (b,)."""
        n_following = 0 if following is None else len(following)
        self.gains = np.zeros((b, n_following))
        """What the models of the other worlds have gained; shape (b, following)."""
        self._others = np.zeros((b, n_following, self.losses.shape[1]))

    def reset(self, episodes: Episodes, rows: npt.ArrayLike | None = None) -> None:
        """Begin episodes; see `Simulator.reset`."""
        places = np.arange(self.b) if rows is None else np.asarray(rows, dtype=np.int64)
        self.gains[places] = 0.0
        if self.following is not None:
            self._others[places] = self.following.constants["first_loss"][:, None]
        super().reset(episodes, rows)
        self.losses[places] = self.worlds.constants["first_loss"][self.world[places], None]

    def proxy_of(self, rows: Index) -> LearningProxy:
        """Return how the models of some episodes learn, each as in its world."""
        return self.worlds.rows(self.world[rows])

    def _learn(self, rows: Index, ratios: Array, sizes: Array) -> tuple[Array, Array]:
        """Let the models of all worlds learn from a server step."""
        if self.following is not None:
            n = len(self.following)
            world = np.tile(np.arange(n), rows.size)
            proxy, groups = self.following.rows(world), ratios.shape[1]
            before = self._others[rows].reshape(-1, groups)
            after = proxy.after_step(before, np.repeat(ratios, n, axis=0), np.repeat(sizes, n))
            fleet = np.repeat(self.fleet_share[rows], n, axis=0)
            progress = np.log((fleet * before).sum(axis=1) / (fleet * after).sum(axis=1))
            gain = np.clip(progress / proxy.fleet_progress(before), -LIMIT, LIMIT)
            self._others[rows] = after.reshape(rows.size, n, groups)
            self.gains[rows] += gain.reshape(rows.size, n)
        progress, gain = super()._learn(rows, ratios, sizes)
        return progress, np.clip(gain, -LIMIT, LIMIT)


def check_spread(spread: Spread) -> None:
    """Raise if a spread is not one number >= 0 for each constant that worlds differ in.

    Raises:
        ConfigError: it is not.
    """
    for name in sorted(set(spread) | set(VARIED)):
        value = spread.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in VARIED or not is_number or not 0 <= float(value or 0) < 5:
            raise ConfigError(
                f"spread.{name} = {value!r}: expected a standard deviation of the logarithm in "
                f"[0, 5) for each of {', '.join(VARIED)}"
            )


def read_spread() -> dict[str, float]:
    """Return the spread of the constants that come with the package."""
    spread = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))["spread"]
    return {name: float(value) for name, value in spread.items()}


def outside_of_fit(episodes: Episodes, kinds: JobKinds) -> list[str]:
    """Return what of some windows the constants were not fitted to, in sentences.

    Constants that were fitted to server steps of three updates say little of steps of three
    hundred. What differs is said and stops nothing: whoever plays them decides.

    Args:
        episodes: windows that are to be played.
        kinds: their jobs.
    """
    runs = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))["fitted"]
    size = [n_bytes / 1e6 for n_bytes in runs["n_bytes"]]
    # What windows have, the least and the most of the runs of the fit, and the unit.
    values: dict[str, tuple[Array | Index, Sequence[float], str]] = {
        "updates of a server step": (episodes.buffer_size, runs["updates"], ""),
        "devices": (episodes.present.sum(axis=1), runs["devices"], ""),
        "job on the median device": (kinds.median_s[episodes.kind], runs["job_s"], " s"),
        "size of the model": (kinds.n_bytes[episodes.kind] / 1e6, size, " MB"),
        "rounds": (episodes.rounds, (0.0, runs["steps"][1]), ""),
    }
    found = []
    for name, (have, (least, most), unit) in values.items():
        outside = (have < least / FACTOR) | (have > most * FACTOR)
        if outside.any():
            found.append(
                f"{outside.sum()} of {len(episodes)} windows: {name} "
                f"{have[outside].min():g} to {have[outside].max():g}{unit}, fitted to "
                f"{least:g} to {most:g}{unit}"
            )
    keeps = episodes.keeps_stragglers
    if runs["staleness"][1] == 0 and keeps.any():
        found.append(
            f"{keeps.sum()} of {len(episodes)} windows: stragglers are aggregated later, fitted to "
            "current updates alone"
        )
    return found
