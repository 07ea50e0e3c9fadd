"""Peers without a trusted centre: the server stores and forwards models, and averages none.

Flower has no messages between nodes. So the server is a relay: it keeps each site's last model, and
sends a site those of its neighbours in the place of a model of its own. `ScreenMod` combines them
at the site with the site's own, by a rule that withstands some liars, and lets the ClientApp train
from there. Nothing else of a strategy changes: `FedAvg(20, stages=[Relay("ring",
20)])` is gossip in lock-step, `FedBuff(20, 1, stages=[Relay("ring", 20)])` asynchronous gossip.

A message holds an ArrayRecord `peer.J` for each neighbour J that has answered, and a ConfigRecord
`fedstale.relay`, whose `peers` are the numbers of all neighbours and whose `arrays` is the name
under which the app expects a model. A reply states its site's number there, as `site`.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
from annotated_types import Ge
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.contrib.sites import Adapters
from fedstale.errors import ConfigError
from fedstale.flower import model_of, record_of
from fedstale.strategies.robust import Rule, aggregate
from fedstale.strategies.server import read, records_in
from fedstale.strategies.stages import Compression, Privacy, Stage, StageRun
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    End,
    Job,
    Model,
    RejectionError,
    State,
    is_count,
    require,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy

RELAY = "fedstale.relay"
"""Name of the ConfigRecord of a relay's messages and of the replies to them."""
PEER = "peer."
"""What the name of the record with a neighbour's model begins with; its number follows."""
SEALED = "sealed"
"""Name of the only array of a model that is encrypted, for neighbours alone."""
_SHAPES = "ring|torus|complete|random:P with P in (0, 1], or the path of a list of edges"
_INITIAL = -1
"""Stands for the number of a site, of the model that a run begins with."""
_GRAPH = 61
"""Keeps the draw of edges apart from the seed's other streams."""

Sites = Annotated[int, Ge(2), "an integer >= 2"]


class Relay(Stage):
    """Sends each site its neighbours' last models, and keeps what comes as the site's last.

    Replies are checked as always: one that is rejected goes to nobody, and the site's model before
    it stands. A site is known by the number that its replies state, `ScreenMod`'s; the first
    message to a node holds the model that the run began with. A number belongs to the first node
    that states it, until a job of that node fails or times out: then another node may take over,
    such as the same SuperNode, started again.

    The server's model is sent to nobody. With a rule it is what the rule makes of all last models,
    for `evaluate_fn` and as the result of `start`; without one it stays as it was given, and so it
    does where models are sealed. Of those only the size is checked.

    Args:
        topology: who is whose neighbour: "ring"; "torus", a grid whose ends meet; "complete";
            "random:P", where each two sites are neighbours with probability P, by the strategy's
            seed; or the path of a text file with two numbers of sites a line.
        n_sites: their number, >= 2; sites are 0 to `n_sites` - 1.
        rule: that sites screen by; each must have the neighbours that it needs.

    Reference:
        Fang, Yang, Bajwa. BRIDGE: Byzantine-resilient Decentralized Gradient Descent. IEEE TSIPN
        2022.

    Example:
        >>> Relay("ring", 5).neighbours(seed=0)[0]
        [1, 4]
        >>> from fedstale.strategies.robust import TrimmedMean
        >>> Relay("ring", 5, TrimmedMean(f=2)).neighbours(seed=0)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.Relay.topology = 'ring': site 0 has 2 neighbours, and
        TrimmedMean(f=2) needs 5 models with its own; expected more neighbours, or a smaller f
    """

    requires = frozenset({"start", "same settings"})
    saved = ("_sites", "_releasable", "_without_state", "_current")

    def __init__(
        self,
        topology: str | Path,
        n_sites: Sites,
        rule: Annotated[Rule, "a robust rule such as TrimmedMean(f=1)"] | None = None,
    ) -> None:
        self.topology, self.n_sites, self.rule = str(topology), n_sites, rule
        self._records: dict[int, ArrayRecord] = {}
        """Last model of each site that has answered, as it is sent; and the first model."""
        self._sites: dict[int, int] = {}
        """Number of each node that has answered."""
        self._releasable: dict[int, None] = {}
        """Sites whose last job failed or timed out."""
        self._without_state: dict[int, None] = {}
        """Nodes that may have lost what they keep."""
        self._last_reply = _INITIAL, ArrayRecord()
        """Site and model of the reply that is looked at."""
        self._current: Model = {}
        """The server's model, where there is a rule."""

    @property
    def models(self) -> dict[int, Model]:
        """Last model of each site that has answered, by number."""
        return {site: model_of(r) for site, r in self._records.items() if site != _INITIAL}

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError where something would be averaged, or the topology is none."""
        accepted = "None with Relay, which averages nothing: sites screen, by ScreenMod(rule)"
        require(strategy.robust is None, "robust", strategy.robust, accepted)
        optimizer = strategy.server_optimizer
        accepted = "SGD(eta=1.0) with Relay: sites step, the server does not"
        require(repr(optimizer) == "SGD(eta=1.0)", "server_optimizer", optimizer, accepted)
        for stage in strategy.stages:
            accepted = "no stage beside Relay that reads or changes models"
            is_other = not isinstance(stage, Compression | Adapters | Privacy)
            require(is_other, "stages", stage, accepted)
        self.neighbours(strategy.seed)

    def begin(self, run: StageRun, state: Mapping[str, Any] | None) -> None:
        """Prepare for a run; on real devices a new one finds nothing of the last one's left."""
        super().begin(run, state)
        self._key, self._neighbours = run.arrays_key, self.neighbours(run.seed)
        if not run.repeats:
            self._without_state.update(dict.fromkeys(self._sites))
            self._releasable.update(dict.fromkeys(self._sites.values()))

    def state_dict(self) -> State:
        """Return the state for a checkpoint."""
        held = {site: model_of(record) for site, record in self._records.items()}
        return super().state_dict() | {"records": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self._records = {site: record_of(model) for site, model in state["records"].items()}

    # Who is whose neighbour.

    def neighbours(self, seed: int) -> list[list[int]]:
        """Return the neighbours of each site, ascending.

        Args:
            seed: of the strategy.

        Raises:
            ConfigError: the topology is none, leaves a site cut off, or has too few neighbours.
        """
        found: list[set[int]] = [set() for _ in range(self.n_sites)]
        for one, other in self._edges(seed):
            found[one].add(other)
            found[other].add(one)
        reached, todo = {0}, [0]
        while todo:
            todo = [site for at in todo for site in found[at] if site not in reached]
            reached.update(todo)
        for site, own in enumerate(found):
            if site not in reached:
                by = f" with seed {seed}" if self.topology.startswith("random:") else ""
                self._refuse(f"site {site} is cut off from site 0{by}; expected edges between all")
            if self.rule is not None and len(own) + 1 < self.rule.least:
                self._refuse(
                    f"site {site} has {len(own)} neighbours, and {self.rule!r} needs "
                    f"{self.rule.least} models with its own; expected more neighbours, or a "
                    "smaller f"
                )
        return list(map(sorted, found))

    def _edges(self, seed: int) -> list[tuple[int, int]]:
        name, n = self.topology, self.n_sites
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
        if name == "ring":
            return [(i, (i + 1) % n) for i in range(n)]
        if name == "complete":
            return pairs
        if name == "torus":
            rows = next((k for k in range(isqrt(n), 2, -1) if n % k == 0), 0)
            if not rows:
                self._refuse(f"of {n} sites; expected rows x columns of 3 or more, such as 9 or 12")
            width = n // rows
            down = [(i, (i + width) % n) for i in range(n)]
            return [(i, i - i % width + (i + 1) % width) for i in range(n)] + down
        if name.startswith("random:"):
            try:
                p = float(name.removeprefix("random:"))
            except ValueError:
                p = 0.0
            if not 0.0 < p <= 1.0:
                self._refuse(f"expected {_SHAPES}")
            drawn = np.random.default_rng((seed, _GRAPH)).random(len(pairs))
            return [pair for pair, x in zip(pairs, drawn, strict=True) if x < p]
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            self._refuse(f"no such file that can be read; expected {_SHAPES}")
        return [edge for at, line in enumerate(lines, 1) for edge in self._edge(at, line)]

    def _edge(self, at: int, line: str) -> list[tuple[int, int]]:
        """Return the edge of a line of a file; none of a line that is empty or a comment."""
        words = line.partition("#")[0].split()
        if not words:
            return []
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            self._refuse(f"line {at} is {line[:40]!r}; expected two numbers of sites, such as 0 1")
        one, other = map(int, words)
        for site in (one, other):
            if site >= self.n_sites:
                self._refuse(f"line {at} has site {site}; expected 0 to {self.n_sites - 1}")
        if one == other:
            self._refuse(f"line {at} makes site {one} its own neighbour; expected two sites")
        return [(one, other)]

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"strategy.Relay.topology = {self.topology!r}: {why}")

    # Out.

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Put the neighbours' models in the place of the server's."""
        if job.purpose == "query":
            return content
        # Later versions are the rule's, and go to nobody.
        self._records.setdefault(_INITIAL, content.array_records[self._key])
        site = self._sites.get(job.node_id)
        made, peers = RecordDict(dict(content)), [] if site is None else self._neighbours[site]
        made[RELAY] = ConfigRecord({"arrays": self._key, "peers": peers})
        del made[self._key]
        wanted = [*peers] if job.purpose == "train" else []
        if site is None or job.node_id in self._without_state:
            made[self._key] = self._records[_INITIAL]
            wanted += [] if site is None else [site]
        for peer in wanted:
            if peer in self._records:
                made[f"{PEER}{peer}"] = self._records[peer]
        return made

    # In.

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Look at whose model has come.

        Raises:
            RejectionError: it says no number, or that of another site.
        """
        if job.purpose != "train":
            return
        about, records = content.get(RELAY), records_in(content, ArrayRecord)
        site = about.get("site") if isinstance(about, ConfigRecord) else None
        if not (isinstance(site, int) and is_count(site, 0) and site < self.n_sites):
            raise RejectionError(
                "site",
                f"the reply of node {job.node_id} states {site!r:.40} as its site: expected 0 to "
                f"{self.n_sites - 1}, by ScreenMod in the ClientApp",
            )
        before, holder = self._sites.get(job.node_id, site), self._holder(site)
        if before != site:
            raise RejectionError(
                "site", f"node {job.node_id} states site {site}, and was site {before} before"
            )
        if holder not in (None, job.node_id) and site not in self._releasable:
            raise RejectionError(
                "site",
                f"node {job.node_id} states site {site}, which node {holder} is: give each node a "
                "partition-id of its own",
            )
        key = self._key if self._key in records else next(iter(records), "")
        self._last_reply = site, records.get(key, ArrayRecord())
        if list(self._last_reply[1]) == [SEALED] != list(self._records[_INITIAL]):
            self._last_reply = site, record_of({SEALED: bytes_in(self._last_reply[1])})
            # Nothing is averaged: what is sound stands for what cannot be looked at.
            content[key] = self._records[_INITIAL]

    def _holder(self, site: int) -> int | None:
        """Return the node that is a site; None if no node has been."""
        return next((node for node, number in self._sites.items() if number == site), None)

    def ended(self, job: Job, end: End) -> None:
        """Keep a good model; free a site's number, or send its node its own model again."""
        if end.how == "accepted" and job.purpose == "train":
            self._keep(job.node_id)
        elif end.how == "left out":
            self._records.pop(self._sites.get(job.node_id, self.n_sites), None)
        elif end.how in ("failed", "timed out") and job.node_id in self._sites:
            self._releasable[self._sites[job.node_id]] = None
            if end.how == "failed":
                self._without_state[job.node_id] = None

    def _keep(self, node_id: int) -> None:
        """Keep the model of a reply that was checked as its site's last."""
        site, record = self._last_reply
        holder, is_new = self._holder(site), node_id not in self._sites
        if holder is not None:
            del self._sites[holder]
        self._sites[node_id] = site
        self._releasable.pop(site, None)
        self._without_state.pop(node_id, None)
        # What a node that is back has learnt from the first model alone is worth less.
        if not (is_new and site in self._records):
            self._records[site] = record_of(model_of(record))

    # The server's model.

    def accepted(self, update: ClientUpdate) -> None:
        """Note the server's model; integer arrays stay as they were given."""
        self._current = dict(update.current) if self.rule is not None else {}
        for count in update.counts.values():
            count[...] = 0.0

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Make what the rule makes of all last models the server's; or none, without a rule."""
        target = self._current
        if self.rule is not None:
            models = [model for model in self.models.values() if model.keys() >= mean.keys()]
            models = [{name: model[name] for name in mean} for model in models]
            if len(models) >= self.rule.least:
                target = aggregate(self.rule, models)
        for name, x in mean.items():
            x[...] = target[name] - self._current[name] if target else 0.0
        self._current = {}
        return {}


def bytes_in(record: ArrayRecord) -> Array:
    """Return the bytes of a sealed model, in memory of their own.

    Raises:
        RejectionError: it is none.
    """
    if list(record) != [SEALED]:
        raise RejectionError("names", f"holds arrays {list(record)[:5]}: expected {SEALED!r} alone")
    shape = tuple(record[SEALED].shape)
    if len(shape) != 1 or not is_count(shape[0]) or shape[0] > len(record[SEALED].data):
        raise RejectionError("shape", f"{SEALED!r} has shape {shape!r:.40}: expected bytes")
    like = np.broadcast_to(np.zeros((), np.uint8), shape)
    return read(record[SEALED], SEALED, like, (like.dtype,), like.dtype)
