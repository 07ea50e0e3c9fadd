"""Sealed models: who can read them, and what a relay that lies cannot do."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from peer_sites import SIZE, Site, descending_app, step
from site_keys import KEYS, public_text, write_keys
from virtual_grid import VirtualGrid, identity, record

from fedstale.contrib.peers import Relay, ScreenMod
from fedstale.contrib.peers.sealing import Seals
from fedstale.errors import ConfigError, FedstaleError, ProtocolError
from fedstale.strategies import FedAvg, Stage
from fedstale.strategies.robust import Median, TrimmedMean
from fedstale.strategies.types import RejectionError

MEAN, FIRST, RUN = TrimmedMean(f=0), np.linspace(-1.0, 1.0, SIZE), 7


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def seals(folder, site, neighbours, keys=KEYS):
    config = write_keys(folder, site, neighbours, keys)
    return Seals(Path(config["site-key"]), Path(config["site-peers"]))


@pytest.fixture
def three(tmp_path):
    """Return the keys of sites 0, 1 and 2, all neighbours."""
    (tmp_path / "keys").mkdir(mode=0o700)
    return [seals(tmp_path / "keys", i, {0, 1, 2} - {i}) for i in range(3)]


def sealed(by, site=0, run_id=RUN, counter=5, **arrays):
    model = record(**(arrays or {"x": FIRST}))
    return by.seal(model, site=site, run_id=run_id, counter=counter)


def changed(model, at, by=1):
    data = model["sealed"].numpy().copy()
    data[at] ^= by
    return record(sealed=data)


def open_by(keys, model, *, sender=0, site=1, run_id=RUN):
    return keys.open(model, sender=sender, site=site, run_id=run_id)


def test_nothing_of_a_model_can_be_seen_and_no_two_are_alike(three):
    model = sealed(three[0])
    assert FIRST.tobytes() not in model["sealed"].data
    assert b"float64" not in model["sealed"].data
    assert model != sealed(three[0])


def test_a_model_is_as_large_as_it_was_but_for_some_bytes_a_neighbour(three):
    size = len(sealed(three[0], x=np.zeros(100_000))["sealed"].data)
    assert 800_000 < size < 801_000


def test_every_changed_byte_is_found(three):
    model = sealed(three[0])
    n = model["sealed"].shape[0]
    # What is for others need not be looked at: the wraps of sites 0 and 2.
    wrap = 4 + 88
    head, own = 32 + 4, range(32 + 4 + wrap, 32 + 4 + 2 * wrap)
    ours = [*range(head), *own, *range(head + 3 * wrap, n)]
    for at in ours:
        with pytest.raises(ProtocolError) as problem:
            open_by(three[1], changed(model, at))
        assert not isinstance(problem.value, RejectionError)


def test_a_model_is_of_one_sender_one_receiver_and_one_run(three):
    model = sealed(three[0])
    for about in ({"sender": 2}, {"site": 2}, {"run_id": RUN + 1}):
        with pytest.raises(ProtocolError, match="it cannot be opened"):
            open_by(three[1], model, **about)


def test_a_neighbour_that_has_the_key_of_a_model_can_put_no_other_in_its_place(three):
    # Site 2 seals in the name of site 0, with its own key and that of site 1.
    for forged in (sealed(three[2]), sealed(three[2], site=0)):
        with pytest.raises(ProtocolError, match="it cannot be opened"):
            open_by(three[1], forged)
    # The wraps of site 0 around the body of site 2.
    ours, theirs = (sealed(one)["sealed"].numpy() for one in (three[0], three[2]))
    start = 36 + 3 * 92
    mixed = record(sealed=np.concatenate([ours[:start], theirs[start:]]))
    with pytest.raises(ProtocolError, match="it cannot be opened"):
        open_by(three[1], mixed)


def test_a_site_that_is_no_neighbour_cannot_open(three, tmp_path):
    stranger = seals(tmp_path / "keys", 3, [0, 1])
    with pytest.raises(ProtocolError, match=r"sealed for sites \[0, 1, 2\], and this is 3"):
        open_by(stranger, sealed(three[0]), site=3)
    with pytest.raises(ProtocolError, match="it cannot be opened"):
        open_by(stranger, sealed(three[0]), site=1)


def test_another_public_key_than_the_senders_is_named(tmp_path):
    keys = [KEYS[4], *KEYS[1:]]
    (tmp_path / "mine").mkdir(mode=0o700)
    mine, theirs = seals(tmp_path / "mine", 1, [0]), seals(tmp_path / "mine", 0, [1], keys)
    with pytest.raises(ProtocolError, match="public key of its site is another in site-peers"):
        open_by(mine, sealed(theirs))


@pytest.mark.parametrize(
    "model",
    [
        record(x=FIRST),
        ArrayRecord(),
        record(sealed=FIRST),
        record(sealed=np.zeros((2, 2), np.uint8)),
        record(sealed=np.zeros(1, np.uint8)),
        record(sealed=np.zeros(36, np.uint8)),
        record(sealed=np.full(100, 255, np.uint8)),
    ],
)
def test_what_is_not_sealed_is_refused(three, model):
    with pytest.raises(ProtocolError, match=r"it is (not sealed|cut off|sealed for)"):
        open_by(three[1], model)


def test_noise_that_a_neighbour_has_sealed_is_its_own_fault(three, monkeypatch):
    monkeypatch.setattr(
        "fedstale.contrib.peers.sealing.bytes_of_records", lambda content: b"\xff" * 50
    )
    with pytest.raises(RejectionError, match="it holds no model"):
        open_by(three[1], sealed(three[0]))


# Files.


def test_key_files_that_are_none_are_refused_in_one_sentence(tmp_path):
    folder = tmp_path / "keys"
    config = write_keys(folder, 0, [1])
    key, peers = folder / "site-0" / "site.key", folder / "site-0" / "peers.toml"
    for text, words in (
        ("[peers]\n1 = 'AAAA'\n", r"1 = 'AAAA': expected the middle line of"),
        ("[peers]\none = 'AAAA'\n", r"expected a table \[peers\]"),
        ("[others]\n", r"expected a table \[peers\]"),
        ("peers", r"expected a table \[peers\]"),
    ):
        peers.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Seals(key, peers)
    write_keys(folder, 0, [1])
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"site-key: .*other users may read it: chmod 600"):
        Seals(key, peers)
    key.chmod(0o600)
    key.write_text("no key")
    with pytest.raises(ConfigError, match="expected the private key of this site, as of openssl"):
        Seals(key, peers)
    with pytest.raises(ConfigError, match="cannot be read"):
        Seals(folder / "none", peers)
    assert config["partition-id"] == 0


def test_another_kind_of_key_is_named(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    write_keys(tmp_path / "keys", 0, [1], [Ed25519PrivateKey.generate(), KEYS[1]])
    folder = tmp_path / "keys" / "site-0"
    with pytest.raises(ConfigError, match="another kind of key: expected X25519"):
        Seals(folder / "site.key", folder / "peers.toml")
    write_keys(tmp_path / "keys", 0, [1])
    other = public_text(Ed25519PrivateKey.generate())
    (folder / "peers.toml").write_text(f'[peers]\n1 = "{other}"\n')
    with pytest.raises(ConfigError, match="expected the middle line of"):
        Seals(folder / "site.key", folder / "peers.toml")


# Sites behind a relay that lies.


def sites(folder, n, rule=MEAN):
    app = descending_app(ScreenMod(rule))
    return {
        10 + i: Site(i, app, config=write_keys(folder / "keys", i, sorted({*range(n)} - {i})))
        for i in range(n)
    }


def plain_sites(n):
    return {10 + i: Site(i, descending_app(ScreenMod(MEAN))) for i in range(n)}


def start(nodes, rounds, *more):
    grid = VirtualGrid(nodes)
    strategy = FedAvg(stages=[Relay("complete", len(nodes)), *more])
    result = strategy.start(grid, record(x=FIRST), num_rounds=rounds)
    return grid, strategy, result.arrays["x"].numpy()


def own(site):
    return site.context.state["fedstale.own"]["x"].numpy()


def metric(strategy, version, name):
    return strategy.result.train_metrics_clientapp[version][name]


class Lying(Stage):
    """A relay that changes what a site is sent in the name of site 1."""

    def __init__(self, lie, site=12):
        self.lie, self._site, self.past = lie, site, []

    def outgoing(self, job, content):
        if job.node_id == self._site and "peer.1" in content:
            self.past.append(content["peer.1"])
            found = self.lie(self.past)
            if found is None:
                del content["peer.1"]
            else:
                content["peer.1"] = found
        return content


def test_sites_that_seal_learn_what_sites_that_do_not_learn(tmp_path):
    nodes, plain = sites(tmp_path, 4), plain_sites(4)
    grid, strategy, after = start(nodes, 5)
    start(plain, 5)
    for key, node in nodes.items():
        np.testing.assert_array_equal(own(node), own(plain[key]))
    assert not strategy.rejections
    np.testing.assert_array_equal(after, FIRST)
    for _, message in grid.sent[4:]:
        assert all(list(model) == ["sealed"] for model in message.content.array_records.values())
    assert metric(strategy, 5, "screened") == 4
    assert metric(strategy, 5, "silent-jobs") == 0


LIES = {
    "changed": lambda past: changed(past[-1], -1),
    "its own": lambda past: record(x=FIRST + 100.0),
    "an older one": lambda past: past[-1] if len(past) < 3 else past[0],
    "none": lambda past: None,
}


@pytest.mark.parametrize("name", LIES)
def test_a_relay_that_lies_is_found_out_and_its_lie_is_left_out(tmp_path, name, caplog):
    nodes, honest = sites(tmp_path, 4), plain_sites(4)
    _, strategy, _ = start(nodes, 6, Lying(LIES[name]))
    start(honest, 6)
    # The lie of 100 would have moved it by 25.
    assert np.abs(own(nodes[12]) - own(honest[12])).max() < 1.0
    # The mean over four sites, of which one has seen nothing new.
    assert metric(strategy, 6, "silent-jobs") >= 3 / 4
    words = {
        "changed": "it cannot be opened",
        "its own": "it is not sealed",
        "an older one": "it is older than one that came before",
        "none": "",
    }[name]
    assert words in caplog.text


def test_what_a_relay_has_changed_counts_for_no_liar(tmp_path):
    # With f = 1 and one of two neighbours cut off, the other may be the liar.
    nodes = sites(tmp_path, 3, Median(f=1))
    start(nodes, 6, Lying(lambda past: changed(past[-1], -1)))
    x = FIRST
    for _ in range(6):
        x = step(x, 2)
    np.testing.assert_allclose(own(nodes[12]), x, atol=1e-12)


def test_a_neighbours_nan_is_left_out_although_the_relay_cannot_see_it(tmp_path, caplog):
    nodes = sites(tmp_path, 4, Median(f=1))
    nodes[11].app = descending_app(ScreenMod(Median(f=1)), poisoned)
    _, strategy, _ = start(nodes, 4)
    assert not strategy.rejections
    assert "leaves out the model of site 1: it holds NaN" in caplog.text
    assert all(np.isfinite(own(node)).all() for key, node in nodes.items() if key != 11)


def poisoned(message, context, call_next):
    reply = call_next(message, context)
    reply.content["arrays"] = record(x=np.full(SIZE, np.nan))
    return reply


def test_a_site_that_was_started_again_opens_its_own_model_and_its_counter_goes_on(tmp_path):
    nodes = sites(tmp_path, 4)

    class Restarting(VirtualGrid):
        def push_messages(self, messages):
            if len(self.sent) == 12:
                nodes[12].restart()
            return super().push_messages(messages)

    grid = Restarting(nodes)
    strategy = FedAvg(stages=[Relay("complete", 4)])
    strategy.start(grid, record(x=FIRST), num_rounds=8)
    assert sum("keeps no model" in reason for _, reason in grid.refused) == 1
    # Its neighbours take what it has sealed since.
    assert metric(strategy, 8, "silent-jobs") == 0
    assert metric(strategy, 8, "screened") == 4


def test_a_relays_rule_leaves_out_what_it_cannot_read(tmp_path):
    nodes = sites(tmp_path, 4)
    grid = VirtualGrid(nodes)
    result = FedAvg(stages=[Relay("complete", 4, MEAN)]).start(grid, record(x=FIRST), num_rounds=3)
    np.testing.assert_array_equal(result.arrays["x"].numpy(), FIRST)


def test_a_relay_rejects_a_sealed_model_that_is_no_bytes(tmp_path):
    nodes = sites(tmp_path, 3)
    nodes[11].lie = lambda body: RecordDict({**body, "arrays": record(sealed=FIRST)})
    _, strategy, _ = start(nodes, 3)
    assert strategy.rejections == {"rejected: dtype": 3}


def test_neighbours_are_who_the_file_says_and_not_who_the_relay_says(tmp_path):
    nodes = sites(tmp_path, 4)
    nodes[12].config = write_keys(tmp_path / "keys", 2, [0, 1])
    nodes[12].restart()
    start(nodes, 3)
    assert nodes[12].context.state["fedstale.seen"]["peers"] == [0, 1]


def test_a_site_with_too_few_keys_for_its_rule_answers_so_before_it_trains(tmp_path):
    nodes = sites(tmp_path, 4, Median(f=2))
    grid = VirtualGrid(nodes)
    with pytest.raises(FedstaleError, match=r"site \d has 3 neighbours, and Median"):
        FedAvg(stages=[Relay("complete", 4)]).start(grid, record(x=FIRST), num_rounds=1)


def answer(site, kind, **records):
    site.context.run_id = RUN
    return site.app(Message(RecordDict(records), 1, kind), site.context)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_server_that_asks_for_a_model_without_a_relay_gets_none(tmp_path, kind):
    (site, *_) = sites(tmp_path, 2).values()
    reply = answer(site, kind, arrays=record(x=FIRST))
    assert "no relay sent this message, and this site seals its models" in reply.error.reason


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_no_arrays_leave_a_site_beside_the_sealed_model(tmp_path, kind):
    def more(message, context, call_next):
        reply = Message(RecordDict(), reply_to=message)
        if kind == "train":
            reply = call_next(message, context)
        reply.content["more"] = record(x=FIRST)
        return reply

    config = write_keys(tmp_path / "keys", 0, [1])
    app = descending_app(ScreenMod(MEAN), more)
    app.query()(lambda message, context: None)
    site = Site(0, app, config=config)
    about = {"fedstale.relay": ConfigRecord({"arrays": "arrays", "peers": []})}
    reply = answer(site, kind, arrays=record(x=FIRST), **({} if kind == "query" else about))
    assert "holds arrays ['more'] besides the model" in reply.error.reason


def test_a_query_that_asks_for_no_arrays_is_answered(tmp_path):
    app = descending_app(ScreenMod(MEAN))
    app.query()(lambda message, context: Message(RecordDict(), reply_to=message))
    site = Site(0, app, config=write_keys(tmp_path / "keys", 0, [1]))
    assert not answer(site, "query").has_error()


def test_one_file_without_the_other_is_refused(tmp_path):
    nodes = sites(tmp_path, 3)
    del nodes[11].config["site-peers"]
    nodes[11].restart()
    grid, _, _ = start(nodes, 1)
    assert any("expected both files, or neither" in reason for _, reason in grid.refused)


def test_files_may_be_named_in_the_app_and_are_read_once(tmp_path, monkeypatch):
    config = write_keys(tmp_path / "keys", 0, [1])
    mod = ScreenMod(MEAN, key=config["site-key"], peers=config["site-peers"])
    site = Site(0, descending_app(mod))
    nodes = {10: site, 11: Site(1, config=write_keys(tmp_path / "keys", 1, [0]))}
    start(nodes, 3)
    (seals,) = mod._known.values()
    assert seals.neighbours == [1]
    assert "sealed" not in site.context.state["fedstale.own"]
