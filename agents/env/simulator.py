"""Many servers with their fleets at once, each in an episode of its own, on replayed devices.

What a device does with a job is `trips`; what a server does is what `StaleStrategy` does with the
same schedule and age weights: it sends to those picked, waits for the first replies, for a
deadline or until nobody is out, merges, and forgets or keeps the rest. What it knows is the same
`Candidates` table that a real server has. Arrays are of shape (b, n), episodes by devices, and no
loop runs over either.

Differences from the event loop of `strategies`:
    A server with nobody to ask looks again at the first moment when somebody is there, where the
    loop looks every half minute or at the next reply.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes, JobKinds
from fedstale.agents.env.forecast_table import Forecasts
from fedstale.agents.env.learning_proxy import Proxy, entropy_of, fitted
from fedstale.agents.policy.features import COLUMNS, Single, batch, priors
from fedstale.errors import TraceError
from fedstale.strategies.server.clients import DURATIONS_KEPT, Candidates, Situation, Table
from fedstale.traces import Job, Status, TraceSet
from fedstale.traces.arrays import Array, Index, Mask

# How a SuperLink shows an interruption: its heartbeat, every 30 s, has been missed twice.
_HEARTBEAT_S = 60.0
# A server whose selector picks nobody asks again after this long, as `StaleStrategy` does.
RECHECK_S = 30.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Round:
    """What came of one choice, until the next one; arrays of shape (b,)."""

    gain: Array
    """Fall of the log loss, in units of what a merge with the fleet's own mixture learns."""
    progress: Array
    """Fall of the log loss."""
    time_s: Array
    """From one choice to the next, in s."""
    wasted_s: Array
    """Device-seconds of jobs that failed or were forgotten, in s."""
    spent_s: Array
    """Device-seconds of all jobs that ended, in s."""
    sent: Array
    """Jobs sent."""
    merged: Array
    """Updates that were merged."""
    failed: Array
    """Jobs without a reply in time."""
    forgotten: Array
    """Jobs still out when others were merged, and not waited for."""
    staleness: Array
    """Sum over the merged updates of their staleness in versions."""

    @classmethod
    def empty(cls, b: int) -> "Round":
        """Return a round in which nothing has happened."""
        return cls(**{f.name: np.zeros(b) for f in fields(cls)})

    def take(self, rows: npt.NDArray[np.integer]) -> "Round":
        """Return the rounds of some episodes."""
        return Round(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a round is worth: gain - time x (rounds of usual length) - waste x (share wasted)."""

    time: float = 0.1
    """Price of the usual time of a job, in gains of a usual merge."""
    waste: float = 0.3
    """Price of wasting the device-seconds of as many usual jobs as a merge takes."""

    def terms(self, made: Round, usual_s: Array, buffer_size: Index) -> dict[str, Array]:
        """Return the terms of the reward, dimensionless, and their sum under "reward".

        Args:
            made: what came of some rounds.
            usual_s: usual time of their jobs in s.
            buffer_size: updates of a merge.
        """
        gain = made.gain
        time = -self.time * made.time_s / usual_s
        waste = -self.waste * made.wasted_s / (usual_s * buffer_size)
        return {"gain": gain, "time": time, "waste": waste, "reward": gain + time + waste}


class World:
    """The state of b episodes.

    Args:
        traces: complete devices.
        kinds: the jobs of the episodes.
        forecasts: what devices say.
        b: number of episodes at a time.
        n: devices that there is room for in each.
        proxy: how a model learns; the constants fitted to training runs if None.
    """

    def __init__(
        self,
        traces: TraceSet,
        kinds: JobKinds,
        forecasts: Forecasts,
        *,
        b: int,
        n: int,
        proxy: Proxy | None = None,
    ) -> None:
        traces.require("availability", "compute", "downlink", "uplink")
        assert traces.availability is not None
        if not np.all(np.isfinite(kinds.ttl_s)):
            raise TraceError("kinds.ttl_s: expected finite times, or lost jobs would never end")
        self.traces, self.kinds, self.forecasts = traces, kinds, forecasts
        self.availability = traces.availability
        self.proxy = proxy or fitted()
        self.b, self.n = b, n
        self.table = Table(b * n)
        self.known = {
            name: column.reshape(b, n, *column.shape[1:])
            for name, column in self.table.columns.items()
        }
        self.devices = np.zeros((b, n), dtype=np.int64)
        self.present, self.lies = np.zeros((b, n), dtype=bool), np.zeros((b, n), dtype=bool)
        self.mixtures, self.examples = np.zeros((b, n, GROUPS)), np.ones((b, n))
        self.noise, self.entropy = np.zeros((b, n, NOISES)), np.zeros((b, n))
        self.mean_examples = np.ones(b)
        self.fleet_share = np.full((b, GROUPS), 1.0 / GROUPS)
        self.now, self.started, self.end, self.opened = (np.zeros(b) for _ in range(4))
        self.deadline_s, self.cooldown_s = np.full(b, np.inf), np.zeros(b)
        self.kind, self.rounds, self.n_rounds, self.version = (
            np.zeros(b, dtype=np.int64) for _ in range(4)
        )
        self.concurrency, self.buffer_size = np.ones(b, dtype=np.int64), np.ones(b, dtype=np.int64)
        self.keeps, self.asks = np.zeros(b, dtype=bool), np.zeros(b, dtype=bool)
        self.age_weights = np.ones((b, AGES))
        self.losses = np.full((b, GROUPS), self.proxy.first_loss)
        # Jobs: one at a time for each device.
        self.open, self.good = np.zeros((b, n), dtype=bool), np.zeros((b, n), dtype=bool)
        self.visible_at, self.free_at = np.full((b, n), -np.inf), np.zeros((b, n))
        self.sent_at, self.spent_s = np.zeros((b, n)), np.zeros((b, n))
        self.stated, self.job_loss = np.full((b, n), np.nan), np.zeros((b, n))
        self.job_square = np.zeros((b, n))
        self.base_version = np.zeros((b, n), dtype=np.int64)
        # The window that a device is in, or its next one, as of the last look.
        self.window_start, self.window_end = np.full((b, n), np.inf), np.zeros((b, n))
        self.mask = np.zeros((b, n), dtype=bool)
        """Who may be picked now; shape (b, n)."""
        self.done = np.ones(b, dtype=bool)
        """Whose episode is over; shape (b,)."""
        self._round = Round.empty(b)

    def reset(self, episodes: Episodes, rows: npt.ArrayLike | None = None) -> None:
        """Begin episodes.

        Args:
            episodes: as many as rows, with room for at most n devices.
            rows: where; all if None.
        """
        rows = np.arange(self.b) if rows is None else np.asarray(rows, dtype=np.int64)
        m = episodes.n_max
        assert len(episodes) == rows.size
        assert m <= self.n
        for name in ("devices", "present", "lies", "mixtures", "examples", "noise"):
            getattr(self, name)[rows, :m] = getattr(episodes, name)
        self.present[rows, m:] = False
        for name in ("end", "deadline_s", "cooldown_s", "kind", "rounds", "concurrency"):
            getattr(self, name)[rows] = getattr(episodes, name)
        for name in ("buffer_size", "keeps", "asks", "age_weights"):
            getattr(self, name)[rows] = getattr(episodes, name)
        self.now[rows] = self.started[rows] = self.opened[rows] = episodes.start
        self.version[rows] = self.n_rounds[rows] = 0
        self.losses[rows] = self.proxy.first_loss
        mass = np.where(self.present[rows], self.examples[rows], 0.0)[..., None]
        share = (mass * self.mixtures[rows]).sum(axis=1)
        total = np.maximum(share.sum(axis=1), 1e-12)
        self.fleet_share[rows] = share / total[:, None]
        self.mean_examples[rows] = total / np.maximum(self.present[rows].sum(axis=1), 1)
        self.entropy[rows, :m] = entropy_of(episodes.mixtures)
        self.open[rows] = False
        self.visible_at[rows], self.free_at[rows] = -np.inf, 0.0
        self.stated[rows], self.window_end[rows] = np.nan, 0.0
        for name, column in self.known.items():
            zero = name in Table.COUNTS or name == "expected_finishes"
            column[rows] = 0 if zero else np.nan
        self.done[rows] = False
        self._look(rows)
        self._clear(rows)

    # What a selector sees.

    def candidates(self, row: int) -> Candidates:
        """Return who may be picked in an episode; the id of a node is its column."""
        columns = np.flatnonzero(self.mask[row])
        situation = Situation(
            n_in_flight=int(self.open[row].sum()),
            version=int(self.version[row]),
            deadline_s=float(self.reply_limit_s[row]),
        )
        return Candidates(columns, self.table, row * self.n + columns, situation)

    @property
    def slots(self) -> Index:
        """How many may be picked now; shape (b,)."""
        free = self.concurrency - self.open.sum(axis=1)
        return np.minimum(np.maximum(free, 0), self.mask.sum(axis=1))

    def observed(self, rows: Index, columns: Index | None = None) -> tuple[Single, Single, Single]:
        """Return features, context and prior of some episodes; see `features.batch`.

        Args:
            rows: episodes; shape (m,).
            columns: devices of each to look at, all if None; shape (m, c). Who of them may not be
                picked is 0.
        """
        if columns is None:
            columns = np.broadcast_to(np.arange(self.n), (rows.size, self.n))
        flat = (rows[:, None] * self.n + columns).ravel()
        seen = Candidates(flat, self.table, flat)
        mask = np.take_along_axis(self.mask[rows], columns, axis=1)
        return batch(
            {name: getattr(seen, name).reshape(columns.shape) for name in COLUMNS},
            mask,
            now=self.now[rows],
            k=self.slots[rows],
            n_in_flight=self.open[rows].sum(axis=1),
            version=self.version[rows],
            deadline_s=self.reply_limit_s[rows],
        )

    def priors(self, rows: Index) -> Array:
        """Return the prior of all devices of some episodes; see `features.priors`."""
        flat = (rows[:, None] * self.n + np.arange(self.n)).ravel()
        seen = Candidates(flat, self.table, flat)
        shape = rows.size, self.n
        return priors(seen.p_finish.reshape(shape), seen.utility.reshape(shape), self.mask[rows])

    @property
    def reply_limit_s(self) -> Array:
        """Time in which a reply counts in s: until it expires or the server no longer waits."""
        ttl = self.kinds.ttl_s[self.kind]
        return np.where(self.keeps, ttl, np.minimum(ttl, self.deadline_s))

    @property
    def usual_s(self) -> Array:
        """Usual time of a job in s; shape (b,)."""
        return self.kinds.usual_s[self.kind]

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
        self._round.sent[rows] += np.bincount(which, minlength=rows.size)
        if row.size:
            kind, now = self.kind[row], self.now[row]
            job = Job(
                work=self.kinds.work[kind],
                download_bytes=self.kinds.n_bytes[kind],
                upload_bytes=self.kinds.n_bytes[kind],
                ttl_s=self.kinds.ttl_s[kind],
            )
            trip = self.traces.trips(self.devices[at], now, job, self.free_at[at])
            expires = now + self.kinds.ttl_s[kind]
            noticed = np.where(trip.status == Status.INTERRUPTED, trip.ended + _HEARTBEAT_S, np.inf)
            good = trip.status == Status.REPORTED
            self.good[at], self.open[at] = good, True
            self.visible_at[at] = np.where(good, trip.reported, np.minimum(noticed, expires))
            self.free_at[at], self.sent_at[at] = trip.ended, now
            self.spent_s[at] = trip.download_s + trip.compute_s + trip.upload_s
            self.base_version[at] = self.version[row]
            self._train(at)
            self.known["times_picked"][at] += 1
            self.known["picked_at"][at] = now
            self.stated[at] = self.known["forecast_p_finish"][at]
        self.mask[rows] = False

    def advance(self, rows: Index) -> Round:
        """Go on to the next choice, or to the end of the episode.

        Args:
            rows: episodes; shape (m,).

        Returns:
            What happened since the last choice; arrays of shape (m,).
        """
        before = self.now[rows].copy()
        idle = rows[~self.open[rows].any(axis=1)]
        self.now[idle] += RECHECK_S
        busy = rows[self.open[rows].any(axis=1)]
        if busy.size:
            self._merge(busy, self._next_merge(busy))
        self.n_rounds[rows] += 1
        self._look(rows)
        self._round.time_s[rows] = self.now[rows] - before
        made = self._round.take(rows)
        self._clear(rows)
        return made

    def _train(self, at: tuple[Index, Index]) -> None:
        """Work out what devices will report of the version that they are sent."""
        losses, mixture = self.losses[at[0]], self.mixtures[at]
        turn = self.known["times_picked"][at] % NOISES
        noise = self.noise[at[0], at[1], turn]
        of_model = (mixture * losses).sum(axis=1)
        self.job_loss[at] = self.proxy.reported(of_model, self.entropy[at], noise)
        each = self.proxy.reported(losses, 0.0, 0.0)
        mean = np.maximum((mixture * each).sum(axis=1), 1e-12)
        spread = (mixture * each**2).sum(axis=1) / mean**2
        self.job_square[at] = self.job_loss[at] ** 2 * np.maximum(spread, 1.0)

    def _next_merge(self, rows: Index) -> Array:
        """Return when jobs that are out are next merged or given up, in s; inf if none is out."""
        visible = np.where(self.open[rows], self.visible_at[rows], np.inf)
        arrivals = np.sort(np.where(self.good[rows], visible, np.inf), axis=1)
        full = arrivals[np.arange(rows.size), np.minimum(self.buffer_size[rows], self.n) - 1]
        due = np.maximum(self.opened[rows] + self.deadline_s[rows], arrivals[:, 0])
        last = np.where(self.open[rows], visible, -np.inf).max(axis=1)
        last = np.where(np.isfinite(last), last, np.inf)
        return np.maximum(np.minimum(np.minimum(full, due), last), self.now[rows])

    def _merge(self, rows: Index, when: Array) -> None:
        """Take in what has arrived by an instant, and merge it."""
        self.now[rows] = when
        visible = np.where(self.open[rows], self.visible_at[rows], np.inf)
        seen = visible <= when[:, None]
        failed = seen & ~self.good[rows]
        arrivals = np.where(self.good[rows], visible, np.inf)
        order = np.argsort(np.argsort(arrivals, axis=1, kind="stable"), axis=1, kind="stable")
        merged = seen & self.good[rows] & (order < self.buffer_size[rows][:, None])
        self._accept(rows, merged)
        self._end(rows, failed, finished=False)
        any_merged = merged.any(axis=1)
        forgotten = self.open[rows] & (any_merged & ~self.keeps[rows])[:, None]
        made, spent = self._round, self.spent_s[rows]
        made.failed[rows] += failed.sum(axis=1)
        made.forgotten[rows] += forgotten.sum(axis=1)
        lost = np.where(failed | forgotten, spent, 0.0).sum(axis=1)
        made.wasted_s[rows] += lost
        made.spent_s[rows] += lost + np.where(merged, spent, 0.0).sum(axis=1)
        self.open[rows] &= ~forgotten
        self.version[rows] += any_merged
        self.opened[rows[any_merged]] = when[any_merged]

    def _accept(self, rows: Index, merged: Mask) -> None:
        """Note the replies that are merged, and let the model learn from them."""
        which, column = np.nonzero(merged)
        row = rows[which]
        at = row, column
        known, age = self.known, self.version[row] - self.base_version[at]
        durations = known["durations_s"][at]
        full = ~np.isnan(durations[:, -1])
        durations[full, :-1] = durations[full, 1:]
        place = np.minimum((~np.isnan(durations)).sum(axis=1), DURATIONS_KEPT - 1)
        durations[np.arange(row.size), place] = self.visible_at[at] - self.sent_at[at]
        known["durations_s"][at] = durations
        if row.size:
            known["duration_s"][at] = _middle(durations)
        known["examples"][at], known["loss"][at] = self.examples[at], self.job_loss[at]
        known["square_loss"][at] = self.job_square[at]
        known["staleness"][at], known["last_version"][at] = age, self.version[row]
        self._end(rows, merged, finished=True)
        self._tell(row, column, self.visible_at[at])

        weights = self.age_weights[row, np.minimum(age, AGES - 1)] * self.examples[at]
        wide = np.zeros((rows.size, self.n))
        wide[which, column] = weights
        mass = np.where(merged, self.examples[rows], 0.0).sum(axis=1)
        mix = (wide[:, None, :] @ self.mixtures[rows])[:, 0]
        ratios = mix / np.maximum(mass, 1e-12)[:, None] / np.maximum(self.fleet_share[rows], 1e-6)
        total = np.maximum(wide.sum(axis=1), 1e-12)
        size = (wide * self.examples[rows]).sum(axis=1) / total / self.mean_examples[rows]
        losses = self.losses[rows]
        some = np.asarray(merged.any(axis=1))
        after = np.where(some[:, None], self.proxy.merged(losses, ratios, size), losses)
        self.losses[rows] = after
        fleet = self.fleet_share[rows]
        progress = np.log((fleet * losses).sum(axis=1) / (fleet * after).sum(axis=1))
        usual = self.proxy.usual(losses)
        made = self._round
        made.progress[rows] += progress
        made.gain[rows] += progress / usual
        made.merged[rows] += merged.sum(axis=1)
        made.staleness[rows] += np.bincount(which, weights=age, minlength=rows.size)

    def _end(self, rows: Index, ended: Mask, *, finished: bool) -> None:
        which, column = np.nonzero(ended)
        at = rows[which], column
        self.open[at] = False
        known, stated = self.known, self.stated[at]
        known["times_finished" if finished else "times_failed"][at] += 1
        known["expected_finishes"][at] += np.where(np.isnan(stated), float(finished), stated)
        self.stated[at] = np.nan

    def _look(self, rows: Index) -> None:
        """Find who may be picked; where there is nobody, wait for somebody or for replies."""
        waiting = rows
        while waiting.size:
            over = (self.n_rounds[waiting] >= self.rounds[waiting]) | (
                self.now[waiting] >= self.end[waiting]
            )
            self.done[waiting[over]] = True
            waiting = waiting[~over]
            self._see_windows(
                waiting, np.broadcast_to(self.now[waiting, None], (waiting.size, self.n))
            )
            mask = self._free(waiting)
            mask &= self.window_start[waiting] <= self.now[waiting, None]
            self.mask[waiting] = mask
            waiting = waiting[~mask.any(axis=1)]
            if waiting.size:
                self._wait(waiting)
        self.mask[rows[self.done[rows]]] = False
        asking = rows[self.asks[rows] & ~self.done[rows]]
        which, column = np.nonzero(self.mask[asking])
        self._tell(asking[which], column, self.now[asking[which]])

    def _see_windows(self, rows: Index, when: Array) -> None:
        """Find the windows of the devices whose last known one is over by an instant; (m, n)."""
        over = self.present[rows] & (self.window_end[rows] <= when)
        which, column = np.nonzero(over)
        at = rows[which], column
        found = self.availability.window_at_or_after(self.devices[at], when[which, column])
        self.window_start[at], self.window_end[at] = found

    def _free(self, rows: Index) -> Mask:
        busy = self.open[rows] | (self.visible_at[rows] > self.now[rows][:, None])
        rested = self._rested(rows) <= self.now[rows][:, None]
        return np.asarray(self.present[rows] & ~busy & rested)

    def _rested(self, rows: Index) -> Array:
        picked = np.nan_to_num(self.known["picked_at"][rows], nan=-np.inf)
        cooldown = self.cooldown_s[rows][:, None]
        return np.where(cooldown > 0, picked + cooldown, -np.inf)

    def _wait(self, rows: Index) -> None:
        """Move the clock to the next merge, or to the first moment when somebody is free."""
        earliest = np.maximum(self.visible_at[rows], self._rested(rows))
        earliest = np.maximum(earliest, self.now[rows][:, None])
        able = self.present[rows] & ~self.open[rows]
        self._see_windows(rows, np.where(able, earliest, -np.inf))
        start = np.where(able, np.maximum(self.window_start[rows], earliest), np.inf)
        somebody, merge = start.min(axis=1), self._next_merge(rows)
        first = np.minimum(somebody, merge)
        # Whoever comes later than the end is not waited for.
        self.now[rows] = np.minimum(first, np.maximum(self.end[rows], self.now[rows]))
        merging = (merge <= somebody) & (merge <= self.now[rows])
        if merging.any():
            self._merge(rows[merging], merge[merging])

    def _tell(self, row: Index, column: Index, now: Array) -> None:
        """Note what devices say of themselves at some instants."""
        if not row.size:
            return
        at = row, column
        p, available, duration = self.forecasts.at(self.devices[at], self.kind[row], now)
        said = np.where(self.lies[at] & ~np.isnan(p), 1.0, p)
        self.known["forecast_p_finish"][at] = np.clip(said, 0.0, 1.0)
        self.known["forecast_p_available"][at] = np.clip(available, 0.0, 1.0)
        self.known["forecast_duration_s"][at] = duration
        self.known["forecast_at"][at] = np.where(np.isnan(p), np.nan, now)

    def _clear(self, rows: Index) -> None:
        for f in fields(Round):
            getattr(self._round, f.name)[rows] = 0.0


def _middle(durations: Array) -> Array:
    """Return the median of each row; NaN comes last and does not count; shape (m,)."""
    ordered, n = np.sort(durations, axis=1), (~np.isnan(durations)).sum(axis=1)
    each = np.arange(n.size)
    return np.asarray(0.5 * (ordered[each, (n - 1) // 2] + ordered[each, n // 2]))
