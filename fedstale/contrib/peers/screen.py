"""Screening: a site combines its neighbours' models with its own, and trains on from there.

What a site keeps is in Flower's `Context.state`: two models, at first three, and when each
neighbour's was last another. So nothing of it is the relay's word.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedstale.contrib.peers.relay import PEER, RELAY, SEALED
from fedstale.errors import ConfigError, ProtocolError
from fedstale.flower import ClientAppCallable, ErrorCode, model_of, record_of
from fedstale.strategies.robust import Rule, aggregate
from fedstale.strategies.server import UPDATE_KEY, WEIGHT_CAP, capped, is_delta, read, records_in
from fedstale.strategies.types import Model, RejectionError, is_count, is_finite
from fedstale.strategies.weighting import AgeCurve, constant

if TYPE_CHECKING:
    from fedstale.contrib.peers.sealing import Seals

_FIRST, _SCREENED, _OWN = "fedstale.first", "fedstale.screened", "fedstale.own"
"""Names of the records in the Context's state that hold models: the first, the last that was
screened, and the last that was learnt from one."""
_SEEN = "fedstale.seen"
"""Name of that of what neighbours have sent."""

logger = logging.getLogger(__name__)


class ScreenMod:
    """Trains on from what a rule makes of the neighbours' last models and the site's own.

    It goes with the stage `Relay` on the server, around a ClientApp that knows nothing of it:

        app = ClientApp(mods=[PackMod(), ScreenMod(TrimmedMean(f=1))])

    The app is given the combined model as if a server had sent it, and what it replies is the
    site's own model from then on. To evaluate, it is given what was combined last: a model that has
    just been trained on one site's data alone is worse. Messages of a server without a relay pass
    as they are.

    A site's number is `site` of its node config, or else `partition-id`. A neighbour that has not
    answered yet counts with the model that the run began with, which all have. A model with other
    names or shapes, or with NaN, is left out. With fewer models than the rule needs the site goes
    on from its own.

    Each reply's metrics say besides how many models were screened (`screened`), and for how many of
    its own jobs the site has seen nothing new of the neighbour that it has waited for longest
    (`silent-jobs`).

    With keys, models are encrypted from site to site, and `peers` says who the neighbours are,
    whatever the relay says. What was changed on its way, or is older than what came before, is left
    out. No arrays leave the site unsealed: a server without a relay is answered with an error.

    Args:
        rule: how models are combined; `TrimmedMean(f=0)` is their mean.
        staleness: weight of a neighbour's model by its age: the number of jobs that this site has
            done since the model was new. Weights are capped as the server's are, so that no f of
            them dominate.
        key: path of the site's own private key, of X25519 as PEM; None sends models as they are.
            `site-key` of its node config, which is set on the device, comes first.
        peers: path of a TOML file with the public keys of its neighbours; `site-peers` likewise.

    Reference:
        Fang, Yang, Bajwa. BRIDGE: Byzantine-resilient Decentralized Gradient Descent. IEEE TSIPN
        2022.

    Differences from the paper:
        It takes the gradient at a site's own model, and adds the step to what was screened. Here a
        site screens first and trains from there, so that any ClientApp does, with any number of
        local steps. Integer arrays stay the site's own.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        staleness: AgeCurve = constant(),  # noqa: B008 - it keeps nothing
        key: str | Path | None = None,
        peers: str | Path | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise ConfigError(f"ScreenMod.rule = {rule!r}: expected a rule such as Median(f=1)")
        self._rule, self._staleness = rule, staleness
        self._files = {"site-key": key, "site-peers": peers}
        self._known: dict[tuple[str, str], Seals] = {}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Call the app with the screened model; what cannot be screened is an error."""
        kind = message.metadata.message_type.split(".")[0]
        try:
            seals = self._seals(context)
            about = message.content.get(RELAY)
            if isinstance(about, ConfigRecord):
                reply = self._screened(message, about, context, call_next, seals)
            elif seals is not None and kind in ("train", "evaluate"):
                raise ProtocolError("no relay sent this message, and this site seals its models")
            else:
                reply = call_next(message, context)
            if seals is not None and not reply.has_error():
                records = records_in(reply.content, ArrayRecord).items()
                if plain := [name for name, record in records if list(record) != [SEALED]]:
                    raise ProtocolError(
                        f"the reply holds arrays {plain[:5]} besides the model: expected none, "
                        "since only the model is sealed"
                    )
        except (ConfigError, ProtocolError) as problem:
            logger.error("%s", problem)
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"{problem}"), reply_to=message)
        return reply

    def _screened(
        self,
        message: Message,
        about: ConfigRecord,
        context: Context,
        call_next: ClientAppCallable,
        seals: "Seals | None",
    ) -> Message:
        """Return the app's answer to a message of a relay."""
        is_training = message.metadata.message_type.split(".")[0] == "train"
        site = _Site(message.content, about, context, self._rule, seals)
        arrays = site.screened(self._staleness) if is_training else site.last
        rest = {
            name: record
            for name, record in message.content.items()
            if name != RELAY and not name.startswith(PEER)
        }
        message.content = RecordDict({**rest, site.key: arrays})
        reply = call_next(message, context)
        if is_training and not reply.has_error():
            site.keep(arrays, reply.content)
        return reply

    def _seals(self, context: Context) -> "Seals | None":
        """Return the keys of a site, which are read once; None for none."""
        paths = [context.node_config.get(name, path) for name, path in self._files.items()]
        if paths == [None, None]:
            return None
        if None in paths:
            raise ConfigError(
                f"site-key = {paths[0]}, site-peers = {paths[1]}: expected both files, or neither"
            )
        from fedstale.contrib.peers.sealing import Seals  # noqa: PLC0415 - apps without keys need none

        key, peers = map(str, paths)
        if (key, peers) not in self._known:
            self._known[key, peers] = Seals(Path(key), Path(peers))
        return self._known[key, peers]


class _Site:
    """A site with one message of a relay."""

    def __init__(
        self,
        content: RecordDict,
        about: ConfigRecord,
        context: Context,
        rule: Rule,
        seals: "Seals | None",
    ) -> None:
        """Read the message, and the state that the site keeps.

        Raises:
            ConfigError: it has no number, or fewer neighbours than the rule needs.
            ProtocolError: it has no model.
        """
        self._arrays, self._state = records_in(content, ArrayRecord), context.state
        told: Mapping[str, Any] = about
        self.key: str = told["arrays"]
        self._rule, self._seals, self._run_id = rule, seals, context.run_id
        self._number = _number_of(context)
        self._peers: list[int] = list(told["peers"])
        if seals is not None:
            self._peers = [peer for peer in seals.neighbours if peer != self._number]
        if self._peers and len(self._peers) + 1 < rule.least:
            raise ConfigError(
                f"site {self._number} has {len(self._peers)} neighbours, and {rule!r} needs "
                f"{rule.least} models with its own: choose another topology of Relay, or a "
                "smaller f"
            )
        kept = records_in(self._state, ArrayRecord)
        self._first = kept.get(_FIRST, self._arrays.get(self.key))
        own = kept.get(_OWN) or self._back() or self._first
        if own is None:
            raise ProtocolError(
                f"site {self._number} keeps no model, as after a restart: the relay sends it again"
            )
        self._own = own
        self.last = kept.get(_SCREENED, self._own)
        """What was screened last, or the best that there is."""
        nothing = ConfigRecord({"jobs": 0, "count": 0, "peers": [], "last": [], "at": []})
        seen: Mapping[str, Any] = self._state.config_records.get(_SEEN, nothing)
        self._jobs: int = seen["jobs"]
        self._count: int = seen["count"]
        self._seen: dict[int, tuple[bytes, int]] = {
            peer: (last, at)
            for peer, last, at in zip(seen["peers"], seen["last"], seen["at"], strict=True)
        }
        """Which was each neighbour's last model, and how many own jobs were done before it."""

    def screened(self, staleness: AgeCurve) -> ArrayRecord:
        """Combine the neighbours' models and the own one by the rule."""
        own = model_of(self._own)
        floats = {name: x for name, x in own.items() if x.dtype.kind == "f"}
        found = [(floats, 1.0)] if is_finite(floats) else []
        self._n_bad = 0
        for peer in self._peers:
            model = self._model_of(peer, floats)
            weight = staleness(self._age(peer))
            if model is not None and weight > 0.0:
                found.append((model, weight))
        # A neighbour whose model is none is one of the f.
        rule, self._n_screened = self._rule, len(found)
        if len(found) < rule.least:
            rule = rule.facing(max(rule.f - self._n_bad, 0))
        if len(found) < max(rule.least, 2):
            return self._own
        weights = capped(np.array([weight for _, weight in found]), rule.f, WEIGHT_CAP)
        return record_of(own | aggregate(rule, [model for model, _ in found], weights))

    def _model_of(self, peer: int, like: Model) -> Model | None:
        """Return a neighbour's last model; None if there is none that may be screened."""
        record = self._arrays.get(f"{PEER}{peer}")
        if record is None:
            # One that has been there was lost on its way.
            if peer in self._seen or self._first is None:
                return None
            first = model_of(self._first)
            return {name: first[name] for name in like}
        try:
            mark, record = self._opened(record, peer)
            last, _ = self._seen.get(peer, (b"", 0))
            if self._seals is not None and mark < last:
                raise ProtocolError("it is older than one that came before")
            if mark != last:
                self._seen[peer] = mark, self._jobs
            if missing := like.keys() - record.keys():
                raise RejectionError("names", f"it holds no arrays {sorted(missing)[:5]}")
            model = {name: read(record[name], name, x, None, x.dtype) for name, x in like.items()}
            if not is_finite(model):
                raise RejectionError("finite", "it holds NaN or infinity")
        except ProtocolError as problem:
            text = "site %d leaves out the model of site %d: %s"
            logger.warning(text, self._number, peer, problem)
            # Of what was changed on its way its site is not guilty.
            self._n_bad += isinstance(problem, RejectionError)
            return None
        return model

    def _opened(self, record: ArrayRecord, sender: int) -> tuple[bytes, ArrayRecord]:
        """Return a mark that is another for another model, and the model that came of a site."""
        if self._seals is not None:
            counter, record = self._seals.open(
                record, sender=sender, site=self._number, run_id=self._run_id
            )
            return counter.to_bytes(8), record
        digest = hashlib.sha256()
        for name, array in record.items():
            digest.update(name.encode() + b"\0" + array.data)
        return digest.digest(), record

    def _back(self) -> ArrayRecord | None:
        """Return the own model that the relay sends back; None if it sends none."""
        record = self._arrays.get(f"{PEER}{self._number}")
        try:
            return None if record is None else self._opened(record, self._number)[1]
        except ProtocolError as problem:
            logger.warning("site %d leaves out its own model: %s", self._number, problem)
            return None

    def _age(self, peer: int) -> int:
        return self._jobs - self._seen.get(peer, (b"", 0))[1]

    def keep(self, screened: ArrayRecord, content: RecordDict) -> None:
        """Keep a model and its update, and state their owner in the reply.

        Args:
            screened: that the app was given.
            content: of its reply.

        Raises:
            ProtocolError: it holds a change of the model.
        """
        records = records_in(content, ArrayRecord)
        if is_delta(content):
            raise ProtocolError(
                f"{UPDATE_KEY} = 'delta': expected the whole model beside ScreenMod"
            )
        if self._first is not None:
            self._state[_FIRST] = self._first
        if self._peers and self._seen.keys() >= set(self._peers):
            # It stands for neighbours that have not answered yet, of which there are none.
            self._state.pop(_FIRST, None)
        self._state[_SCREENED] = screened
        key = self.key if self.key in records else next(iter(records), self.key)
        self._state[_OWN] = own = records.get(key, ArrayRecord())
        if self._seals is not None:
            self._count = max(self._count + 1, time.time_ns() // 1_000_000)
            content[key] = self._seals.seal(
                own, site=self._number, run_id=self._run_id, counter=self._count
            )
        last, at = [x for x, _ in self._seen.values()], [job for _, job in self._seen.values()]
        self._state[_SEEN] = ConfigRecord(
            {
                "jobs": self._jobs + 1,
                "count": self._count,
                "peers": list(self._seen),
                "last": last,
                "at": at,
            }
        )
        for metrics in list(content.metric_records.values())[:1]:
            metrics["screened"] = self._n_screened
            metrics["silent-jobs"] = max(map(self._age, self._peers), default=0)
        content[RELAY] = ConfigRecord({"site": self._number})


def _number_of(context: Context) -> int:
    """Return the number of a site, by its node config."""
    config = context.node_config
    number = config.get("site", config.get("partition-id"))
    if not isinstance(number, int) or not is_count(number, 0):
        raise ConfigError(
            f"node config: site = {number!r}: expected the number of this site, an integer >= 0, "
            "as in --node-config 'site=3'"
        )
    return number
