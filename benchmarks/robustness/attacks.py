"""What adversarial devices do to a model under each rule, with and without stale updates.

Twenty-five devices train a small network on digits; three of them are adversarial. Every reply is a
real message that passes validation, and every buffer of fifteen updates is reduced by the real
rule. In the setting "late", devices take exponential times, half of them three times as long, so
that updates come several versions stale and are weighed by 1/sqrt(1 + tau). The adversaries know
all honest updates of a buffer. Each cell is the accuracy on the test digits, averaged over the last
five of the steps. With --format replies go in a format, with error feedback, as CompressionMod
sends them; adversaries quantise what they made up.

Run it with: python benchmarks/robustness/attacks.py [--quick] [--format int4]
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from fedstale.errors import ProtocolError
from fedstale.strategies import StaleStrategy, Validation
from fedstale.strategies.messages.codec import FORMATS
from fedstale.strategies.messages.records import quantised
from fedstale.strategies.robust import (
    CTMA,
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)
from fedstale.strategies.selection import ExpectedUtility
from fedstale.strategies.server.buffer import Buffer
from fedstale.strategies.server.checks import Checks
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.types import Array, FormatName, History, Job, Model
from fedstale.strategies.weighting import ByAge, polynomial

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

N_DEVICES, N_BAD, MERGE_SIZE, N_MERGES = 25, 3, 15, 15
EXAMPLES, CONCENTRATION, HIDDEN = 56, 1.0, 24
EPOCHS, BATCH, RATE = 3, 8, 0.1
SEEDS = (1, 2, 3)
MODEL = "model"
LAST = 5
"""Merges at the end over which accuracy is averaged."""

CAPPED = Validation(examples_cap=1.5)
"""As docs/validation.md recommends where devices are not trusted."""
OF_RULES = Validation(examples_cap=1.5, norm_bound=None)
"""What a strategy makes of it where it has a robust rule."""
UNCAPPED = "mean, examples uncapped"
RULES: dict[str, tuple[Rule | None, Validation]] = {
    UNCAPPED: (None, Validation()),
    "mean": (None, CAPPED),
    "mean, norms clipped": (None, Validation(examples_cap=1.5, norm_cap=1.5)),
    "median": (Median(f=N_BAD), OF_RULES),
    "trimmed mean": (TrimmedMean(f=N_BAD), OF_RULES),
    "geometric median": (GeometricMedian(f=N_BAD), OF_RULES),
    "Krum": (Krum(f=N_BAD), OF_RULES),
    "Multi-Krum": (MultiKrum(f=N_BAD), OF_RULES),
    "Bulyan": (Bulyan(f=N_BAD), OF_RULES),
    "centred clipping": (CentredClipping(f=N_BAD), OF_RULES),
    "CTMA": (CTMA(f=N_BAD), OF_RULES),
}

Attack = Callable[[Array, Array], Array]
"""Takes the device's own honest update and the honest updates of the merge, (n, d)."""

ATTACKS: dict[str, Attack | None] = {
    "none": None,
    # Five times the opposite of what the device learnt.
    "sign flip": lambda own, _: -5.0 * own,
    # A little is enough: Baruch, Baruch, Goldberg, NeurIPS 2019; 1.5 deviations from the mean.
    "ALIE": lambda _, honest: honest.mean(0) - 1.5 * honest.std(0),
    # Inner product manipulation: Xie, Koyejo, Gupta, UAI 2019.
    "IPM": lambda _, honest: -2.0 * honest.mean(0),
    # Learnt from labels y -> 9 - y; made in training, not here.
    "label flip": lambda own, _: own,
    "NaN": lambda own, _: np.full_like(own, np.nan),
    "huge": lambda own, _: np.full_like(own, 1e6),
    # The claim of 1e9 examples is made with the reply; honest devices claim what they have.
    "lying examples": lambda own, _: -5.0 * own,
    # The forecast is always sure to finish; the honest ones finish, and say, 0.6.
    "lying forecasts": lambda own, _: -5.0 * own,
}
BY_EXAMPLES = ("lying examples",)
BY_FORECASTS = ("lying forecasts",)


class Digits:
    """Training data of every device, skewed by label, and the test digits."""

    def __init__(self, seed: int) -> None:
        """Deal the digits; a device draws its classes from a Dirichlet distribution."""
        rng = np.random.default_rng((seed, 0))
        images, labels = load_digits(return_X_y=True)
        images = (images / 16.0).astype(np.float32)
        order = rng.permutation(len(labels))
        test, train = order[:360], order[360:]
        self.test = images[test], labels[test]
        pools = [train[labels[train] == digit] for digit in range(10)]
        self.x = np.empty((N_DEVICES, EXAMPLES, 64), np.float32)
        self.y = np.empty((N_DEVICES, EXAMPLES), np.int64)
        for device in range(N_DEVICES):
            shares = rng.dirichlet(np.full(10, CONCENTRATION))
            digits = rng.choice(10, EXAMPLES, p=shares)
            chosen = [rng.choice(pools[digit]) for digit in digits]
            self.x[device], self.y[device] = images[chosen], labels[chosen]

    def accuracy(self, flat: Array) -> float:
        """Return the share of test digits that a model names rightly."""
        images, labels = self.test
        model = {name: x[0] for name, x in layers(flat[None]).items()}
        hidden = np.maximum(images @ model["w1"] + model["b1"], 0.0)
        return float((np.argmax(hidden @ model["w2"] + model["b2"], 1) == labels).mean())


SHAPES = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
N_PARAMETERS = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10


def initial(seed: int) -> Array:
    """Return a new network as one array: most of the time goes into making messages."""
    rng = np.random.default_rng((seed, 1))
    flat = np.zeros(N_PARAMETERS, np.float32)
    parts = layers(flat[None])
    for name in ("w1", "w2"):
        n_inputs = parts[name].shape[1]
        parts[name][:] = rng.normal(0.0, np.sqrt(1.5 / n_inputs), parts[name].shape)
    return flat


def layers(flat: Array) -> Model:
    """Return views of the layers of several networks, from an array of shape (n, parameters)."""
    found, at = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        found[name] = flat[:, at : at + size].reshape(len(flat), *shape)
        at += size
    return found


def train(models: Model, x: Array, y: Array, rng: np.random.Generator) -> None:
    """Train several networks side by side with SGD, in place; arrays start with their axis."""
    rows = np.arange(len(x))[:, None]
    for _ in range(EPOCHS):
        order = rng.permuted(np.tile(np.arange(EXAMPLES), (len(x), 1)), axis=1)
        for start in range(0, EXAMPLES, BATCH):
            batch = order[:, start : start + BATCH]
            images, labels = x[rows, batch], y[rows, batch]
            hidden = np.maximum(images @ models["w1"] + models["b1"][:, None], 0.0)
            scores = hidden @ models["w2"] + models["b2"][:, None]
            scores -= scores.max(2, keepdims=True)
            p = np.exp(scores)
            p /= p.sum(2, keepdims=True)
            np.put_along_axis(
                p, labels[..., None], np.take_along_axis(p, labels[..., None], 2) - 1, 2
            )
            p *= np.float32(RATE / BATCH)
            back = (p @ models["w2"].transpose(0, 2, 1)) * (hidden > 0)
            models["w2"] -= hidden.transpose(0, 2, 1) @ p
            models["b2"] -= p.sum(1)
            models["w1"] -= images.transpose(0, 2, 1) @ back
            models["b1"] -= back.sum(1)


@dataclass
class Federation:
    """One run: who is out with which version, and what becomes of their replies."""

    seed: int
    attack: str
    rule: Rule | None
    validation: Validation
    late: bool
    form: FormatName | None = None
    """Format of replies; None for in full."""
    accuracies: list[float] = field(default_factory=list)
    bad_share: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.digits = np.random.default_rng((self.seed, 2)), Digits(self.seed)
        if self.attack == "label flip":
            self.digits.y[:N_BAD] = 9 - self.digits.y[:N_BAD]
        self.versions = Versions(Snapshot({MODEL: initial(self.seed)}, {}, (MODEL,)))
        self.checks, self.history = Checks(self.validation), History()
        self.now, self.rejected, self.discarded = 0.0, 0, 0
        slow = np.where(np.arange(N_DEVICES) % 2 == 1, 3.0, 1.0)
        self.slowness = slow if self.late else np.ones(N_DEVICES)
        strategy = StaleStrategy(
            weighting=ByAge(polynomial(0.5)),
            normalise="examples" if self.attack in BY_EXAMPLES else "buffer_size",
            robust=self.rule,
        )
        parts = strategy.weighting, strategy.server_optimizer
        self.buffer = Buffer(strategy, *parts, versions=self.versions, checks=self.checks)
        self.left = np.zeros((N_DEVICES, N_PARAMETERS), np.float32)
        # Device -> (instant of its reply, version it has).
        self.out = {k: self._send(k) for k in range(N_DEVICES)} if self.late else {}

    def _send(self, device: int) -> tuple[float, int]:
        ends = self.now + self.slowness[device] * self.rng.exponential()
        self.versions.hold(self.versions.version)
        return ends, self.versions.version

    def run(self, n_merges: int) -> None:
        """Step some times."""
        for _ in range(n_merges):
            chosen = self._arrivals()
            self._step(chosen)
            for device in chosen if self.late else ():
                base_version = self.out[device][1]
                self.out[device] = self._send(device)
                self.versions.release(base_version)
            self.accuracies.append(self.digits.accuracy(self.versions.current.floats[MODEL]))

    def _arrivals(self) -> list[int]:
        """Return the devices of the next step in the order of their replies."""
        if self.attack in BY_FORECASTS:
            now = float(self.versions.version)
            for device in range(N_DEVICES):
                says = 1.0 if device < N_BAD else 0.6
                self.history.forecast(device, {"p_finish": says}, now)
            everybody = self.history.candidates(list(range(N_DEVICES)))
            chosen = ExpectedUtility().select(everybody, MERGE_SIZE + 5, now, self.rng)
            ended = []
            for device in (int(k) for k in chosen):
                self.history.picked(device, now)
                # The liars finish as often as the others; they only never say so.
                if self.rng.random() < 0.6 and len(ended) < MERGE_SIZE:
                    ended.append(device)
                else:
                    self.history.failed(device)
            return ended
        if not self.late:
            return [int(k) for k in self.rng.choice(N_DEVICES, MERGE_SIZE, replace=False)]
        chosen = sorted(self.out, key=lambda device: self.out[device][0])[:MERGE_SIZE]
        self.now = max(self.now, self.out[chosen[-1]][0])
        return chosen

    def _step(self, chosen: list[int]) -> None:
        bases = [self.out[k][1] if self.late else self.versions.version for k in chosen]
        rows = self._trained(chosen, [self.versions[base] for base in bases])
        bad = [i for i, device in enumerate(chosen) if device < N_BAD]
        honest = np.delete(rows, bad, axis=0)
        attack = ATTACKS[self.attack]
        for i in bad if attack is not None else ():
            rows[i] = attack(rows[i], honest).astype(np.float32)
        self.bad_share.append(len(bad) / len(chosen) if chosen else 0.0)
        for i, device in enumerate(chosen):
            self._receive(device, bases[i], rows[i])
        if self.buffer.updates:
            try:
                self.versions.advance(self.buffer.step())
            except ProtocolError:
                # Such as too few replies for the rule: the model stays as it is.
                self.discarded += 1
        self.buffer.open()

    def _trained(self, chosen: list[int], bases: list[Snapshot]) -> Array:
        before = np.stack([base.floats[MODEL] for base in bases])
        after = before.copy()
        train(layers(after), self.digits.x[chosen], self.digits.y[chosen], self.rng)
        return after - before

    def _receive(self, device: int, base_version: int, row: Array) -> None:
        reply = self._reply(device, row)
        job = Job(
            device,
            "train",
            base_version,
            message_id=reply.metadata.reply_to_message_id,
            sent_at=self.now,
            up=self.form,
        )
        try:
            update = self.checks.open(reply, job, self.versions)
        except ProtocolError as problem:
            self.checks.reject(device, problem, self.now)
            self.rejected += 1
            return
        self.history.finished(
            device,
            duration_s=1.0,
            examples=update.examples,
            loss=1.0,
            square_loss=1.0,
            staleness=update.staleness,
            version=self.versions.version,
        )
        self.buffer.add(update)

    def _reply(self, device: int, row: Array) -> Message:
        lies = self.attack in BY_EXAMPLES and device < N_BAD
        array = FlowerArray(row)
        if self.form is not None:
            # What an adversary leaves out may be infinite: it begins anew.
            left = np.nan_to_num(self.left[device], posinf=0.0, neginf=0.0)
            array = quantised(row, self.form, left=left)
            self.left[device] = left
        body = RecordDict(
            {
                "arrays": ArrayRecord({MODEL: array}),
                "metrics": MetricRecord({"num-examples": 10**9 if lies else EXAMPLES}),
                "fedstale": ConfigRecord({"fedstale.update": "delta"}),
            }
        )
        sent = Message(RecordDict(), dst_node_id=device, message_type="train")
        return Message(body, reply_to=sent)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, few merges")
    parser.add_argument("--format", choices=FORMATS, help="of replies; in full if not set")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds, 1 to 3")
    options = parser.parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS[: options.seeds]
    n_merges = 8 if options.quick else N_MERGES
    logging.disable(logging.CRITICAL)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    command = "python benchmarks/robustness/attacks.py"
    command += f" --seeds {options.seeds}" if options.seeds != len(SEEDS) else ""
    command += f" --format {options.format}" if options.format else ""
    name = f"attacks_{options.format}" if options.format else "attacks"
    rows: list[dict[str, object]] = []
    with threadpool_limits(1):
        for late in (False, True):
            for attack in ATTACKS:
                if late and attack in BY_FORECASTS:
                    continue  # there every device is always out, and nothing is chosen
                rows += [
                    _row(attack, rule, late, seeds, n_merges, options.format)
                    for rule in RULES
                    # The cap on examples is idle where merges divide by their size.
                    if rule != UNCAPPED or attack in BY_EXAMPLES
                ]
            write_result(name, rows, command=command, quick=options.quick)


def _row(  # noqa: PLR0917 - what identifies a cell
    attack: str,
    name: str,
    late: bool,
    seeds: tuple[int, ...],
    n_merges: int,
    form: FormatName | None,
) -> dict[str, object]:
    started, (rule, gate) = time.perf_counter(), RULES[name]
    runs = [Federation(seed, attack, rule, gate, late, form) for seed in seeds]
    with np.errstate(over="ignore", invalid="ignore"):
        for run in runs:
            run.run(n_merges)
    finals = [float(np.mean(run.accuracies[-min(LAST, n_merges) :])) for run in runs]
    row = {
        "setting": "late" if late else "on time",
        "attack": attack,
        "rule": name,
        "accuracy": round(float(np.mean(finals)), 4),
        "accuracy_by_seed": [round(x, 4) for x in finals],
        "merges_dropped": sum(run.discarded for run in runs),
        "replies_refused": sum(run.rejected for run in runs),
        "most_adversarial_in_a_merge": max(ceil(max(r.bad_share) * MERGE_SIZE) for r in runs),
    }
    seconds = time.perf_counter() - started
    print(
        f"{row['setting']:8s} {attack:16s} {name:24s} {row['accuracy']:.3f}  "
        f"dropped {row['merges_dropped']}  refused {row['replies_refused']}  ({seconds:.1f} s)",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
