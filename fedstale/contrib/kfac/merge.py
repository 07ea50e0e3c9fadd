"""Merge models by the Kronecker-factored curvature of each linear layer, or share inverses of it.

A mean counts all weights of a client alike, and Fisher information each by itself; Kronecker
factors also know which weights of a layer go together. The sum of the clients' Kronecker products
is no such product and has no cheap inverse, so its equations are solved by conjugate gradients.

Reference:
    Martens, Grosse. Optimizing Neural Networks with Kronecker-factored Approximate Curvature.
    ICML 2015.
    Hestenes, Stiefel. Methods of Conjugate Gradients for Solving Linear Systems. 1952.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.errors import ConfigError
from fedstale.flower import record_of
from fedstale.strategies.stages import Compression, Stage
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    Count,
    End,
    Job,
    Model,
    Positive,
    RejectionError,
    require,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy

RECORD = "kfac"
"""Name of the ArrayRecord in a reply that holds the factors."""
ABOUT, INVERSES = f"{RECORD}.about", f"{RECORD}.inverses"
"""Records of a message: whether to `measure` factors; and inverses, as factors are in a reply."""
LARGEST = 1e6
_OTHERS = "Adapters", "Compression", "KroneckerMean", "Privacy", "Relay", "Tickets"
_ROUNDING = 1e-4
"""Share of the largest diagonal element by which float32 may make a factor indefinite."""
_TOLERANCE = 1e-8
"""The residual at which a solution is taken, as a share of the mean's."""

Term = tuple[float, Array, Array, Array]
"""Of a client: its share of the examples, A (in, in), G (out, out), and its change (out, in)."""


class FactorStage(Stage):
    """Keeps factors by layer, with .A and .G, by the messages that replies answer, until a step."""

    saved: ClassVar[tuple[str, ...]] = ("_replies",)

    def __init__(self) -> None:
        self._replies: dict[str, Model] = {}

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Take the factors of a reply, if they fit the layers of its arrays."""
        if job.purpose != "train" or RECORD not in content:
            return
        arrays, record = content.get(self._run.arrays_key), content.pop(RECORD)
        if not isinstance(record, ArrayRecord) or not isinstance(arrays, ArrayRecord):
            raise RejectionError(RECORD, f"{RECORD} is no ArrayRecord beside that of the model")
        reply: Model = {}
        for layer in layers_of(record):
            weight = arrays.get(f"{layer}.weight")
            if weight is None or len(weight.shape) != 2 or "float" not in weight.dtype:
                raise RejectionError(
                    RECORD, f"{RECORD} of {layer[:40]!r}, no linear layer of the model"
                )
            n_out, n_in = weight.shape
            sizes = {"A": n_in + (f"{layer}.bias" in arrays), "G": n_out}
            for name, n in ((f"{layer}.{letter}", n) for letter, n in sizes.items()):
                reply[name] = unpacked(name, record.get(name), n)
        self._replies[job.message_id] = reply

    def ended(self, job: Job, end: End) -> None:
        """Forget the factors of a reply that was rejected for something else, or left out."""
        if end.how != "accepted":
            self._replies.pop(job.message_id, None)


class KroneckerMean(FactorStage):
    """Turns the mean of each linear layer into the solution W of a sum over clients k.

        sum p_k (G_k (W_k - W) A_k + damping (W_k - W)) = 0

    W_k is the client's weight with the bias as its last column, p_k its share of the examples, and
    A_k, G_k what it sends beside its arrays (`kronecker_factors`). Other layers keep their mean. A
    client that sends no factors counts by the damping alone; if none does, it is the mean. Who
    overstates them owns the merge: clients are trusted with it.

    Memory is that of the factors and layers of a buffer, in float64; a step of conjugate gradients
    takes 2 out in (out + in) multiplications a client and layer. The metric `kfac_residual` is the
    largest residual that is left of a layer, as a share of the mean's.

    Args:
        damping: added to each Kronecker product, in the unit of the squared gradient of an
            example; the larger, the closer to the mean.
        steps: of conjugate gradients at most.

    Differences from the paper:
        Damping is added to the product and not divided between its factors, since nothing is
        inverted. Labels are drawn once an example. There are no block-tridiagonal inverses,
        rescaling and momentum: factors merge models and precondition no step.

    Example:
        >>> from fedstale.strategies import FedAvg
        >>> strategy = FedAvg(stages=[KroneckerMean(1e-4)])
    """

    def __init__(self, damping: Positive, *, steps: Count = 200) -> None:
        super().__init__()
        self.damping, self.steps = damping, steps

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError if updates count by anything else, or do not come as arrays."""
        normalise, robust = strategy.normalise, strategy.robust
        require(normalise == "examples", "normalise", normalise, "'examples' with KroneckerMean")
        require(robust is None, "robust", robust, "None with KroneckerMean")
        if any(isinstance(stage, Compression) for stage in strategy.stages):
            raise ConfigError("stages: KroneckerMean and Compression; expected one of them")

    def accepted(self, update: ClientUpdate) -> None:
        """Keep the change of each layer, once its staleness has been weighed."""
        reply = self._replies.get(update.message_id, {})
        for layer in layers_of(reply) if update.weight >= 0 else ():
            reply[f"{layer}.change"] = _joined(update.delta, layer)

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Move the mean of each layer to where curvatures balance."""
        n = sum(update.examples for update in updates)
        replies = [
            (update.examples / n, self._replies.pop(update.message_id))
            for update in updates
            if update.message_id in self._replies
        ]
        left = [0.0]
        for layer in layers_of(name for _, reply in replies for name in reply):
            terms = [
                (share, reply[f"{layer}.A"], reply[f"{layer}.G"], reply[f"{layer}.change"])
                for share, reply in replies
                if f"{layer}.A" in reply
            ]
            found, residual = solved(terms, _joined(mean, layer), self.damping, self.steps)
            left.append(residual)
            n_in = mean[f"{layer}.weight"].shape[1]
            mean[f"{layer}.weight"][...] = found[:, :n_in]
            if found.shape[1] > n_in:
                mean[f"{layer}.bias"][...] = found[:, n_in]
        return {"kfac_residual": max(left)}


class SharedInverses(FactorStage):
    """Sends sites the inverses of the Kronecker factors of all, to precondition their steps by.

    At each `every`-th version sites measure factors on the model that they were sent (their part is
    `exchange_inverses`). A server step merges those of its replies by examples, and inverts them.
    Sites keep inverses, and are sent those that they lack; a layer without any takes plain steps,
    as does a site that has lost them, until the next. Who overstates factors bends all steps: sites
    are trusted with them. The metric `kfac_layers` counts layers with inverses.

    Args:
        damping: lambda, in the unit of the squared gradient of an example; see `damped`.
        every: versions from one measurement to the next.

    Differences from the papers:
        Sites take steps by themselves, and models are merged, not gradients and factors of each
        step. The server inverts all layers, not each worker some. The damping is constant.

    Reference:
        Osawa et al. Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored
        Approximate Curvature for Deep Convolutional Neural Networks. CVPR 2019.

    Example:
        >>> from fedstale.strategies import FedAvg
        >>> strategy = FedAvg(10, stages=[SharedInverses(0.01)])
    """

    requires = frozenset({"start", "same settings"})
    saved = ("_replies", "_inverses", "_held", "_number")

    def __init__(self, damping: Positive, *, every: Count = 5) -> None:
        super().__init__()
        self.damping, self.every = damping, every
        self._inverses: dict[str, tuple[int, Model]] = {}
        """Of each layer the number of its inverses, which counts up over all, and these."""
        self._held: dict[int, int] = {}
        """The number of the last inverses that each site has."""
        self._number = 0

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError beside what sends other arrays, or does not trust sites."""
        require(strategy.robust is None, "robust", strategy.robust, f"None with {self.name}")
        others = [stage.name for stage in strategy.stages if stage.name in _OTHERS]
        require(not others, "stages", others, f"none of {', '.join(_OTHERS)} with {self.name}")

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Send a site that trains the inverses that it lacks, and ask it for factors."""
        if job.purpose != "train":
            return content
        held, made = self._held.get(job.node_id, 0), RecordDict(dict(content))
        lacks = [pair for number, pair in self._inverses.values() if number > held]
        made[INVERSES] = record_of({name: x for pair in lacks for name, x in pair.items()})
        made[ABOUT] = ConfigRecord({"measure": self._measures(job)})
        job.notes[self.name] = self._number
        return made

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Take the factors that a site was asked for; it has kept what it was sent."""
        self._held[job.node_id] = job.notes.get(self.name, 0)
        if RECORD in content and not self._measures(job):
            raise RejectionError(RECORD, "factors that this site was not asked for")
        super().incoming(job, content)

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Merge factors, and invert them."""
        some = [(u.examples, self._replies.pop(u.message_id, {})) for u in updates]
        for layer in layers_of(name for _, reply in some for name in reply):
            own = [(n, reply) for n, reply in some if f"{layer}.A" in reply]
            n_all, names = sum(n for n, _ in own), (f"{layer}.A", f"{layer}.G")
            means = {k: sum(n / n_all * reply[k] for n, reply in own) for k in names}
            self._merged(layer, means)
        return {"kfac_layers": float(len(self._inverses))}

    def _measures(self, job: Job) -> bool:
        return job.purpose == "train" and job.base_version % self.every == 0

    def _merged(self, layer: str, factors: Mapping[str, Any]) -> None:
        """Take the factors of a layer that are merged."""
        self._take(layer, inverses(damped(factors, self.damping)))

    def _take(self, layer: str, pair: Model) -> None:
        if pair:
            self._number += 1
            self._inverses[layer] = self._number, pair


def solved(terms: Sequence[Term], mean: Array, damping: float, steps: int) -> tuple[Array, float]:
    """Solve for a layer, from the mean on, by conjugate gradients preconditioned by the diagonal.

    Args:
        terms: of the clients that sent factors; shares of all clients sum to 1.
        mean: of all clients, (out, in), which makes the damping's part of the residual 0.
        damping: > 0.
        steps: at most.

    Returns:
        The layer, and the norm of the residual that is left as a share of the mean's.
    """
    found = mean.copy()
    # From differences: clients that are equal leave exactly nothing to do.
    residual = sum(p * (g @ (change - mean) @ a) for p, a, g, change in terms)
    scales = damping + sum(p * np.outer(g.diagonal(), a.diagonal()) for p, a, g, _ in terms)
    first = float(np.linalg.norm(residual))
    towards, before = np.zeros_like(found), 1.0
    for _ in range(steps):
        if np.linalg.norm(residual) <= _TOLERANCE * first:
            break
        scaled = residual / scales
        now = float((residual * scaled).sum())
        towards = scaled + now / before * towards
        curved = damping * towards + sum(p * (g @ towards @ a) for p, a, g, _ in terms)
        bend = float((towards * curved).sum())
        if not bend > 0:  # factors are indefinite by more than the damping, by rounding
            break
        length = now / bend
        found += length * towards
        residual, before = residual - length * curved, now
    return found, float(np.linalg.norm(residual)) / first if first else 0.0


def damped(factors: Mapping[str, Array], damping: float) -> Model:
    """Return A + pi sqrt(damping) I and G + sqrt(damping) / pi I of a layer, by the same names.

    pi^2 is the mean of A's diagonal over that of G's (Martens and Grosse, section 6.3).
    """
    a, g = (float(x.diagonal().mean()) for x in factors.values())
    pi = (a / g) ** 0.5 if min(a, g) > 0.0 else 1.0
    shares = zip(factors.items(), (pi, 1.0 / pi), strict=True)
    return {name: x + times * damping**0.5 * np.eye(len(x)) for (name, x), times in shares}


def inverses(some: Mapping[str, Array]) -> Model:
    """Return the triangles of inverses; none unless all are positive and at most `LARGEST`."""
    found: Model = {}
    for name, x in some.items():
        with suppress(np.linalg.LinAlgError):
            root = np.linalg.inv(np.linalg.cholesky(x))
            found[name] = (root.T @ root)[np.triu_indices(len(x))].astype(np.float32)
    is_whole = len(found) == len(some) and all(np.abs(x).max() <= LARGEST for x in found.values())
    return found if is_whole else {}


def unpacked(name: str, stored: FlowerArray | None, n: int) -> Array:
    """Return a factor of n rows of its upper triangle, or raise RejectionError.

    It must be positive semidefinite: others are no curvature, and have no least.
    """
    factor = symmetric(name, stored, n)
    try:
        least = _ROUNDING * factor.diagonal().max() + 1e-30
        np.linalg.cholesky(factor + least * np.eye(n))
    except np.linalg.LinAlgError as problem:
        raise RejectionError(
            RECORD, f"{RECORD}[{name[:40]!r}] is not positive semidefinite"
        ) from problem
    return factor


def symmetric(name: str, stored: FlowerArray | None, n: int) -> Array:
    """Return a matrix of n rows of its upper triangle, or raise RejectionError."""
    try:
        half = np.zeros(0) if stored is None else stored.numpy()
    except Exception as problem:
        raise RejectionError(RECORD, f"{RECORD}[{name[:40]!r}] cannot be read") from problem
    if half.shape != (n * (n + 1) // 2,) or half.dtype.kind != "f":
        raise RejectionError(
            RECORD, f"{RECORD}[{name[:40]!r}] is not the triangle of {n} rows of floats"
        )
    if not (np.abs(half) <= LARGEST).all():
        raise RejectionError(RECORD, f"{RECORD}[{name[:40]!r}] is not within {LARGEST:g}")
    made = np.zeros((n, n))
    made[np.triu_indices(n)] = half
    return np.triu(made, 1).T + made


def layers_of(names: Iterable[str]) -> list[str]:
    """Return the layers that names of factors and changes are of."""
    return sorted({name.rpartition(".")[0] for name in names})


def _joined(model: Model, layer: str) -> Array:
    """Return a layer in float64, with the bias as its last column."""
    parts = [model[f"{layer}.weight"]]
    if f"{layer}.bias" in model:
        parts.append(model[f"{layer}.bias"][:, None])
    return np.hstack(parts).astype(np.float64)
