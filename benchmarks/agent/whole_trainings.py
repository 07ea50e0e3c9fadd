"""Whole trainings to a target, on recorded devices that agents learn from, many at a time.

The digits of `real_training.py`, with examples, epochs, learning rate, skew, jobs in flight at
most, and the price of an hour drawn anew. A training costs hours x price + device-hours, over those
of the plain schedule: all jobs in flight, half of them a step. Whom to ask is the balanced rule's;
how many, and how many updates make a step, is decided anew for each step.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import AGES, Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.scenario import Scenario, Scenarios, log_uniform
from fedstale.agents.env.windows import top
from fedstale.agents.policy.how_many import KEPT, decided, facts
from fedstale.agents.policy.scorer import TEMPERATURE
from fedstale.strategies.types import Candidates
from fedstale.traces import DAY_S, Array, Index, Mask, TraceSet, stream
from fedstale.traces.forecast import embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.real_training import TrainedScenario, TrainingSimulator, accuracy_of
from lab.fleets import ASSUMED, fleets
from lab.scenarios import DAYS, PARTS, SEED, STEP_S

FLEETS = ("cars", "phones")
PRICES = (0.25, 1.0, 4.0)
"""Of an hour, in hours of all devices that may be at work."""
MINUTES = (2.0, 2.0, 8.0, 20.0)
"""Of a job on the median device."""
MOST = (2.0, 24.0)
"""Jobs in flight at most."""
EXAMPLES = (8.0, 120.0)
"""Of the mean device."""
EPOCHS = (1, 2, 5)
STEPS = 300.0
"""Examples of a job of the mean device at most, over its epochs."""
RATES = (0.05, 0.2)
OF_RANDOM = 0.95
"""The target: this share of the accuracy that random selection ends with."""
SMOOTHING_S = 300.0
"""Time constant of the accuracy that must reach the target."""
SETTINGS = EpisodeSettings(
    horizon=(60.0, 160.0),
    window_s=12 * 3600.0,
    rounds=2_000,
    budget_share=0.0,
    devices=(24, 150),
    keep_share=0.7,
    deadline_share=0.0,
    request_share=1.0,
    over_reporting_share=0.0,
    inflating_share=0.0,
    skew=(0.1, 1.0),
    spread=(0.2, 1.0),
)
LUCK = 97
"""Choices after which an episode's luck begins anew."""
_LEAST_H = 0.02

Numbers = Callable[["Trainings", Index], tuple[Index, Index]]
"""From what is played, and rows of it, to jobs in flight and updates of the next step."""


class Trainings(TrainingSimulator):
    """Episodes that end at their target, with epochs and learning rates of their own."""

    def begin(self, episodes: Episodes, epochs: Index, rates: Array) -> None:
        """Begin episodes.

        Args:
            episodes: b or fewer.
            epochs: of the devices of each.
            rates: learning rates of each.
        """
        b, self.epochs, self.rates = len(episodes), epochs, rates
        own = replace(
            episodes,
            concurrency=episodes.concurrency.copy(),
            buffer_size=episodes.buffer_size.copy(),
        )
        self.most, self.accuracy = episodes.concurrency, np.full(b, 0.1)
        self.first_loss, self.loss = np.full(b, np.nan), np.full(b, np.nan)
        self.done[:] = True
        super().reset(own, np.arange(b))

    def facts(self, rows: Index, price: Array) -> Array:
        """Return what decisions in some episodes go by, see `how_many.facts`."""
        flat = (rows[:, None] * self.n + np.arange(self.n)).ravel()
        return facts(
            Candidates(flat, self.table, flat),
            self.mask[rows],
            most=self.most[rows],
            price=price[rows],
            fall=np.log(self.first_loss[rows] / self.loss[rows]),
            version=self.version[rows],
            keeps_stragglers=self.episodes.keeps_stragglers[rows],
        )

    def spent_by_now(self, rows: Index) -> Array:
        """Return the device-seconds of some episodes, those of jobs in flight among them."""
        out = np.clip(self.now[rows, None] - self.sent_at[rows], 0.0, self.spent_s[rows])
        working = np.where(self.in_flight[rows], out, 0.0)
        return np.asarray(self.worked_s[rows] + working.sum(axis=1))

    def _merge(self, rows: Index, accepted: Mask, weights: Array) -> tuple[Array, Array]:
        """Note the loss that a server sees, too."""
        examples = np.where(accepted, self.episodes.examples[rows], 0.0)
        seen = (examples * np.where(accepted, self.job_loss[rows], 0.0)).sum(axis=1)
        seen /= examples.sum(axis=1)
        first = np.where(np.isnan(self.first_loss[rows]), seen, self.first_loss[rows])
        before = np.where(np.isnan(self.loss[rows]), seen, self.loss[rows])
        self.first_loss[rows], self.loss[rows] = first, KEPT * before + (1.0 - KEPT) * seen
        return super()._merge(rows, accepted, weights)

    def _measure(self, rows: Index) -> tuple[Array, Array]:
        """Note the accuracy; there is no reward."""
        self.accuracy[rows] = accuracy_of(self.models[rows])
        return np.zeros(rows.size), np.zeros(rows.size)


class Places(TrainedScenario):
    """A scenario whose simulators play whole trainings."""

    def simulator(self, b: int) -> Trainings:
        """Make a simulator with room for b of this scenario's episodes at a time."""
        return Trainings(self, b)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Needed:
    """What episodes needed to their target, or to their end; shape (b,) each."""

    hours: Array
    device_hours: Array
    reached: Mask
    final: Array
    """Accuracy in the last tenth of the episode, of those that did not end before."""

    def costs(self, price: npt.ArrayLike, most: Index) -> Array:
        """Return the logarithms of hours x price + device-hours."""
        return np.log(np.maximum(self.hours * price * most + self.device_hours, _LEAST_H))


def play(
    simulator: Trainings,
    episodes: Episodes,
    numbers: Numbers,
    *,
    epochs: Index,
    rates: Array,
    target: Array | None = None,
    luck: Array,
    selects: bool = True,
) -> Needed:
    """Play episodes to their targets, or to their ends if there are none.

    Args:
        simulator: with room for all.
        episodes: to play.
        numbers: decides for each server step.
        epochs: of the devices of each episode; shape (b,).
        rates: learning rates of each; shape (b,).
        target: accuracy of each; shape (b,).
        luck: of each episode, choice and device, Gumbel's, by which the balanced rule draws whom to
            ask; shape (b or fewer, choices, n). Those that play the same episode have the same.
        selects: whether the rule picks; else luck alone does.
    """
    b, rows = len(episodes), np.arange(len(episodes))
    simulator.begin(episodes, epochs, rates)

    def pick(rows: Index) -> Mask:
        own = luck[rows % len(luck), simulator.n_choices[rows] % luck.shape[1]]
        scores = simulator.heuristic(rows) / TEMPERATURE + own if selects else own
        picked = top(scores, simulator.mask[rows], simulator.slots[rows])
        return enough(simulator, rows, scores, picked) if selects else picked

    start, end = episodes.start, episodes.end
    mean, before, last = np.zeros(b), np.full(b, 0.1), start.copy()
    tail, final = end - 0.1 * (end - start), np.zeros(b)
    at, spent = np.full(b, np.nan), np.full(b, np.nan)
    live = rows[~simulator.done[rows]]
    while live.size:
        new = live[simulator.begins[live]]
        jobs, updates = numbers(simulator, new)
        simulator.episodes.concurrency[new] = jobs
        simulator.episodes.buffer_size[new] = np.minimum(updates, jobs)
        version, room = simulator.version[live].copy(), simulator.slots[live] > 0
        simulator.dispatch(live[room], pick(live[room]))
        nobody = np.zeros((int((~room).sum()), simulator.n), dtype=bool)
        simulator.dispatch(live[~room], nobody)
        simulator.advance(live)
        made = live[simulator.version[live] > version]
        now = simulator.now[made]
        mean[made] += (1.0 - np.exp(-(now - last[made]) / SMOOTHING_S)) * (
            before[made] - mean[made]
        )
        final[made] += np.maximum(now - np.maximum(last[made], tail[made]), 0.0) * before[made]
        last[made], before[made] = now, simulator.accuracy[made]
        if target is not None:
            there = made[mean[made] >= target[made]]
            at[there], spent[there] = simulator.now[there], simulator.spent_by_now(there)
            simulator.done[there] = True
        live = rows[~simulator.done[rows]]
    final += np.maximum(end - np.maximum(last, tail), 0.0) * before
    missed = np.isnan(at)
    hours = np.where(missed, np.minimum(simulator.now[rows], end), at) - start
    device_s = np.where(missed, simulator.spent_by_now(rows), spent)
    return Needed(
        hours=hours / 3600.0,
        device_hours=device_s / 3600.0,
        reached=~missed,
        final=final / (end - tail),
    )


def enough(simulator: Trainings, rows: Index, scores: Array, picked: Mask) -> Mask:
    """Keep the first of some picks, as `Enough` does where a step cancels late jobs.

    They are enough where with those in flight as many updates are expected as are missing, less a
    half, from where on it is about as likely as not that these arrive.

    Args:
        simulator: of the episodes.
        rows: some of them; shape (m,).
        scores: by which devices were picked; shape (m, n).
        picked: shape (m, n).
    """
    order = np.where(picked, -scores, np.inf).argsort(axis=1, kind="stable")
    flat = (rows[:, None] * simulator.n + order).ravel()
    chances = Candidates(flat, simulator.table, flat).p_finish.reshape(order.shape)
    before = np.cumsum(chances, axis=1) - chances + simulator.n_expected(rows)[:, None]
    lacks = before < simulator.n_missing[rows][:, None] - 0.5
    lacks |= simulator.episodes.keeps_stragglers[rows][:, None]
    kept = np.zeros_like(picked)
    np.put_along_axis(kept, order, lacks, axis=1)
    return kept & picked


def plain(simulator: Trainings, rows: Index) -> tuple[Index, Index]:
    """Have all jobs in flight, and half of them a step."""
    most = simulator.most[rows]
    return most, np.maximum(most // 2, 1)


def learnt(weights: Array, price: Array) -> Numbers:
    """Decide by an agent's weights, at the price of each episode.

    Args:
        weights: shape (2, facts), or of each episode (b, 2, facts).
        price: shape (b,).
    """
    return lambda simulator, rows: decided(
        weights[rows] if weights.ndim > 2 else weights,
        simulator.facts(rows, price),
        simulator.most[rows],
    )


def ramp(rule: Array) -> Numbers:
    """Decide by a rule; shape (4,), or of each episode (b, 4), see `ramped`."""
    return lambda simulator, rows: ramped(
        rule[rows] if rule.ndim > 1 else rule, simulator.most[rows], simulator.version[rows]
    )


def ramped(rule: Array, most: npt.ArrayLike, version: npt.ArrayLike) -> tuple[Index, Index]:
    """Return jobs in flight and updates of the next step; shape (...,) each.

    Args:
        rule: share of the jobs beyond one at first; versions from one job more to the next; share
            of the jobs beyond one at most; share of the jobs in flight beyond one that a step waits
            for. Shape (4,), or (..., 4).
        most: jobs in flight at most, >= 1; one, or shape (...,).
        version: of the model; the same.
    """
    share, every, last, updates = rule.T
    beyond = np.asarray(most) - 1
    now = beyond * share + np.asarray(version) / every
    jobs = np.rint(1 + np.minimum(now, beyond * np.maximum(last, share)))
    return jobs.astype(np.int64), np.rint(1 + (jobs - 1) * updates).astype(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Episodes of one fleet, and what the plain schedule needs in them."""

    simulator: Trainings
    episodes: Episodes
    own: Mapping[str, Array]
    """Epochs, learning rates and luck, see `play`."""
    price: Array
    """Each of `PRICES` in turn; shape (b,)."""
    target: Array
    plain: Needed

    @classmethod
    def of(cls, place: Places, simulator: Trainings, n: int, seed: int) -> "Batch":
        """Draw n episodes, and play them by chance and by the plain schedule."""
        rng = stream(seed, 93)
        drawn = place.draw(n, rng)
        present = drawn.present.sum(axis=1)
        mean = np.where(drawn.present, drawn.examples, 0.0).sum(axis=1) / present
        wanted = log_uniform(rng, EXAMPLES, n)[:, None]
        examples = np.maximum(np.rint(drawn.examples / mean[:, None] * wanted), 1.0)
        most = np.rint(log_uniform(rng, MOST, n)).astype(np.int64)
        aged = (1.0 + np.arange(AGES)) ** -0.5
        episodes = replace(
            drawn,
            examples=examples,
            work_scale=examples / wanted,
            concurrency=np.clip(most, int(MOST[0]), np.maximum(present // 5, int(MOST[0]))),
            age_weights=np.where(rng.random((n, 1)) < 0.5, 1.0, aged),
        )
        epochs = np.minimum(rng.choice(EPOCHS, n), np.maximum(STEPS / wanted[:, 0], 1.0))
        own = {
            "epochs": epochs.astype(np.int64),
            "rates": log_uniform(rng, RATES, n),
            "luck": rng.gumbel(size=(n, LUCK, simulator.n)),
        }
        by_chance = play(simulator, episodes, plain, **own, selects=False)
        target = OF_RANDOM * by_chance.final
        return cls(
            simulator=simulator,
            episodes=episodes,
            own=own,
            price=np.array(PRICES)[np.arange(n) % len(PRICES)],
            target=target,
            plain=play(simulator, episodes, plain, **own, target=target),
        )

    def costs(self, numbers: Callable[[Array], Numbers], tried: Array, prices: Array) -> Array:
        """Return logarithms of costs over those of the plain schedule; 0 where neither arrives.

        All that is tried is played at once: many episodes take hardly longer than few.

        Args:
            numbers: from what is tried in each of b episodes to its decisions.
            tried: k agents or rules; shape (k, ...).
            prices: p of each of n episodes; shape (p, n).

        Returns:
            Shape (p, k, n).
        """
        n, k = len(self.episodes), len(tried)
        which = np.tile(np.arange(n), k)
        needed = play(
            self.simulator,
            self.episodes.take(which),
            numbers(np.repeat(tried, n, axis=0)),
            epochs=self.own["epochs"][which],
            rates=self.own["rates"][which],
            luck=self.own["luck"],
            target=self.target[which],
        )
        most, arrives = self.episodes.concurrency, needed.reached | self.plain.reached[which]
        plain = [self.plain.costs(price, most) for price in prices]
        found = [needed.costs(price[which], most[which]) for price in prices]
        more = np.array(found) - np.array(plain)[:, which]
        return np.where(arrives, more, 0.0).reshape(len(prices), k, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """Devices that trainings take place on."""

    recordings: Path | None = None
    """Folder of the published files, of which `FLEETS` are made; None for traces of one's own."""
    traces: Sequence[Path] = ()
    """Files of complete devices, a fleet each."""
    forecaster: str = "phones"
    """Fleet of the embedded forecaster that their devices have."""

    def places(self, part: str) -> list[Places]:
        """Return a scenario of each fleet.

        Args:
            part: "training", or "validation" for other devices and later hours.
        """
        if self.recordings is not None:
            return [_recorded(self.recordings, fleet, part) for fleet in FLEETS]
        found = []
        for path in self.traces:
            own = Scenarios.of(TraceSet.read(path), forecaster=embedded(self.forecaster))
            kinds = _kinds(own.training.traces.take(own.training.devices))
            scenario: Scenario = getattr(own, part)
            found.append(Places.like(replace(scenario, kinds=kinds, settings=SETTINGS)))
        return found

    def batches(self, part: str, n: int, seeds: Sequence[int], *, room: int) -> list[list[Batch]]:
        """Return batches, each of all fleets.

        Args:
            part: "training" or "validation".
            n: episodes of each fleet.
            seeds: of each batch.
            room: for how many agents or rules at a time.
        """
        places = self.places(part)
        simulators = [place.simulator(n * room) for place in places]
        return [
            [
                Batch.of(place, simulator, n, seed)
                for place, simulator in zip(places, simulators, strict=True)
            ]
            for seed in seeds
        ]


def _recorded(recordings: Path, fleet: str, part: str) -> Places:
    parts = fleets(recordings, seed=SEED, kind=fleet, assumed=ASSUMED)
    first, last = DAYS[fleet][part]
    scenario = Scenario.of(
        parts[PARTS[part]],
        forecaster=embedded(fleet),
        start=first * DAY_S,
        end=last * DAY_S,
        kinds=_kinds(parts["learn"]),
        settings=SETTINGS,
        step_s=2.0 * STEP_S[fleet],
    )
    return Places.like(scenario)


def _kinds(traces: TraceSet) -> JobKinds:
    n = len(MINUTES)
    return JobKinds.of_fleet(traces, minutes=MINUTES, megabytes=(5.0,) * n, patience=(10.0,) * n)
