"""`Pools`: sites with different networks merge inside pools, which teach each other by predictions.

Reference:
    Anil, Pereyra, Passos, Ormandi, Dahl, Hinton. Large Scale Distributed Neural Network Training
    through Online Distillation. ICLR 2018.
    Sodhani, Delalleau, Assran, Sinha, Ballas, Rabbat. A Closer Look at Codistillation for
    Distributed Training. 2020.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.contrib.sites import Adapters
from fedstale.errors import ConfigError
from fedstale.strategies import Compression, Privacy, Stage, StaleStrategy
from fedstale.strategies.server import UPDATE_KEY, is_delta
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.stages import StageRun
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    End,
    Job,
    Model,
    RejectionError,
    is_count,
    require,
    scale,
)
from fedstale.strategies.weighting import ByAge

logger = logging.getLogger(__name__)

PUBLIC = "public.digest"
"""Key of what says which public inputs were predicted, beside the versions of pools."""
Predict = Callable[[str, ArrayRecord, Array], Array]


def digest(public: Array) -> str:
    """Return what inputs of the same shape, order and bytes have in common."""
    return hashlib.sha256(f"{public.dtype} {public.shape}".encode() + public.tobytes()).hexdigest()


def of_pool(arrays: ArrayRecord, pool: str) -> ArrayRecord:
    """Return the arrays of a pool, "POOL.NAME" in the model, under the names of its network."""
    found = {name.partition("."): array for name, array in arrays.items()}
    return ArrayRecord({name: array for (of, _, name), array in found.items() if of == pool})


def with_prefix(arrays: ArrayRecord, pool: str) -> dict[str, FlowerArray]:
    """Return the arrays of a network under the names that they have in the model."""
    return {f"{pool}.{name}": array for name, array in arrays.items()}


class Pools(Stage):
    """Keeps the networks of several pools in one model, "POOL.NAME" each, and merges by pool.

    A site tells its pool by the arrays of its first reply, and stays in it: until one is accepted
    it is sent those of all pools, and then its own, with what the other pools predict of the public
    inputs. These predictions are made of the version that a message is sent of, `every` versions
    after the last ones, and stay in between: messages say of which version they are.

    Replies are changes. A step of a pool is the mean of what that pool sent. Versions, and so
    staleness, count the steps of all.

    Args:
        public: inputs that server and sites have; the first axis is the inputs.
        predict: returns the probabilities of the classes, shape (inputs, classes), by pool, its
            arrays and the inputs.
        every: versions, >= 1; 0 exchanges nothing. Of a network that no site has trained nothing
            is sent.
    """

    requires = frozenset({"start", "same settings"})
    saved = ("_pools", "_predictions", "_made", "_like")

    def __init__(self, public: Array, predict: Predict, *, every: int) -> None:
        accepted = "an integer >= 0 (0 exchanges nothing)"
        require(is_count(every, 0), "Pools.every", every, accepted)
        self.every, self._public, self._predict = every, public, predict
        self._digest = digest(public)
        self._pools: dict[int, str] = {}
        """Of the nodes that an update was accepted from."""
        self._predictions: dict[str, tuple[int, Array]] = {}
        """By pool: the version of its arrays, and what they predict."""
        self._made = 0
        """Version at which predictions were made last."""
        self._like: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of each array of the model; empty until one was sent."""

    def check(self, strategy: StaleStrategy) -> None:
        """Raise ConfigError beside what would move arrays of other pools."""
        by, robust, weighting = strategy.normalise, strategy.robust, strategy.weighting
        accepted = "'examples' or 'buffer_size' with Pools"
        require(by in ("examples", "buffer_size"), "normalise", by, accepted)
        require(robust is None, "robust", robust, "None with Pools")
        require(isinstance(weighting, ByAge), "weighting", weighting, "ByAge(...) with Pools")
        optimizer = strategy.server_optimizer
        accepted = "SGD(...) with Pools: others go on without an update"
        require(isinstance(optimizer, SGD), "server_optimizer", optimizer, accepted)
        require(strategy.update == "delta", "update", strategy.update, "'delta' with Pools")
        for other in strategy.stages:
            accepted = "no stage beside Pools that changes arrays"
            is_other = isinstance(other, Adapters | Compression | Privacy)
            require(not is_other, "stages", other, accepted)
        self._by_examples = by == "examples"

    def begin(self, run: StageRun, state: Mapping[str, object] | None) -> None:
        """Prepare for a run."""
        super().begin(run, state)
        self._key = run.arrays_key

    # Out.

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Send the arrays of the node's pool, and to train what others predict."""
        if job.purpose == "query":
            return content
        arrays = content.array_records[self._key]
        if not self._like:
            self._start(arrays)
        if self.every and job.purpose == "train" and job.base_version >= self._made + self.every:
            self._exchange(arrays, job.base_version)
        pool = self._pools.get(job.node_id)
        if pool is None:
            return content

        own = ArrayRecord(with_prefix(of_pool(arrays, pool), pool))
        made = RecordDict({**content, self._key: own})
        others = {k: each for k, each in self._predictions.items() if k != pool and each[0]}
        if job.purpose == "train" and others:
            predictions = {name: FlowerArray(x) for name, (_, x) in others.items()}
            versions = {name: version for name, (version, _) in others.items()}
            made["predictions"] = ArrayRecord(predictions)
            made["predicted"] = ConfigRecord({**versions, PUBLIC: self._digest})
        return made

    def _start(self, arrays: ArrayRecord) -> None:
        """Take note of the first model, whose pools must predict what can be compared.

        Raises:
            ConfigError: they do not, or an array is of no pool or of integers.
        """
        for name, array in arrays.items():
            if "." not in name or np.dtype(array.dtype).kind != "f":
                raise ConfigError(
                    f"initial_arrays[{name!r}] has dtype {array.dtype}: expected floating-point "
                    "arrays named POOL.NAME, since counters are merged over all pools"
                )
            self._like[name] = tuple(array.shape), array.dtype
        if self.every:
            self._exchange(arrays, 0)

    def _exchange(self, arrays: ArrayRecord, version: int) -> None:
        """Let each pool predict that was trained; where one no longer can, its last ones stay.

        Raises:
            ConfigError: it cannot from the first.
        """
        self._made, trained = version, set(self._pools.values())
        for pool in dict.fromkeys(name.partition(".")[0] for name in self._like):
            if version and pool not in trained:
                continue
            try:
                self._predictions[pool] = version, self._predicted(pool, of_pool(arrays, pool))
            except ConfigError as problem:
                if pool not in self._predictions:
                    raise
                last = self._predictions[pool][0]
                logger.warning("%s; its predictions of version %d stay", problem, last)

    def _predicted(self, pool: str, arrays: ArrayRecord) -> Array:
        try:
            found = np.asarray(self._predict(pool, arrays, self._public), dtype=np.float32)
        except Exception as problem:  # of a user's network
            raise ConfigError(
                f"pool {pool!r} cannot predict public inputs of shape {self._public.shape}: "
                f"{problem}; expected inputs that the networks of all pools take"
            ) from problem
        shapes = {name: each.shape for name, (_, each) in self._predictions.items()}
        shape = next(iter(shapes.values()), found.shape)
        if found.ndim != 2 or len(found) != len(self._public) or found.shape != shape:
            raise ConfigError(
                f"pool {pool!r} predicts an array of shape {found.shape} of {len(self._public)} "
                f"public inputs, and others {shapes}: expected (inputs, classes), with the same "
                "classes in all pools"
            )
        if not ((found >= 0).all() and np.allclose(found.sum(axis=1), 1, atol=1e-3)):
            raise ConfigError(
                f"pool {pool!r} predicts no probabilities: expected numbers >= 0 that sum to 1 for "
                "each public input, as a softmax gives while weights are sound"
            )
        return found

    # In.

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Complete a reply by zeros: it changes nothing in the other pools.

        Raises:
            RejectionError: it does not hold the changes of one pool, which is the node's.
        """
        if job.purpose != "train":
            return
        record = content.get(self._key)
        if not isinstance(record, ArrayRecord):
            # Validation takes an only ArrayRecord of any name, which might be of all pools.
            raise RejectionError("pool", f"no ArrayRecord {self._key!r}: expected that of one pool")
        theirs = next(iter(record), "").partition(".")[0]
        pool = self._pools.get(job.node_id, theirs)
        wanted = {name for name in self._like if name.partition(".")[0] == pool}
        if not wanted or set(record) != wanted:
            names = [name[:40] for name in sorted(set(record) ^ wanted)[:3]]
            raise RejectionError(
                "pool",
                f"arrays {names} are missing or unknown in the node's pool {pool[:40]!r}: expected "
                "all arrays of one pool, the same in every reply",
            )
        if not is_delta(content):
            raise RejectionError(
                "format", f"the reply holds whole arrays: expected changes, {UPDATE_KEY} = 'delta'"
            )
        job.notes[self.name] = pool
        others = {k: np.zeros(*like) for k, like in self._like.items() if k not in wanted}
        zeros = {name: FlowerArray(x) for name, x in others.items()}
        content[self._key] = ArrayRecord({**record, **zeros})

    def ended(self, job: Job, end: End) -> None:
        """Keep the pool of a node whose update is merged."""
        if end.how == "accepted" and self.name in job.notes:
            self._pools[job.node_id] = job.notes[self.name]

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Divide the changes of each pool by what that pool sent, not by what all sent."""
        sent: dict[str, float] = {}
        for update in updates:
            pool, n = self._pools[update.node_id], update.examples if self._by_examples else 1.0
            sent[pool] = sent.get(pool, 0.0) + n
        for name, array in mean.items():
            if own := sent.get(name.partition(".")[0]):
                scale({name: array}, sum(sent.values()) / own)
        return {}
