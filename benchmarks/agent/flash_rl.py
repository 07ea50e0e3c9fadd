"""FLASH-RL: double deep Q-learning of whom to pick, by a reputation; to be compared with.

It learns during the run from its own picks. Rules and constants are those of the code that its
authors released, https://github.com/Sofianebouaziz1/FLASH-RL (commit a74fec53).
"""

from collections import deque
from copy import deepcopy
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from fedstale.strategies.selection import Selector, expected_duration_s, own_duration_s
from fedstale.strategies.types import Candidates, Floats

HIDDEN, STEP, DISCOUNT, BATCH, KEPT, COPY_EVERY = 512, 0.01, 0.9, 50, 1000, 10
"""Units, size of a step, discount, transitions of a step and in memory, rounds between copies."""
FIRST, SHARE, ROUNDS = 0.01, 0.6, 500
"""Reputation of a node without a job, share of its last one, and rounds of falling exploration."""


def network(rng: np.random.Generator) -> nn.Sequential:
    """Return what rates candidates one by one: from features, shape (n, 4), to values, (n,)."""
    made = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    drawn = torch.Generator().manual_seed(int(rng.integers(2**32)))
    for weights, inputs in zip(made.parameters(), (4, 4, HIDDEN, HIDDEN), strict=True):
        nn.init.uniform_(weights, -(inputs**-0.5), inputs**-0.5, drawn)
    return made.append(nn.Flatten(0))


def utilities(losses: Floats, examples: Floats, before: float) -> tuple[Floats, float]:
    """Return the utilities in [0, 1] of a round's replies, shape (n,), and their mean loss.

    Where d is how far a reply is from the mean, in proportion to it, that is exp(-|d|) in a round
    with a lower mean than `before`, and else 1 - exp(-|d|).
    """
    mean = float(np.average(losses, weights=examples))
    near = np.exp(-np.abs(losses - mean) / max(mean, 1e-12))
    return (near if mean < before else 1.0 - near), mean


class FlashRL(Selector):
    """Picks by a network that learns the reputation of its picks, and by chance.

    A pick is random in the first round, then with a chance that falls from 0.9 to 0.2 in 500 more;
    else it is the best by the network. The reward of a job is its node's reputation r, which is
    0.01 at first and becomes

        0.4 r + 0.6 (utility - (duration - least) / (largest - least)).

    Differences from the released code (of the paper, the abstract alone was read):
        There, clients are fixed: the network sees all at once and has an output for each. Here they
        come and go: it rates a candidate by its own features. Those are examples, expected duration
        (for cores, frequency and bandwidth) and loss (for reduced weights, which no selector sees),
        in proportion to their means, and the reputation, which tells nodes apart. Utilities are of
        losses, in place of weights and of accuracy on test data. A job that fails or is cancelled,
        as none is there, has utility 0 and the largest duration. How it ended is seen when its node
        is a candidate again, and learnt from when a round begins. The best of the next candidates
        is found among these: there, it is that of the state before. No state is the last one. Each
        job brings a step of Adam; there, those after the first of a round reach a copy alone.

    Reference:
        Bouaziz et al. FLASH-RL: Federated Learning Addressing System and Static Heterogeneity using
        Reinforcement Learning. ICCD 2023.
    """

    def __init__(self) -> None:
        """Start without any job."""
        self.reputation: dict[int, float] = {}
        """Of each node that has ended a job."""
        self.memory: deque[tuple[Tensor, float, Tensor]] = deque(maxlen=KEPT)
        """Features of a pick, its reward, and features of the next candidates."""
        # Of each pick in flight: its features, and its node's finished jobs before.
        self._in_flight: dict[int, tuple[Tensor, int]] = {}
        # Of each that ended: node, features, loss (NaN if it failed), examples, duration in s.
        self._ended: list[tuple[int, Tensor, float, float, float]] = []
        self._round, self._version = 0, -1
        self._loss, self._least, self._largest = inf, inf, 0.0

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Learn from the jobs that have ended if a round begins, then pick."""
        self._note(candidates)
        if candidates.context.begins_round(self._version):
            self._version = candidates.context.version
            self._begin_round(candidates, rng)
        x = self._features(candidates)
        chance = max(0.9 - 0.7 * (self._round - 2) / ROUNDS, 0.2) if self._round > 1 else 1.0
        best_first = self._main(x).argsort(descending=True, stable=True).tolist()
        picks = rng.random(min(k, len(best_first))) < chance
        chosen = [best_first.pop(rng.integers(len(best_first)) if r else 0) for r in picks]
        for i in chosen:
            self._in_flight[int(candidates.node_ids[i])] = x[i], int(candidates.times_finished[i])
        return [int(node) for node in candidates.node_ids[chosen]]

    def _note(self, candidates: Candidates) -> None:
        """Note how jobs ended, and the range of durations; a node that is free has no job."""
        known = own_duration_s(candidates)
        self._least = float(np.fmin.reduce(known, initial=self._least))
        self._largest = float(np.fmax.reduce(known, initial=self._largest))
        out = np.fromiter(self._in_flight, dtype=np.uint64, count=len(self._in_flight))
        came = candidates.take(np.isin(candidates.node_ids, out))
        for i, node in enumerate(came.node_ids.tolist()):
            x, finished = self._in_flight.pop(node)
            loss = came.loss[i] if came.times_finished[i] > finished else np.nan
            self._ended.append((node, x, loss, came.examples[i], came.duration_s[i]))

    def _begin_round(self, candidates: Candidates, rng: np.random.Generator) -> None:
        """Reward the jobs that have ended, and take a step for each."""
        if not self._round:
            self._main = network(rng)
            self._adam = torch.optim.Adam(self._main.parameters(), lr=STEP)
        if self._round % COPY_EVERY == 0:
            self._target = deepcopy(self._main)
        self._round += 1
        ended, self._ended = self._ended, []
        losses, examples, durations = np.array([job[2:] for job in ended]).reshape(-1, 3).T
        gains, replied = np.full(len(ended), -1.0), np.isfinite(losses)
        if replied.any():
            own, self._loss = utilities(losses[replied], examples[replied], self._loss)
            late = (durations[replied] - self._least) / max(self._largest - self._least, 1e-12)
            gains[replied] = own - late.clip(0.0, 1.0)
        for (node, *_), gain in zip(ended, gains.tolist(), strict=True):
            past = self.reputation.get(node, FIRST)
            self.reputation[node] = (1.0 - SHARE) * past + SHARE * gain
        then = self._features(candidates)
        self.memory += [(x, self.reputation[node], then) for node, x, *_ in ended]
        for _ in ended:
            batch = [self.memory[i] for i in rng.permutation(len(self.memory))[:BATCH]]
            found = self._main(torch.stack([x for x, _, _ in batch]))
            self._adam.zero_grad()
            nn.functional.mse_loss(found, self._targets(batch)).backward()
            self._adam.step()

    @torch.no_grad()
    def _targets(self, batch: list[tuple[Tensor, float, Tensor]]) -> Tensor:
        """Return rewards, and the discounted value by the copy of what is best to pick next."""
        best = torch.stack([then[self._main(then).argmax()] for _, _, then in batch])
        return torch.tensor([r for _, r, _ in batch]) + DISCOUNT * self._target(best)

    def _features(self, candidates: Candidates) -> Tensor:
        """Return features of shape (n, 4); the mean stands for what is unknown."""
        x = np.array([candidates.examples, expected_duration_s(candidates), candidates.loss])
        means = np.nansum(x, axis=1) / np.maximum(np.isfinite(x).sum(axis=1), 1)
        x = np.nan_to_num(x / np.maximum(means[:, None], 1e-12), nan=1.0)
        r = [self.reputation.get(node, FIRST) for node in candidates.node_ids.tolist()]
        return torch.tensor(np.vstack([x, r]).T, dtype=torch.float32)
