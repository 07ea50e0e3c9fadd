"""Many servers with their fleets at once, each in an episode of its own, on replayed devices.

What a device does with a job is `TraceSet.trips`; what a server does is what `StaleStrategy` does
with the same schedule and age weights: it sends to the picked devices, waits for the first replies,
for a deadline or until no job is in flight, aggregates, and discards or keeps the stragglers. A
server that waits for a number of updates replaces a job that fails before its step: that is a
choice of its own, among the free devices which have neither failed nor reported since the last
step. What it knows is the same `Candidates` table that a real server has. Arrays are of shape
(b, n), episodes by devices, and no loop runs over either.

Differences from the event loop of `strategies`:
    A server without candidates looks again at the first instant at which a device is online, where
    the loop looks every half minute or at the next reply. A selector that picks fewer devices than
    it may is asked again when something arrives or fails.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import (
    AGES,
    CHOICES,
    GROUPS,
    INFLATION,
    NOISES,
    Episodes,
    RowArrays,
)
from fedstale.agents.env.learning_proxy import entropy_of
from fedstale.agents.policy import Inputs, features, heuristic_scores, row_medians
from fedstale.errors import TraceError
from fedstale.strategies.schedule import RECHECK_S
from fedstale.strategies.server import HEARTBEAT_S
from fedstale.strategies.types import DURATIONS_KEPT, UNKNOWN, Candidates, SelectionContext, Table
from fedstale.traces import Array, Index, Mask, Status, outline

if TYPE_CHECKING:
    from fedstale.agents.env.scenario import Scenario


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RoundOutcome(RowArrays):
    """What happened between one choice and the next; arrays of shape (b,)."""

    gain: Array
    """Fall of the log loss, in units of what a server step with the fleet's own mixture learns."""
    progress: Array
    """Fall of the log loss."""
    time_s: Array
    """From one choice to the next, in s."""
    wasted_s: Array
    """Device-seconds of jobs that failed or were discarded, in s."""
    spent_s: Array
    """Device-seconds of all jobs that ended, in s."""
    sent: Array
    """Jobs sent."""
    aggregated: Array
    """Updates that were aggregated."""
    failed: Array
    """Jobs without a reply in time."""
    discarded: Array
    """Stragglers: jobs in flight at a server step that are not waited for."""
    staleness: Array
    """Sum over the aggregated updates of their staleness in versions."""

    __repr__ = outline

    @classmethod
    def zeros(cls, b: int) -> "RoundOutcome":
        """Return rounds in which nothing has happened."""
        return cls(**{name: np.zeros(b) for name in cls.__slots__})

    def clear(self, rows: Index) -> None:
        """Forget what has happened in some episodes."""
        for name in self.__slots__:
            getattr(self, name)[rows] = 0.0

    def add(self, rows: Index, other: "RoundOutcome") -> None:
        """Add the outcomes of some episodes."""
        for name in self.__slots__:
            getattr(self, name)[rows] += getattr(other, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a round is worth: gain - time x (median durations) - waste x (share wasted).

    Without prices, as by default, an episode is worth what is learnt in it.
    """

    time: float = 0.0
    """Price of the median duration of a job, in gains of a server step."""
    waste: float = 0.0
    """Price of wasting the device-seconds of as many median jobs as a server step takes."""


class Simulator:
    """The state of b episodes.

    Args:
        scenario: where they take place.
        b: number of episodes at a time.
    """

    def __init__(self, scenario: "Scenario", b: int) -> None:
        scenario.traces.complete()
        if not np.all(np.isfinite(scenario.kinds.ttl_s)):
            raise TraceError("kinds.ttl_s: expected finite times, or lost jobs would never end")
        self.traces, self.kinds = scenario.traces, scenario.kinds
        self.forecasts, self.proxy = scenario.forecasts, scenario.proxy
        self.availability = self.traces.channel("availability")
        self.b, self.n = b, (n := scenario.settings.devices[1])
        self.episodes: Episodes
        """What is played in each place; set by the first `reset`."""
        self._begun = False
        self.table = Table(b * n)
        self.known = {
            name: column.reshape(b, n, *column.shape[1:])
            for name, column in self.table.columns.items()
        }
        self.entropy, self.mean_examples = np.zeros((b, n)), np.ones(b)
        self.fleet_share = np.full((b, GROUPS), 1.0 / GROUPS)
        self.now, self.stepped_at = np.zeros(b), np.zeros(b)
        self.n_choices, self.n_rounds = np.zeros(b, dtype=np.int64), np.zeros(b, dtype=np.int64)
        self.version = np.zeros(b, dtype=np.int64)
        self.worked_s = np.zeros(b)
        """Device-seconds of the jobs that have ended; shape (b,)."""
        # Whether a choice begins a round. If not, it replaces so many jobs that failed.
        self.begins, self.n_to_replace = np.ones(b, dtype=bool), np.zeros(b, dtype=np.int64)
        self.failed = np.zeros((b, n), dtype=bool)
        self.losses = np.full((b, GROUPS), self.proxy.first_loss)
        # Jobs: one at a time for each device.
        self.in_flight, self.replies = np.zeros((b, n), dtype=bool), np.zeros((b, n), dtype=bool)
        self.visible_at, self.free_at = np.full((b, n), -np.inf), np.zeros((b, n))
        self.sent_at, self.spent_s = np.zeros((b, n)), np.zeros((b, n))
        self.job_p_finish, self.job_loss = np.full((b, n), np.nan), np.zeros((b, n))
        self.job_square_loss = np.zeros((b, n))
        self.base_version = np.zeros((b, n), dtype=np.int64)
        # The window that a device is in, or its next one, as of the last look.
        self.window_start, self.window_end = np.full((b, n), np.inf), np.zeros((b, n))
        self.mask = np.zeros((b, n), dtype=bool)
        """Which devices may be picked now; shape (b, n)."""
        self.done = np.ones(b, dtype=bool)
        """Which episodes are over; shape (b,)."""
        self._outcome = RoundOutcome.zeros(b)

    def reset(self, episodes: Episodes, rows: npt.ArrayLike | None = None) -> None:
        """Begin episodes.

        Args:
            episodes: as many as rows, with room for n devices.
            rows: where; all if None.
        """
        rows = np.arange(self.b) if rows is None else np.asarray(rows, dtype=np.int64)
        if not self._begun:
            # Places without an episode of their own are done, whatever they hold.
            self.episodes = episodes.take(np.zeros(self.b, dtype=np.int64))
            self._begun = True
        self.episodes.put(rows, episodes)
        self.now[rows] = self.stepped_at[rows] = episodes.start
        self.version[rows] = self.n_rounds[rows] = self.n_choices[rows] = 0
        self.losses[rows], self.worked_s[rows] = self.proxy.first_loss, 0.0
        examples = np.where(episodes.present, episodes.examples, 0.0)[..., None]
        share = (examples * episodes.mixtures).sum(axis=1)
        total = np.maximum(share.sum(axis=1), 1e-12)
        self.fleet_share[rows] = share / total[:, None]
        self.mean_examples[rows] = total / np.maximum(episodes.present.sum(axis=1), 1)
        self.entropy[rows] = entropy_of(episodes.mixtures)
        self.in_flight[rows] = False
        self.visible_at[rows], self.free_at[rows] = -np.inf, 0.0
        self.job_p_finish[rows], self.window_end[rows] = np.nan, 0.0
        for name, column in self.known.items():
            column[rows] = UNKNOWN[name]
        self.done[rows] = False
        self._open_buffers(rows)
        self._find_candidates(rows)
        self._outcome.clear(rows)

    # What a selector sees.

    def candidates(self, row: int) -> Candidates:
        """Return the devices that may be picked in an episode; the id of a node is its column."""
        context = SelectionContext(
            n_in_flight=int(self.n_awaited[row]),
            buffer_size=int(self.episodes.buffer_size[row]),
            n_missing=int(self.n_missing[row]),
            keeps_stragglers=bool(self.episodes.keeps_stragglers[row]),
            version=int(self.version[row]),
            deadline_s=float(self.reply_limit_s[row]),
        )

        def of(mask: Mask) -> Candidates:
            columns = np.flatnonzero(mask)
            return Candidates(
                columns, self.table, row * self.n + columns, context, lambda: of(self.awaited[row])
            )

        return of(self.mask[row])

    @property
    def slots(self) -> Index:
        """How many may be picked now; shape (b,)."""
        free = np.maximum(self.episodes.concurrency - self.n_awaited, 0)
        free = np.where(self.begins, free, np.minimum(free, self.n_to_replace))
        return np.minimum(free, self.mask.sum(axis=1))

    @property
    def awaited(self) -> Mask:
        """Devices with a job that has not ended for the server; shape (b, n)."""
        return self.in_flight & (self.visible_at > self.now[:, None])

    @property
    def n_awaited(self) -> Index:
        """Jobs whose end the server has not seen; shape (b,)."""
        return self.awaited.sum(axis=1)

    @property
    def clock(self) -> Array:
        """Share of each episode's time, or of its device time, that is over; shape (b,)."""
        own = self.episodes
        time = (self.now - own.start) / (own.end - own.start)
        share = np.maximum(time, self.worked_s / own.budget_s)
        return np.where(self.done, 1.0, np.minimum(np.maximum(share, 0.0), 1.0))

    @property
    def n_missing(self) -> Index:
        """Updates that the next server step still waits for; shape (b,)."""
        arrived = (self.in_flight & self.replies & ~self.awaited).sum(axis=1)
        return np.maximum(self.episodes.buffer_size - arrived, 0)

    def n_expected(self, rows: Index) -> Array:
        """Return the sum of the chances to finish of the jobs that are awaited; shape (m,)."""
        row, column = np.nonzero(self.awaited[rows])
        flat = rows[row] * self.n + column
        chances = Candidates(flat, self.table, flat).p_finish
        return np.bincount(row, chances, minlength=rows.size).astype(np.float64)

    def observation(self, rows: Index, columns: Index | None = None) -> Inputs:
        """Compute the scorer's inputs in some episodes.

        Args:
            rows: episodes; shape (m,).
            columns: devices of each to look at, all if None; shape (m, c). Those that may not be
                picked are 0.
        """
        if columns is None:
            columns = np.arange(self.n)
        places = rows[:, None] * self.n + columns
        flat = places.ravel()
        return features(
            Candidates(flat, self.table, flat),
            self.mask.ravel()[places],
            now=self.now[rows],
            k=self.slots[rows],
            n_in_flight=self.n_awaited[rows],
            version=self.version[rows],
            deadline_s=self.reply_limit_s[rows],
            n_missing=self.n_missing[rows],
            n_expected=self.n_expected(rows),
        )

    def heuristic(self, rows: Index) -> Array:
        """Return the heuristic's scores in some episodes; see `features.heuristic_scores`."""
        flat = (rows[:, None] * self.n + np.arange(self.n)).ravel()
        return heuristic_scores(Candidates(flat, self.table, flat), self.mask[rows])

    @property
    def reply_limit_s(self) -> Array:
        """Time in which a reply counts in s: until it expires or the server no longer waits."""
        ttl = self.kinds.ttl_s[self.episodes.kind]
        left = np.maximum(self.stepped_at + self.episodes.deadline_s - self.now, 0.0)
        limit = np.minimum(ttl, left)
        return np.where(self.episodes.keeps_stragglers, ttl, limit)

    def reward_terms(self, rows: Index, outcome: RoundOutcome, reward: Reward) -> dict[str, Array]:
        """Return the terms of the reward of a round of some episodes, and their sum as "reward"."""
        median_s, size = self.kinds.median_s[self.episodes.kind[rows]], self.episodes.buffer_size
        gain, time = outcome.gain, -reward.time * outcome.time_s / median_s
        waste = -reward.waste * outcome.wasted_s / (median_s * size[rows])
        return {"gain": gain, "time": time, "waste": waste, "reward": gain + time + waste}

    # What a server does.

    def dispatch(self, rows: Index, picked: Mask) -> None:
        """Send a job to the picked devices.

        Args:
            rows: episodes; shape (m,).
            picked: of those devices that may be picked; shape (m, n).
        """
        which, column = np.nonzero(picked & self.mask[rows])
        row = rows[which]
        at = row, column
        if row.size:
            now, kind = self.now[row], self.episodes.kind[row]
            jobs = self.kinds.jobs(kind, self.episodes.work_scale[at])
            trip = self.traces.trips(self.episodes.devices[at], now, jobs, self.free_at[at])
            noticed = np.where(trip.status == Status.INTERRUPTED, trip.ended + HEARTBEAT_S, np.inf)
            replies = trip.status == Status.REPORTED
            self.replies[at], self.in_flight[at] = replies, True
            end = np.minimum(noticed, now + self.kinds.ttl_s[kind])
            self.visible_at[at] = np.where(replies, trip.reported, end)
            self.free_at[at], self.sent_at[at] = trip.ended, now
            self.spent_s[at] = trip.download_s + trip.compute_s + trip.upload_s
            self.base_version[at] = self.version[row]
            self._train(at)
            self.known["times_picked"][at] += 1
            self.known["picked_at"][at] = now
            self.job_p_finish[at] = self.known["forecast_p_finish"][at]
        n_sent = np.bincount(which, minlength=rows.size)
        self._outcome.sent[rows] += n_sent
        self.n_choices[rows] += 1
        self.n_rounds[rows] += self.begins[rows]
        begun = rows[self.begins[rows] & (n_sent > 0)]
        self._forget_failures(begun)
        self.begins[begun] = False
        self.n_to_replace[rows] = np.maximum(self.n_to_replace[rows] - n_sent, 0)
        self.mask[rows] = False

    def advance(self, rows: Index) -> RoundOutcome:
        """Go on to the next choice, or to the end of the episode.

        Args:
            rows: episodes; shape (m,).

        Returns:
            What happened since the last choice; arrays of shape (m,).
        """
        before = self.now[rows].copy()
        busy = self.in_flight[rows].any(axis=1)
        self.now[rows[~busy]] += RECHECK_S
        self._open_buffers(rows[~busy])
        if busy.any():
            self._receive(rows[busy], self._next_event(rows[busy]))
        self._find_candidates(rows)
        self._outcome.time_s[rows] = self.now[rows] - before
        outcome = self._outcome.take(rows)
        self._outcome.clear(rows)
        return outcome

    def _train(self, at: tuple[Index, Index]) -> None:
        """Compute the losses that the server will see of the version that devices are sent."""
        losses, mixture = self.losses[at[0]], self.episodes.mixtures[at]
        turn = self.known["times_picked"][at] % NOISES
        noise = self.episodes.noise[at[0], at[1], turn]
        of_model = (mixture * losses).sum(axis=1)
        honest = self.proxy.reported(of_model, self.entropy[at], noise)
        self.job_loss[at] = np.where(self.episodes.inflates[at], INFLATION, 1.0) * honest
        each = self.proxy.reported(losses, 0.0, 0.0)
        mean = np.maximum((mixture * each).sum(axis=1), 1e-12)
        spread = (mixture * each**2).sum(axis=1) / mean**2
        self.job_square_loss[at] = self.job_loss[at] ** 2 * np.maximum(spread, 1.0)

    def _open_buffers(self, rows: Index) -> None:
        """Begin to wait for the updates of a server step."""
        self.begins[rows] = True
        self._forget_failures(rows)

    def _forget_failures(self, rows: Index) -> None:
        self.n_to_replace[rows] = 0
        self.failed[rows] = False

    def _next_event(self, rows: Index) -> Array:
        """Return the instant of the next server step or failed job; inf without jobs."""
        episodes, in_flight = self.episodes, self.in_flight[rows]
        visible = np.where(in_flight, self.visible_at[rows], np.inf)
        arrivals = np.where(self.replies[rows], visible, np.inf)
        arrivals.sort(axis=1)
        failures = np.where(self.replies[rows], np.inf, visible).min(axis=1)
        last_of_buffer = np.minimum(episodes.buffer_size[rows], self.n) - 1
        full = arrivals[np.arange(rows.size), last_of_buffer]
        due = np.maximum(self.stepped_at[rows] + episodes.deadline_s[rows], arrivals[:, 0])
        last = np.where(in_flight, visible, -np.inf).max(axis=1)
        last = np.where(np.isfinite(last), last, np.inf)
        event = np.minimum.reduce([full, due, last, failures])
        return np.maximum(event, self.now[rows])

    def _receive(self, rows: Index, when: Array) -> None:
        """Receive arrivals and failures up to an instant, and aggregate if a step is due."""
        self.now[rows] = when
        in_flight, visible = self.in_flight[rows], self.visible_at[rows]
        seen, replies = in_flight & (visible <= when[:, None]), self.replies[rows]
        failed, arrived = seen & ~replies, seen & replies
        self._fail(rows, failed)
        # What failed last is replaced, if somebody is free, before a step does without it.
        size, n_arrived = self.episodes.buffer_size[rows], arrived.sum(axis=1)
        is_due = when >= self.stepped_at[rows] + self.episodes.deadline_s[rows]
        is_last = ~(in_flight & ~seen).any(axis=1)
        is_last &= ~(failed.any(axis=1) & self._replaces(rows))
        steps = (n_arrived > 0) & ((n_arrived >= size) | is_due | is_last)
        if steps.any():
            self._step(rows[steps], arrived[steps])

    def _replaces(self, rows: Index) -> Mask:
        """Mark servers that wait for a number of updates, and so replace failed jobs."""
        return self.episodes.buffer_size[rows] <= self.episodes.concurrency[rows]

    def _fail(self, rows: Index, failed: Mask) -> None:
        """Record jobs that brought nothing; shape (m, n)."""
        if not failed.any():
            return
        self._end(rows, failed, finished=False)
        n_failed, spent = failed.sum(axis=1), np.where(failed, self.spent_s[rows], 0.0).sum(axis=1)
        self._outcome.failed[rows] += n_failed
        self._outcome.wasted_s[rows] += spent
        self._outcome.spent_s[rows] += spent
        self.worked_s[rows] += spent
        self.failed[rows] |= failed
        self.n_to_replace[rows] += np.where(self._replaces(rows), n_failed, 0)

    def _step(self, rows: Index, arrived: Mask) -> None:
        """Aggregate the first updates that have arrived; keep or discard what is in flight."""
        outcome, spent = self._outcome, self.spent_s[rows]
        arrivals = np.where(arrived, self.visible_at[rows], np.inf)
        order = arrivals.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        accepted = arrived & (order < self.episodes.buffer_size[rows][:, None])
        self._accept(rows, accepted)
        discards = ~self.episodes.keeps_stragglers[rows]
        discarded = self.in_flight[rows] & discards[:, None]
        lost = np.where(discarded, spent, 0.0).sum(axis=1)
        outcome.discarded[rows] += discarded.sum(axis=1)
        outcome.wasted_s[rows] += lost
        worked = lost + np.where(accepted, spent, 0.0).sum(axis=1)
        outcome.spent_s[rows] += worked
        self.worked_s[rows] += worked
        self.in_flight[rows] &= ~discarded
        self.version[rows] += 1
        self.stepped_at[rows] = self.now[rows]
        self._open_buffers(rows)

    def _accept(self, rows: Index, accepted: Mask) -> None:
        """Record the replies of a server step, and let the model learn from them."""
        which, column = np.nonzero(accepted)
        row = rows[which]
        at = row, column
        known, staleness = self.known, self.version[row] - self.base_version[at]
        durations = known["durations_s"][at]
        full = ~np.isnan(durations[:, -1])
        durations[full, :-1] = durations[full, 1:]
        place = np.minimum((~np.isnan(durations)).sum(axis=1), DURATIONS_KEPT - 1)
        durations[np.arange(row.size), place] = self.visible_at[at] - self.sent_at[at]
        known["durations_s"][at] = durations
        if row.size:
            known["duration_s"][at] = row_medians(durations, np.isfinite(durations))[:, 0]
        examples = self.episodes.examples
        known["examples"][at], known["loss"][at] = examples[at], self.job_loss[at]
        known["square_loss"][at] = self.job_square_loss[at]
        known["staleness"][at], known["last_version"][at] = staleness, self.version[row]
        self._end(rows, accepted, finished=True)
        self._report_forecasts(row, column, self.visible_at[at])

        ages = np.minimum(staleness, AGES - 1)
        weights = np.zeros((rows.size, self.n))
        weights[which, column] = self.episodes.age_weights[row, ages] * examples[at]
        progress, gain = self._merge(rows, accepted, weights)
        outcome = self._outcome
        outcome.progress[rows] += progress
        outcome.gain[rows] += gain
        outcome.aggregated[rows] += accepted.sum(axis=1)
        outcome.staleness[rows] += np.bincount(which, weights=staleness, minlength=rows.size)

    def _merge(self, rows: Index, accepted: Mask, weights: Array) -> tuple[Array, Array]:
        """Update the models of some episodes by the updates of a server step.

        Args:
            rows: episodes; shape (m,).
            accepted: which devices have an update in it, at least one each; shape (m, n).
            weights: examples of the accepted devices times the weight of their age, else 0; shape
                (m, n). A step divides by the examples alone, as `StaleStrategy` does.

        Returns:
            By how much the log loss of the fleet's data falls, and that in units of what a step
            with the fleet's own mixture learns; shape (m,) each.
        """
        examples = self.episodes.examples[rows]
        total_examples = np.where(accepted, examples, 0.0).sum(axis=1)
        mix = (weights[:, None, :] @ self.episodes.mixtures[rows])[:, 0]
        fleet = np.maximum(self.fleet_share[rows], 1e-6)
        total = np.maximum(weights.sum(axis=1), 1e-12)
        sizes = (weights * examples).sum(axis=1) / total / self.mean_examples[rows]
        ratios = mix / np.maximum(total_examples, 1e-12)[:, None] / fleet
        return self._learn(rows, ratios, sizes)

    def _learn(self, rows: Index, ratios: Array, sizes: Array) -> tuple[Array, Array]:
        """Update the models by what steps are made of, as `LearningProxy.after_step` takes it."""
        losses, fleet = self.losses[rows], self.fleet_share[rows]
        self.losses[rows] = after = self.proxy.after_step(losses, ratios, sizes)
        progress = np.log((fleet * losses).sum(axis=1) / (fleet * after).sum(axis=1))
        return progress, progress / self.proxy.fleet_progress(losses)

    def _end(self, rows: Index, ended: Mask, *, finished: bool) -> None:
        which, column = np.nonzero(ended)
        at = rows[which], column
        self.in_flight[at] = False
        known, forecast = self.known, self.job_p_finish[at]
        known["times_finished" if finished else "times_failed"][at] += 1
        known["expected_finishes"][at] += np.where(np.isnan(forecast), float(finished), forecast)
        self.job_p_finish[at] = np.nan

    def _find_candidates(self, rows: Index) -> None:
        """Find which devices may be picked; without any, wait for a device or for replies."""
        waiting = rows
        while waiting.size:
            most = self.episodes.rounds[waiting]
            over = (self.n_rounds[waiting] >= most) & self.begins[waiting]
            over |= self.n_choices[waiting] >= CHOICES * most
            over |= self.now[waiting] >= self.episodes.end[waiting]
            over |= self.worked_s[waiting] >= self.episodes.budget_s[waiting]
            self.done[waiting[over]] = True
            waiting = waiting[~over]
            now = self.now[waiting, None]
            self._find_windows(waiting, now)
            free = self._may_be_free(waiting) & (self.visible_at[waiting] <= now)
            mask = free & (self.window_start[waiting] <= now)
            self.mask[waiting] = mask
            waiting = waiting[~mask.any(axis=1)]
            # Nobody replaces what failed, and nothing else is waited for: a new round.
            idle = ~self.begins[waiting] & ~self.in_flight[waiting].any(axis=1)
            self._open_buffers(waiting[idle])
            if (~idle).any():
                self._wait(waiting[~idle])
        self.mask[rows[self.done[rows]]] = False
        requesting = rows[self.episodes.requests_forecasts[rows] & ~self.done[rows]]
        which, column = np.nonzero(self.mask[requesting])
        self._report_forecasts(requesting[which], column, self.now[requesting[which]])

    def _may_be_free(self, rows: Index) -> Mask:
        """Mark devices that could be picked if they were online and done; shape (m, n)."""
        begins, able = self.begins[rows], self.episodes.present[rows] & ~self.in_flight[rows]
        replacing = ~begins & (self.n_to_replace[rows] > 0)
        return able & (begins[:, None] | (replacing[:, None] & ~self.failed[rows]))

    def _find_windows(self, rows: Index, when: Array) -> None:
        """Find the windows of devices whose last one is over by an instant; (m, n) or (m, 1)."""
        over = self.episodes.present[rows] & (self.window_end[rows] <= when)
        which, column = np.nonzero(over)
        if not which.size:
            return
        at = rows[which], column
        instants = when[which, column if when.shape[1] > 1 else 0]
        found = self.availability.window_at_or_after(self.episodes.devices[at], instants)
        self.window_start[at], self.window_end[at] = found

    def _wait(self, rows: Index) -> None:
        """Move the clock to the next step, failure, or first instant with a candidate."""
        now, end = self.now[rows], self.episodes.end[rows]
        earliest = np.maximum(self.visible_at[rows], now[:, None])
        able = self._may_be_free(rows)
        self._find_windows(rows, np.where(able, earliest, -np.inf))
        start = np.where(able, np.maximum(self.window_start[rows], earliest), np.inf)
        candidate, event = start.min(axis=1), self._next_event(rows)
        # A device that comes after the end is not waited for.
        self.now[rows] = now = np.minimum(np.minimum(candidate, event), np.maximum(end, now))
        receiving = (event <= candidate) & (event <= now)
        if receiving.any():
            self._receive(rows[receiving], event[receiving])

    def _report_forecasts(self, row: Index, column: Index, now: Array) -> None:
        """Record what devices forecast of themselves at some instants."""
        if self.forecasts is None or not row.size:
            return
        at, episodes, known = (row, column), self.episodes, self.known
        p, available, duration = self.forecasts.at(
            episodes.devices[at], episodes.kind[row], episodes.work_scale[at], now
        )
        reported = np.where(episodes.over_reports[at] & ~np.isnan(p), 1.0, p)
        known["forecast_p_finish"][at] = np.minimum(np.maximum(reported, 0.0), 1.0)
        known["forecast_p_available"][at] = np.minimum(np.maximum(available, 0.0), 1.0)
        known["forecast_duration_s"][at] = duration
        known["forecast_at"][at] = np.where(np.isnan(p), np.nan, now)
