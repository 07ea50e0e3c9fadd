"""Random tickets: weak devices train a random sub-network, and only its weights travel.

A message says three values, of which server and device draw the kept weights of each layer: no mask
is ever sent, only kept values, each layer as one array with the dtype and shape of the whole.
Layers are floating-point arrays of two axes or more; biases, norms and what is small go whole.
`Tickets` is the server's stage, `TicketsMod` the device's mod.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedstale.client import PackMod
from fedstale.errors import ProtocolError
from fedstale.flower import ClientAppCallable, record_of
from fedstale.strategies.server import UPDATE_KEY, is_delta, records_in
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    End,
    Forecast,
    Index,
    Job,
    Model,
    Positive,
    PositiveShare,
    RejectionError,
    median_of,
    require,
)
from fedstale.strategies.weighting import CachedUpdates

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy

TICKETS = "fedstale.tickets"
"""Name of the ConfigRecord of a message that asks for a sub-network, and of a reply with one."""
LEAST, LAST = 256, 0.3
"""Elements of an array below which it goes whole; share of the last layer by smart ratios."""

Layers = Literal["smart", "uniform"]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each array of a model, by name."""
_STYPE, _DRAW = "fedstale.ticket", 67
"""How a layer of kept values is stored; what keeps their draws apart from others of the seed."""
_OTHERS = "Adapters", "Compression", "Privacy", "Relay"
"""Stages that send or read models in a form of their own."""


class SubNetwork(NamedTuple):
    """Some weights of each layer of a model, as a message says them."""

    ratio: float
    """Share of the weights of all layers, in (0, 1]."""
    layers: Layers
    """How it is divided among them; see `ratios`."""
    seed: int
    """Of the draw, in [0, 2^63)."""

    def kept(self, shapes: Shapes) -> dict[str, Index]:
        """Return the places of the kept weights of each layer, flattened and ascending."""
        sizes = {
            name: prod(shape)
            for name, (dtype, shape) in shapes.items()
            if dtype.startswith("float") and len(shape) > 1 and prod(shape) >= LEAST
        }
        shares = ratios(self.ratio, self.layers, list(sizes.values()))
        return {
            name: _drawn(self.seed, name, n, max(round(share * n), 1))
            for (name, n), share in zip(sizes.items(), shares, strict=True)
        }


def ratios(ratio: float, layers: Layers, sizes: Sequence[int]) -> list[float]:
    """Return the share of each layer that is kept; of all weights it is the ratio.

    Smart ratios fall with depth: layer l of L keeps a share in proportion to k^2 + k, with
    k = L - l + 1, and the last one 0.3.

    Args:
        ratio: of all weights, in (0, 1].
        layers: "uniform" keeps the same share of each.
        sizes: weights of each layer, in the order of the model.

    Reference:
        Su, Chen, Cai, Wu, Gao, Wang, Lee. Sanity-Checking Pruning Methods: Random Tickets can Win
        the Jackpot. NeurIPS 2020.

    Differences from the paper:
        All linear layers keep 0.3 there; here the last layer does, or keeps the ratio where that is
        less. What exceeds a layer goes to all others, not to the next ones. Checked in the authors'
        code for residual networks, which divides by l^2 for VGG; not in the paper's text.
    """
    if layers == "uniform" or len(sizes) < 2:
        return [ratio] * len(sizes)
    n, k = np.array(sizes, dtype=np.float64), np.arange(len(sizes), 1.0, -1.0)
    size, n_last, goal = n[:-1], n[-1], ratio * n.sum()
    last = max(LAST, (goal - size.sum()) / n_last)
    last = min(last if last * n_last < goal else ratio, 1.0)
    found = np.zeros(size.size)
    for _ in size:  # each time another layer may be whole
        is_whole = found >= 1.0
        left, form = goal - last * n_last - size[is_whole].sum(), np.where(is_whole, 0.0, k * k + k)
        found = np.where(is_whole, 1.0, form * left / max(form @ size, 1.0))
    return [*np.minimum(found, 1.0).tolist(), float(last)]


def _drawn(seed: int, name: str, n: int, k: int) -> Index:
    """Return k of n places, ascending; of fewer k they are some of the same."""
    # NumPy promises raw numbers of a generator for all releases, but no draw that is made of them.
    raw = np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])).random_raw(n)
    return np.flatnonzero(raw <= np.partition(raw, k - 1)[k - 1])[:k]


def shapes_of(record: ArrayRecord) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of a model, whole or cut."""
    return {name: (array.dtype, tuple(array.shape)) for name, array in record.items()}


def cut(x: Array, kept: Index) -> FlowerArray:
    """Return the kept values of a layer as they travel."""
    values = x.reshape(-1)[kept].astype(x.dtype.newbyteorder("<"), copy=False)
    return FlowerArray(str(x.dtype), x.shape, _STYPE, values.tobytes())


def filled(array: FlowerArray, kept: Index, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return a layer that was cut, with zeros in the places that are not kept.

    Raises:
        ProtocolError: it was not, or in another way.
    """
    n_bytes = kept.size * np.dtype(dtype).itemsize
    if array.stype != _STYPE or len(array.data) != n_bytes:
        raise ProtocolError(f"a layer is not {kept.size} values of {dtype} in {_STYPE!r}")
    whole = np.zeros(prod(shape), dtype)
    whole[kept] = np.frombuffer(array.data, np.dtype(dtype).newbyteorder("<"))
    return whole.reshape(shape)


class TicketsMod:
    """Trains the sub-network that a message asks for, around an app that knows nothing of it.

    It belongs before mods that change arrays, such as those for privacy, and behind `ForecastMod`,
    which measures what travels: `ClientApp(mods=[ForecastMod(), TicketsMod()])`. It also packs, as
    `PackMod` does. The app is given the whole model with zeros elsewhere, and trains as ever: dense
    kernels save neither work nor memory by it, and move the zeros, too. What becomes of these is
    dropped, and the reply holds the change of the kept weights.
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Fill up the model, call the app, cut its reply."""
        return PackMod()(message, context, lambda msg, ctx: _trained(msg, ctx, call_next))


def _trained(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    asked: Any = message.content.get(TICKETS)
    if asked is None:
        return call_next(message, context)
    ((key, record),) = records_in(message.content, ArrayRecord).items()
    shapes = shapes_of(record)
    kept = SubNetwork(**asked).kept(shapes)
    # The first message to a node is whole.
    parts = {k: x if (x := record[k]).stype == _STYPE else cut(x.numpy(), kept[k]) for k in kept}
    model = {
        name: filled(parts[name], kept[name], *shapes[name]) if name in kept else x.numpy()
        for name, x in record.items()
    }
    rest = {name: each for name, each in message.content.items() if name != TICKETS}
    message.content = RecordDict(rest | {key: record_of(model)})
    reply = call_next(message, context)
    if not reply.has_error():
        _cut_reply(reply.content, model, kept)
    return reply


def _cut_reply(content: RecordDict, model: Mapping[str, Array], kept: Mapping[str, Index]) -> None:
    """Put the change of kept weights in the place of a reply's arrays, if these fit the model."""
    found, shapes = records_in(content, ArrayRecord), {name: x.shape for name, x in model.items()}
    if [{name: tuple(x.shape) for name, x in r.items()} for r in found.values()] != [shapes]:
        return
    made, has_changes, ((key, record),) = {}, is_delta(content), found.items()
    for name, x in model.items():
        y = record[name].numpy()
        # As the server takes changes: in the model's dtype, and those of integers in float64.
        dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
        change = y if has_changes else np.asarray(np.subtract(y, x, dtype=dtype))
        made[name] = cut(change, kept[name]) if name in kept else FlowerArray(change)
    content[key] = ArrayRecord(made)
    content[TICKETS] = ConfigRecord({UPDATE_KEY: "delta"})


class Tickets(Stage):
    """Sends weak devices a random sub-network, which they train and return alone.

    The first message to a node holds the whole model, and its reply the sub-network, if the app has
    `TicketsMod`; from then on the model is cut, too. An app without it answers with whole models,
    which are merged beside the others. A server step moves each weight by the mean over the updates
    that had it; where none had, only the momentum of a server optimizer does.

    Args:
        ratio: share of the weights of all layers that a sub-network has, in (0, 1].
        layers: how it is divided: "uniform" keeps as much of each layer, "smart" less of later
            ones, as in the paper.
        masks: "device" draws one sub-network for each node, "round" one for each version of the
            model, and "nested" one for all, of which a smaller one is a part.
        within_s: only nodes whose job with the whole model takes longer, by the medians of their
            last forecast, get a sub-network, in s, > 0; None for all nodes.

    Differences from the paper (see `ratios`):
        It trains one network with one mask from its first weights. Here devices with different
        masks, or none, share a dense model, of which each trains a part.

    Example:
        >>> stage = Tickets(0.25, within_s=600.0)
        >>> forecast = {"levels": [0.5], "training_s": [60.0], "total_s": [660.0]}
        >>> stage.ratio_of(1, forecast), stage.ratio_of(2, {})
        (0.25, 1.0)
    """

    requires = frozenset({"start", "same settings"})
    saved = ("_last", "_held", "_shapes")

    def __init__(
        self,
        ratio: PositiveShare,
        *,
        layers: Layers = "uniform",
        masks: Literal["device", "round", "nested"] = "device",
        within_s: Positive | None = None,
    ) -> None:
        self.ratio, self.layers, self.masks, self.within_s = float(ratio), layers, masks, within_s
        self._last: dict[int, float] = {}
        """Ratio of the last reply of each node that can train a sub-network."""
        self._held: dict[str, tuple[float, int]] = {}
        """Ratio and seed of the sub-network of each update that waits for its step, by message."""
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError beside what would take a weight that was not sent for one that is 0."""
        for field, holds, accepted in (
            ("robust", strategy.robust is None, "None"),
            ("update", strategy.update == "delta", "'delta'"),
            ("normalise", strategy.normalise != "steps", "examples|buffer_size|weights"),
            ("weighting", not isinstance(strategy.weighting, CachedUpdates), "one without a cache"),
            ("stages", not {s.name for s in strategy.stages} & {*_OTHERS}, f"none of {_OTHERS}"),
        ):
            why = f"{accepted} beside Tickets, whose devices do not send all weights"
            require(holds, field, getattr(strategy, field), why)
        self._normalise = strategy.normalise

    def ratio_of(self, node_id: int, forecast: Forecast, last: float = 1.0) -> float:
        """Return the ratio of a node's next job; 1 for the whole model.

        Args:
            node_id: of the node, for a subclass that knows otherwise which ones are weak.
            forecast: that it last reported of itself; empty if none.
            last: ratio of the job that the forecast is of.
        """
        if self.within_s is None:
            return self.ratio
        training_s, total_s = median_of(forecast, "training_s"), median_of(forecast, "total_s")
        # Of a node without a forecast both are NaN, and nothing is more than that.
        return self.ratio if training_s + (total_s - training_s) / last > self.within_s else 1.0

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Ask a node that trains for a sub-network, and send it alone if it can read it."""
        if job.purpose != "train":
            return content
        key, last = self._run.arrays_key, self._last.get(job.node_id)
        arrays, forecast = content.array_records[key], self._run.history.forecast_of(job.node_id)
        self._shapes = self._shapes or shapes_of(arrays)
        ratio = self.ratio_of(job.node_id, forecast, last or 1.0)
        job.upload = ratio / (last or 1.0)
        if ratio == 1.0:
            return content
        of = {"device": [1, job.node_id], "round": [2, job.base_version], "nested": [3]}[self.masks]
        words = np.random.SeedSequence([self._run.seed, _DRAW, *of]).generate_state(1, np.uint64)
        job.notes[self.name] = note = ratio, int(words[0]) >> 1
        part, made = self._part(note), RecordDict(dict(content))
        made[TICKETS] = ConfigRecord(part._asdict())
        if last is not None:
            kept = part.kept(self._shapes).items()
            parts = {name: cut(arrays[name].numpy(), at) for name, at in kept}
            made[key] = ArrayRecord({**arrays, **parts})
        return made

    def _part(self, note: Sequence[float]) -> SubNetwork:
        return SubNetwork(note[0], self.layers, int(note[1]))

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Put zeros where a reply's sub-network has nothing.

        Raises:
            RejectionError: its arrays are not those of the sub-network.
        """
        if job.purpose != "train":
            return
        if self.name not in job.notes:
            self._last.update({k: 1.0 for k in self._last.keys() & {job.node_id}})
            return
        said = content.get(TICKETS)
        if not (isinstance(said, ConfigRecord) and said.get(UPDATE_KEY) == "delta"):
            self._last.pop(job.node_id, None)
            self._run.hint(
                "Tickets: a ClientApp was asked for a sub-network and answers with the whole "
                "model: add TicketsMod() to its mods, ClientApp(mods=[TicketsMod()])"
            )
            return
        note, kept = job.notes[self.name], self._part(job.notes[self.name]).kept(self._shapes)
        try:
            ((key, record),) = records_in(content, ArrayRecord).items()
            parts = {k: filled(record[k], kept[k], *self._shapes[k]) for k in kept}
        except (LookupError, ValueError, ProtocolError) as problem:
            text = f"the reply to a ticket of {note[0]:g} cannot be filled up: {problem}"
            raise RejectionError("format", text) from None
        content[key] = ArrayRecord({**record, **{k: FlowerArray(x) for k, x in parts.items()}})
        self._last[job.node_id], self._held[job.message_id] = note[0], note

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Divide the sum of each weight by what the updates count that had it."""
        notes = [self._held.pop(update.message_id, None) for update in updates]
        of = self._normalise
        mass = [{"examples": u.examples, "weights": u.weight}.get(of, 1.0) for u in updates]
        total = sum(mass, 0.0)
        if not any(notes) or total <= 0.0:
            return {}
        kept = [{} if note is None else self._part(note).kept(self._shapes) for note in notes]
        for name, x in mean.items():
            had = np.zeros(x.size)
            for own, places in zip(mass, kept, strict=True):
                had[places.get(name, slice(None))] += own
            factor = np.divide(total, had, out=np.zeros(x.size), where=had > 0.0)
            # In the model's dtype it is 1 to the last bit where all had a weight.
            np.multiply(x, factor.reshape(x.shape).astype(x.dtype), out=x)
        return {}

    def ended(self, job: Job, end: End) -> None:
        """Forget what goes into no step, and send whole models after an error."""
        if end.how == "failed":
            self._last.pop(job.node_id, None)
        if end.how != "accepted":
            self._held.pop(job.message_id, None)
