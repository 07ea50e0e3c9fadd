"""Low-rank adapters of any ranks, merged as products: the server's model holds B A of each layer.

Devices train the factors B and A of an adapter (LoRA) on a frozen base, with the rank that their
memory has room for. Factors of different ranks have no mean, and the product of two means is not
the mean of products. So a stage makes factors of the server's products on their way out, and of a
reply the change that it is of them: whatever weighs, steps, clips or keeps updates needs to know
nothing of ranks.

A pair is two arrays whose names differ in `lora_A` and `lora_B` alone, or in `lora_embedding_A` and
`lora_embedding_B`, as in peft; its product has the name with `lora_BA`.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.errors import ConfigError
from fedstale.flower import record_of
from fedstale.strategies.server import UPDATE_KEY, is_delta, read, records_in
from fedstale.strategies.stages import Compression, SharedContent, Stage, StageRun
from fedstale.strategies.types import (
    Array,
    Count,
    End,
    Job,
    Model,
    RejectionError,
    at_least_single,
    is_count,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy

_PART = re.compile(r"\b(lora_(?:embedding_)?)(BA|A|B)\b")
_LARGE = 512
"""Rows and columns from which on only the leading vectors of a product are computed."""
_BESIDES = 8
"""Vectors beyond those that are wanted; with them the iteration converges faster."""
_PASSES = 100
_COUNTS = np.dtype(np.int64), np.dtype(np.float64)


class Adapters(Stage):
    """Sends factors of the server's products, and merges replies of any ranks exactly.

    A message holds the best approximation of rank `rank` of each product of the current version: A
    has orthonormal rows, that of the largest singular value first, and B = U S. So the first r rows
    of A and columns of B are the best approximation of rank r (`at_rank`). Where a
    product has a lower rank, the columns of B are 0 and the rows of A random and orthonormal, since
    A = B = 0 has no gradient.

    A reply holds factors B' and A' of any rank r, by their shapes; layers may differ. Its update is
    B' A' - B A, with the first r components of what was sent to it: what a device of low rank does
    not see stays as it is. With r > `rank` all of B A is subtracted.

    Arrays that are no pair travel as they are. Messages to evaluate hold factors, too. What `start`
    takes and returns, and `evaluate_fn` is given, are products.

    B A must mean the same function at every rank: let `lora_alpha` / r be equal on all devices.

    The server holds adapted layers in full. One of 4096 x 4096 in float32 takes 64 MB and, with
    rank 8 on one core, 0.7 s a version and 0.2 s a reply.

    Args:
        rank: of the factors that are sent, >= 1; a layer with fewer rows or columns has as many.

    Reference:
        Bai, Chen, Qian, Yao, Li. Federated Fine-tuning of Large Language Models under Heterogeneous
        Tasks and Client Resources. NeurIPS 2024 (FlexLoRA).

    Differences from the paper:
        It makes the mean of the devices' products the model, so that what a device of low rank does
        not see shrinks. Here the mean is one of changes, which may be stale.

    Example:
        >>> adapters = Adapters(2)
        >>> pair = {"q.lora_A.weight": np.ones((1, 3)), "q.lora_B.weight": np.ones((4, 1))}
        >>> model = adapters.products(ArrayRecord({k: FlowerArray(x) for k, x in pair.items()}))
        >>> {name: array.shape for name, array in model.items()}
        {'q.lora_BA.weight': (4, 3)}
        >>> {name: array.shape for name, array in adapters.factors(model).items()}
        {'q.lora_A.weight': (2, 3), 'q.lora_B.weight': (4, 2)}
    """

    requires = frozenset({"start", "same settings"})
    saved = ("_sent", "_out")

    def __init__(self, rank: Count) -> None:
        self.rank = rank
        self._sent: dict[int, Model] = {}
        """Arrays as they were sent, of the last version and of those with jobs in flight."""
        self._out: dict[int, int] = {}
        """Training jobs in flight, by version."""
        self._last = -1, ArrayRecord()
        """The last version and its message's arrays."""
        self._seed, self._casts, self._shared = 0, False, SharedContent()

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError beside `Compression`; note which dtypes of replies are accepted."""
        if any(isinstance(stage, Compression) for stage in strategy.stages):
            raise ConfigError(
                "strategy.stages: Adapters and Compression, whose formats are of the server's own "
                "arrays; expected one of them"
            )
        self._casts = strategy.validation.dtypes == "cast"

    def begin(self, run: StageRun, state: Mapping[str, object] | None) -> None:
        """Prepare for a run."""
        super().begin(run, state)
        self._seed, self._key = run.seed, run.arrays_key

    # Between what devices hold and what the server holds.

    @staticmethod
    def products(arrays: ArrayRecord) -> ArrayRecord:
        """Return a model with products in the place of factors, as `start` takes it.

        Raises:
            ConfigError: a factor has no partner, or two do not fit.
        """
        made = ArrayRecord()
        for name, array in arrays.items():
            kind = _kind(name)
            if kind not in ("A", "B"):
                made[name] = array
                continue
            partner = _named(name, "B" if kind == "A" else "A")
            if partner not in arrays:
                raise ConfigError(
                    f"initial_arrays[{name!r}] has no partner {partner!r}: expected both factors"
                )
            if kind == "B":
                continue
            a, b = array.numpy(), arrays[partner].numpy()
            if not (a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and a.dtype.kind == "f"):
                raise ConfigError(
                    f"initial_arrays[{name!r}] has shape {a.shape} and dtype {a.dtype}, and "
                    f"{partner!r} {b.shape}: expected (rank, in) and (out, rank) of floating-point "
                    "numbers; adapt no other layers, such as convolutions"
                )
            made[_named(name, "BA")] = FlowerArray(b @ a)
        return made

    def factors(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return a model of the server's with factors in the place of products, as it is sent.

        Raises:
            ConfigError: it holds no products, or ones that have no factors.
        """
        return record_of(self._factored(arrays))

    def _factored(self, arrays: ArrayRecord) -> Model:
        kinds = {name: _kind(name) for name in arrays}
        wrong = next((name for name, kind in kinds.items() if kind in ("A", "B")), "no lora_BA")
        if wrong in kinds or "BA" not in kinds.values():
            raise ConfigError(
                f"initial_arrays holds {wrong}: expected the products of adapters, "
                "initial_arrays=adapters.products(...)"
            )
        made: Model = {}
        for name, array in arrays.items():
            x = array.numpy()
            if kinds[name] != "BA":
                made[name] = x
                continue
            if x.ndim != 2 or not x.size or x.dtype.kind != "f":
                raise ConfigError(
                    f"initial_arrays[{name!r}] has shape {x.shape} and dtype {x.dtype}: expected "
                    "(out, in) of floating-point numbers"
                )
            rng = np.random.default_rng([self._seed, *name.encode()])
            made[_named(name, "A")], made[_named(name, "B")] = _truncated(x, self.rank, rng)
        return made

    # Out.

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Send factors, which are made once a version."""
        if job.purpose == "query":
            return content
        version = job.base_version
        if version not in self._sent:
            self._sent[version] = self._factored(content.array_records[self._key])
            self._forget()
        if job.purpose == "train":
            self._out[version] = self._out.get(version, 0) + 1
        if self._last[0] != version:
            self._last = version, record_of(self._sent[version])
        return self._shared.of(content, lambda made: made.update({self._key: self._last[1]}))

    def ended(self, job: Job, end: End) -> None:
        """Forget what was sent of an older version with the last of its jobs."""
        if job.purpose == "train" and end.how != "left out":
            self._out[job.base_version] -= 1
            self._forget()

    def _forget(self) -> None:
        last = max(self._sent)
        for version in [v for v in self._sent if v < last and not self._out.get(v)]:
            del self._sent[version]
            self._out.pop(version, None)

    # In.

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Turn the arrays of a reply into changes of the server's.

        Raises:
            RejectionError: they do not fit what was sent.
        """
        if job.purpose != "train":
            return
        records = records_in(content, ArrayRecord)
        key = next(iter(records)) if len(records) == 1 else self._key
        if key not in records:
            return  # validation says so
        if is_delta(content):
            raise RejectionError(
                "format",
                f"{UPDATE_KEY} = 'delta': expected the factors themselves, since changes of both "
                "are no change of their product",
            )
        content[key] = self._changes(records[key], self._sent[job.base_version])
        content["fedstale.adapters"] = ConfigRecord({UPDATE_KEY: "delta"})

    def _changes(self, record: ArrayRecord, sent: Model) -> ArrayRecord:
        missing, unknown = sorted(set(sent) - set(record)), sorted(set(record) - set(sent))
        if missing or unknown:
            raise RejectionError(
                "names",
                f"arrays do not fit the adapters: missing {missing[:5]}, unknown "
                f"{[name[:40] for name in unknown[:5]]}",
            )
        made: Model = {}
        with np.errstate(over="ignore", invalid="ignore"):  # validation finds what is not finite
            for name, x in sent.items():
                kind = _kind(name)
                if kind == "A":
                    made[_named(name, "BA")] = self._change(record, name, sent)
                elif not kind:
                    to = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
                    new = self._read(record[name], name, x.shape, x.dtype, to)
                    made[name] = np.subtract(new, x, dtype=to)
        return record_of(made)

    def _change(self, record: ArrayRecord, name: str, sent: Model) -> Array:
        """Return B' A' - B A of a pair, where B A is of the rank of B' A'.

        Args:
            record: of a reply, with A' under the name.
            name: of A.
            sent: what the device was sent.
        """
        partner = _named(name, "B")
        a, b = sent[name], sent[partner]
        stored_a, stored_b = record[name], record[partner]
        (n_in, n_out), rank = (a.shape[1], b.shape[0]), next(iter(stored_a.shape), 0)
        shapes = (rank, n_in), (n_out, rank)
        if (stored_a.shape, stored_b.shape) != shapes or not 1 <= rank <= min(n_in, n_out):
            raise RejectionError(
                "shape",
                f"arrays[{name!r}] and its partner have shapes {stored_a.shape!r:.40} and "
                f"{stored_b.shape!r:.40}: expected (r, {n_in}) and ({n_out}, r) with r from 1 to "
                f"{min(n_in, n_out)}",
            )
        wide, k = at_least_single(a.dtype), min(rank, len(a))
        new_a = self._read(stored_a, name, shapes[0], a.dtype, wide)
        new_b = self._read(stored_b, partner, shapes[1], a.dtype, wide)
        a, b = a[:k].astype(wide), b[:, :k].astype(wide)
        # As B' (A' - A) + (B' - B) A: exactly 0 where nothing was trained.
        left = np.hstack([new_b[:, :k], new_b[:, :k] - b, new_b[:, k:]])
        change = left @ np.vstack([new_a[:k] - a, a, new_a[k:]])
        return np.asarray(change.astype(sent[name].dtype, copy=False))

    def _read(
        self,
        stored: FlowerArray,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        to: np.dtype[Any],
    ) -> Array:
        """Return an array of a reply, which must have some shape and dtype, in another dtype."""
        accepted = (dtype,) if dtype.kind == "f" else (dtype, *_COUNTS)
        like = np.broadcast_to(np.zeros((), dtype), shape)
        array = read(stored, name, like, None if self._casts else accepted, to)
        if not np.isfinite(array).all():
            raise RejectionError("finite", f"arrays[{name!r}] holds NaN or infinity")
        return array


def at_rank(arrays: ArrayRecord, rank: int) -> ArrayRecord:
    """Return a model as a device of some rank holds it: the first components of each pair.

    Of factors that `Adapters` has sent they are the best approximation of that rank.

    Args:
        arrays: as they were received.
        rank: of the device, >= 1; one above that of what was received returns all of it, and the
            device adds rows of A of its own, beside columns of B that are 0.

    Raises:
        ConfigError: the rank is none.
    """
    if not is_count(rank):
        raise ConfigError(f"rank = {rank!r}: expected an integer >= 1")
    made = {}
    for name, array in arrays.items():
        x, kind = array.numpy(), _kind(name)
        made[name] = x[:rank] if kind == "A" else x[:, :rank] if kind == "B" else x
    return record_of(made)


def _kind(name: str) -> str:
    """Return "A", "B" or "BA", which an array's name says that it is; empty for none."""
    found = _PART.search(name)
    return found[2] if found else ""


def _named(name: str, kind: str) -> str:
    """Return the name of another kind of the same pair."""
    return _PART.sub(rf"\g<1>{kind}", name, count=1)


def _truncated(product: Array, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return A and B, the best approximation B A of a product, in its dtype.

    Args:
        product: shape (out, in).
        rank: rows of A at most.
        rng: draws the rows of A beyond the rank of the product.
    """
    rank = min(rank, *product.shape)
    wide = product.astype(at_least_single(product.dtype), copy=False)
    drawn = rng.standard_normal((rank, product.shape[1])).astype(wide.dtype)
    u, s, v = _leading(wide, rank, rng)
    n = int((s > _negligible(wide) * s[0]).sum())
    signs = np.sign(v[np.arange(n), np.abs(v[:n]).argmax(axis=1)])
    b = np.zeros((len(product), rank), wide.dtype)
    b[:, :n] = u[:, :n] * (s[:n] * signs)
    a = v[:n] * signs[:, None]
    rest, _ = np.linalg.qr(np.vstack([a, drawn[n:]]).T)
    return np.vstack([a, rest.T[n:]]).astype(product.dtype), b.astype(product.dtype)


def _negligible(product: Array) -> float:
    """Return the relative size of singular values that are rounding errors."""
    return max(product.shape) * float(np.finfo(product.dtype).eps)


def _leading(product: Array, rank: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return the largest singular values of a product with their vectors, as `np.linalg.svd` does.

    Those of a large one are found by block Lanczos iteration, restarted, until residuals are
    rounding errors; or else as of a small one.
    """
    width, (n_out, n_in) = rank + _BESIDES, product.shape
    if min(n_out, n_in) >= max(_LARGE, 8 * width):
        basis, image = np.empty((n_in, 0), product.dtype), np.empty((n_out, 0), product.dtype)
        block = product.T @ rng.standard_normal((n_out, width)).astype(product.dtype)
        for _ in range(_PASSES):
            block, _ = np.linalg.qr(block - basis @ (basis.T @ block))
            basis, image = np.hstack([basis, block]), np.hstack([image, product @ block])
            u, s, w = np.linalg.svd(image, full_matrices=False)
            v = basis @ w[: 2 * width].T
            block = product.T @ u[:, :width] - v[:, :width] * s[:width]
            if (np.linalg.norm(block[:, :rank], axis=0) <= _negligible(product) * s[0]).all():
                return u[:, :rank], s[:rank], v[:, :rank].T
            if basis.shape[1] >= 6 * width:
                basis, image = v, u[:, : 2 * width] * s[: 2 * width]
            # What is left of fewer vectors must not be filled up with some that are in the basis.
            block, sizes, _ = np.linalg.svd(block, full_matrices=False)
            block = block[:, sizes > _negligible(product) * s[0]]
    u, s, v = np.linalg.svd(product, full_matrices=False)
    return u[:, :rank], s[:rank], v[:rank]
