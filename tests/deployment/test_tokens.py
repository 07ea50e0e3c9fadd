"""Devices that join with a one-time token: what lets one in, what lets nobody in, and what is left.

Flower's own app answers here, with its state in SQLite; `test_stranger.py` attacks the same path
through the proxy while a run goes on.
"""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import sqlite3
import ssl
import stat
import subprocess
import sys
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
)
from flwr.common.constant import NOOP_FLWR_AID
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app
from hostile import Device
from small_deployment import wait_for
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale
from fedstale.deployment import commands, tokens
from fedstale.deployment.audit import LOG, AuditLog
from fedstale.deployment.commands import write_certificates
from fedstale.deployment.enrolment import NodeKey, rotate
from fedstale.deployment.joining import (
    JOIN_PATH,
    SIGNED_WITH,
    digest_of,
    join,
    statement,
    token_id,
)
from fedstale.deployment.local import free_port, has_nginx
from fedstale.deployment.superlink import guarded
from fedstale.deployment.tokens import RefusalError, Tokens, joinable
from fedstale.errors import ConfigError

# Alembic warns of how Flower calls it.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
EMPTY = {field.name: None for field in dataclasses.fields(SuperLinkLifespanConfig)}
HOUR_S = 3600.0


def public_line(device):
    return device.key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def asking(token, device, name="kitchen", signer=None, **changes):
    """Return what a device sends; `signer` holds another key than the one that is sent."""
    public = public_line(device)
    said = statement(digest_of(token), public, name)
    signature = b64encode((signer or device).key.sign(said, SIGNED_WITH)).decode()
    asked = {"token": token, "public_key": public, "name": name, "signature": signature}
    return {**asked, **changes}


class SuperLink:
    """Flower's app behind both gates, on files of a folder, without a network."""

    def __init__(self, folder):
        self.database = folder / "superlink.db"
        self.database.touch(mode=0o600)
        config = SuperLinkLifespanConfig(
            **EMPTY
            | {
                "authn_plugin": load_control_authn_plugin(),
                "enable_supernode_auth": True,
                "simulation": False,
                "database": str(self.database),
                "isolation": "process",
            }
        )
        self.app = joinable(guarded(create_app(config, SuperLinkLifespan)), self.database)
        self.log = AuditLog(folder / LOG, user="tests")
        self.tokens = Tokens.of(self.database)
        self.state = self.app.state.linkstate_factory.state()

    def post(self, content, path=JOIN_PATH, *, method="POST", client=("192.0.2.7", 1), **options):
        body = json.dumps(content).encode() if isinstance(content, dict) else content

        async def send():
            transport = httpx.ASGITransport(self.app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url="http://link") as caller:
                return await caller.request(method, path, content=body, **options)

        return asyncio.run(send())

    def nodes(self):
        return {node.name: node for node in self.state.get_node_info()}

    def activates(self, device):
        """Return whether Flower itself lets a device in."""
        answer = self.post(
            device.joining().SerializeToString(),
            "/v1/fleet/activate-node",
            headers=device.headers(),
        )
        return answer.status_code == 200

    def lines(self):
        text = self.log.path.read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Make a database once, since Flower takes seconds for it."""
    (made := tmp_path_factory.mktemp("fresh") / "state").mkdir(mode=0o700)
    return SuperLink(made).database


@pytest.fixture
def folder(fresh, tmp_path):
    (made := tmp_path / "state").mkdir(mode=0o700)
    shutil.copy(fresh, made)
    return made


@pytest.fixture
def link(folder):
    return SuperLink(folder)


def test_a_token_lets_one_key_in_and_the_log_says_who_by_what_and_from_where(link):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    device, other = Device(), Device()
    assert not link.activates(device)
    answer = link.post(asking(token, device))
    assert answer.status_code == 200
    node_id = int(answer.json()["node_id"])
    assert link.nodes()["kitchen"].node_id == node_id
    assert link.activates(device)
    # The same key gets the same answer, and is no second node; another key is refused.
    assert link.post(asking(token, device)).json() == answer.json()
    refused = link.post(asking(token, other, name="hall"))
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "this token was used by another key",
    )
    assert not link.activates(other)
    assert list(link.nodes()) == ["kitchen"]
    done, refused = [
        line for line in link.lines() if line["what"] == "enrol" and line["outcome"] != "tried"
    ]
    assert (done["node_id"], done["token"]) == (str(node_id), token_id(token))
    assert done["key"] == NodeKey.parse("", public_line(device)).fingerprint
    assert done["address"] == refused["address"] == "192.0.2.7"
    assert (refused["outcome"], refused["token"]) == ("refused", token_id(token))
    assert all({"at", "user", "host"} <= line.keys() for line in link.lines())
    assert token not in link.log.path.read_text()


def test_of_the_tokens_only_hashes_are_kept_in_a_private_file(link):
    made = link.tokens.make(3, HOUR_S, link.log)
    assert len(set(made)) == 3
    assert min(len(token) for token in made) == 43
    link.post(asking(made[0], Device()))
    kept = b"".join(path.read_bytes() for path in link.database.parent.iterdir())
    assert digest_of(made[0]).encode() in kept
    assert not [token for token in made if token.encode() in kept]
    for path in (link.tokens.path, link.log.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link.tokens.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tokens(link.database)


def bodies(token, victim):
    """Yield bodies that let nobody in, and what comes of each."""
    device = Device()
    yield asking("x" * 43, device), 403
    yield asking(token, device, signer=victim), 403
    yield asking(token, victim, signer=device), 403
    # A signature of another name, token or key.
    good = asking(token, device)
    yield {**good, "name": "hall"}, 403
    yield {**good, "token": "x" * 43}, 403
    yield {**good, "public_key": public_line(victim)}, 403
    edwards = ed25519.Ed25519PrivateKey.generate().public_key()
    line = edwards.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    for changes in (
        {"name": "17"},
        {"name": "a\nb"},
        {"name": ""},
        {"name": "a" * 64},
        {"name": "٣"},
        {"token": 5},
        {"token": "\u00e9"},
        {"token": "\ud800"},
        {"public_key": "nothing"},
        {"public_key": line},
        {"public_key": None},
        {"signature": "*"},
        {"signature": []},
    ):
        yield {**good, **changes}, 400
    missing = dict(good)
    del missing["signature"]
    yield missing, 400
    for text in (b"", b"{", b"[]", b'"token"', b"null", b"\xff\xfe", b"[" * 4000, b"0" * 4096):
        yield text, 400
    yield b" " * 4097, 413
    yield b"x" * (1 << 20), 413


def test_whatever_else_is_sent_lets_nobody_in_uses_no_token_up_and_is_logged(link):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    tried = [
        (body, status, link.post(body).status_code) for body, status in bodies(token, Device())
    ]
    assert [one for one in tried if one[1] != one[2]] == []
    assert link.nodes() == {}
    refused = [line for line in link.lines() if line["outcome"] == "refused"]
    assert len(refused) == len(tried)
    assert token not in link.log.path.read_text()
    assert link.post(asking(token, Device())).status_code == 200


def test_other_methods_and_spellings_of_the_path_are_none(link):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    good = asking(token, Device())
    for method in ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"):
        assert link.post(good, method=method).status_code == 405
    for path in (
        f"/{JOIN_PATH}",
        f"{JOIN_PATH}/",
        JOIN_PATH.upper(),
        f"{JOIN_PATH}/x",
        "/fedstale",
    ):
        assert link.post(good, f"http://link{path}").status_code == 404
    assert link.nodes() == {}


def test_a_body_is_not_read_beyond_its_limit(link):
    sent = []

    async def chunks():
        for _ in range(1000):
            sent.append(1024)
            yield b" " * 1024

    assert link.post(chunks()).status_code == 413
    assert sum(sent) <= 6 * 1024
    # What is announced as too long is not read at all.
    assert link.post(b"", headers={"content-length": str(1 << 40)}).status_code == 413
    assert link.post(b"", headers={"content-length": "-1"}).status_code == 413


def test_a_token_expires_and_can_be_made_to(link):
    (late,) = link.tokens.make(1, -1.0, link.log)
    unused, used = link.tokens.make(2, HOUR_S, link.log)
    device = Device()
    assert link.post(asking(used, device)).status_code == 200
    assert link.tokens.revoke(link.log) == [token_id(unused)]
    for token in (late, unused):
        answer = link.post(asking(token, Device(), name="hall"))
        assert (answer.status_code, answer.json()["detail"]) == (410, "this token has expired")
    assert list(link.nodes()) == ["kitchen"]
    # Who was let in stays in.
    assert link.post(asking(used, device)).status_code == 200
    assert link.activates(device)


def test_a_token_bound_to_a_key_that_has_not_joined_expires_too(link):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    device = Device()
    link.tokens.claim(digest_of(token), NodeKey.parse("", public_line(device)).fingerprint)
    assert link.tokens.revoke(link.log) == [token_id(token)]
    assert link.post(asking(token, device)).status_code == 410
    assert link.nodes() == {}


def test_a_used_token_does_not_bring_back_a_key_that_was_rotated_or_revoked(link):
    (first, second) = link.tokens.make(2, HOUR_S, link.log)
    rotated, revoked, new = Device(), Device(), Device()
    node_id = int(link.post(asking(first, rotated)).json()["node_id"])
    gone = int(link.post(asking(second, revoked, name="hall")).json()["node_id"])
    key = NodeKey.parse("new", public_line(new))
    assert rotate(link.database, "kitchen", key, link.log) == node_id
    link.state.delete_node(NOOP_FLWR_AID, gone)
    for token, device, name in ((first, rotated, "kitchen"), (second, revoked, "hall")):
        for called in (name, "another"):
            answer = link.post(asking(token, device, name=called))
            assert answer.status_code == 410
            assert "no node's any more" in answer.json()["detail"]
        assert not link.activates(device)
    assert link.activates(new)


def test_a_name_that_is_taken_costs_no_token(link):
    first, second = link.tokens.make(2, HOUR_S, link.log)
    device = Device()
    assert link.post(asking(first, Device())).status_code == 200
    answer = link.post(asking(second, device))
    assert answer.status_code == 409
    assert "registered with another key" in answer.json()["detail"]
    # Another key cannot have the token meanwhile.
    assert link.post(asking(second, Device(), name="hall")).status_code == 409
    assert link.post(asking(second, device, name="hall")).status_code == 200


def test_of_many_who_show_one_token_at_once_exactly_one_joins(link):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    asked = [asking(token, Device(), name=f"node-{i}") for i in range(12)]

    async def together():
        transport = httpx.ASGITransport(link.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://link") as client:
            return await asyncio.gather(*(client.post(JOIN_PATH, json=one) for one in asked))

    found = sorted(answer.status_code for answer in asyncio.run(together()))
    assert found == [200] + [409] * 11
    assert len(link.nodes()) == 1


def test_of_threads_and_processes_that_claim_one_token_exactly_one_has_it(folder):
    database = folder / "superlink.db"
    made = Tokens(database).make(20, HOUR_S, AuditLog(folder / LOG))

    def claimed(digest, key):
        try:
            Tokens(database).claim(digest, key)
        except RefusalError as refused:
            return refused.status
        return 200

    with ThreadPoolExecutor(8) as threads:
        for token in made[:10]:
            found = threads.map(lambda i, t=token: claimed(digest_of(t), f"key-{i}"), range(8))
            assert sorted(found) == [200] + [409] * 7
    code = (
        "import sys; from pathlib import Path; from fedstale.deployment.tokens import *\n"
        "tokens = Tokens(Path(sys.argv[1]))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for digest in sys.argv[3:]:\n"
        "    try: tokens.claim(digest, sys.argv[2]); print('won')\n"
        "    except RefusalError as refused: print(refused.status)\n"
    )
    digests = [digest_of(token) for token in made[10:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(database), key, *digests], **pipes)
        for key in ("key-a", "key-b")
    ]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    found = [one.communicate(timeout=60)[0].split() for one in both]
    assert {tuple(sorted(pair)) for pair in zip(*found, strict=True)} == {("409", "won")}


# Ends the process as kill -9 does, before or after the call that is named.
CUT = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_tokens import SuperLink
from fedstale.deployment.enrolment import Registry
from fedstale.deployment.tokens import Tokens

name, when = sys.argv[3], sys.argv[4]
owner = {"enrol": Registry, "finish": Tokens}[name]
call = getattr(owner, name)


def cut(*given):
    if when == "after":
        call(*given)
    os.kill(os.getpid(), signal.SIGKILL)


setattr(owner, name, cut)
SuperLink(Path(sys.argv[2])).post(json.loads(sys.stdin.read()))
"""


@pytest.mark.parametrize(
    ("call", "when", "n_nodes"),
    [("enrol", "before", 0), ("enrol", "after", 1), ("finish", "after", 1)],
)
def test_a_join_that_is_killed_is_finished_by_the_same_key_and_by_no_other(
    folder, call, when, n_nodes
):
    database = folder / "superlink.db"
    (token,) = Tokens(database).make(1, HOUR_S, AuditLog(folder / LOG))
    device = Device()
    here = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", CUT, here, str(folder), call, when],
        input=json.dumps(asking(token, device)),
        text=True,
        check=False,
        capture_output=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    link = SuperLink(folder)
    assert len(link.nodes()) == n_nodes
    assert link.post(asking(token, Device(), name="hall")).status_code == 409
    answer = link.post(asking(token, device))
    assert answer.status_code == 200
    assert list(link.nodes()) == ["kitchen"]
    assert link.nodes()["kitchen"].node_id == int(answer.json()["node_id"])
    assert link.activates(device)


def test_what_the_server_cannot_do_is_503_and_the_token_waits(link, monkeypatch):
    (token,) = link.tokens.make(1, HOUR_S, link.log)
    device = Device()

    def broken(*given, **more):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(type(link.state), "create_node", broken)
        answer = link.post(asking(token, device))
    assert (answer.status_code, "disk" in answer.text) == (503, False)
    assert link.lines()[-1]["outcome"] == "failed"
    assert link.post(asking(token, device)).status_code == 200


def test_a_stranger_does_not_fill_the_log(link, monkeypatch):
    (used,) = link.tokens.make(1, HOUR_S, link.log)
    assert link.post(asking(used, Device())).status_code == 200
    before = len(link.lines())
    monkeypatch.setattr(tokens.time, "monotonic", lambda: 1e6)
    for _ in range(70):
        assert link.post(b"{}").status_code == 400
    assert len(link.lines()) == before + 60
    # Who holds a token of this server is not hidden by that.
    assert link.post(asking(used, Device())).status_code == 409
    assert (link.lines()[-1]["token"], link.lines()[-1]["left_out"]) == (token_id(used), 10)
    monkeypatch.setattr(tokens.time, "monotonic", lambda: 1e6 + 60)
    assert link.post(b"{}").status_code == 400
    assert "left_out" not in link.lines()[-1]
    assert len(link.lines()) == before + 62


def test_the_address_is_the_proxy_s_word_at_its_socket_alone(link):
    def last(client, **headers):
        link.post(b"{}", client=client, headers=headers)
        return link.lines()[-1]["address"]

    assert last(None, **{"X-Real-IP": "203.0.113.9"}) == "203.0.113.9"
    assert last(("192.0.2.7", 1), **{"X-Real-IP": "203.0.113.9"}) == "192.0.2.7"


def called(*words, code=0, **more):
    result = CliRunner().invoke(fedstale, ["deploy", *map(str, words)], **more)
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_the_command_prints_tokens_once_and_ends_them(link, tmp_path):
    at = ("--database", link.database)
    printed = called("tokens", "--count", 3, *at).stdout.split()
    found = json.loads(called("tokens", *at, "--json").stdout)["tokens"]
    ((token_name, token),) = found.items()
    assert token_name == token_id(token)
    assert link.post(asking(printed[0], Device())).status_code == 200
    gone = json.loads(called("tokens", "--revoke", *at, "--json").stdout)["revoked"]
    assert set(gone) == {token_name, *(token_id(one) for one in printed[1:])}
    assert link.post(asking(token, Device(), name="hall")).status_code == 410
    made = [line for line in link.lines() if line["what"] == "make tokens"]
    assert [line["outcome"] for line in made] == ["tried", "done"] * 2
    assert made[0]["tokens"] == [token_id(one) for one in printed]
    for words in (["--valid", "soon"], ["--valid", "0h"], ["--valid", "400d"]):
        assert "valid = " in called("tokens", *at, *words, code=2).stderr
    nowhere = ("--database", tmp_path / "nowhere" / "x.db")
    assert "expected the file" in called("tokens", *nowhere, code=2).stderr


@pytest.mark.deployment
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
def test_a_device_joins_through_the_proxy_and_is_a_node_like_others(
    deployment, tmp_path, monkeypatch
):
    """From a token to a SuperNode that is online, with nothing secret left where it should not."""
    printed = called("tokens", "--count", 2, "--database", deployment.database).stdout.split()
    files = [tmp_path / f"token-{i}" for i in range(2)]
    for file, token in zip(files, printed, strict=True):
        commands.write_private(file, token.encode() + b"\n")
    door = ("--server", deployment.at, "--ca", deployment.tls.ca)
    own, name = ("--key", tmp_path / "node" / "key"), ("--name", "porch")
    joined = called("join", *door, *own, *name, "--token-file", files[0])
    node_id = int(re.search(r"node (\d+), porch", joined.stdout)[1])
    try:
        assert deployment.control.nodes()[node_id] == "registered"
        assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "node" / "key").stat().st_mode) == 0o600
        # The token by stdin, and the same again.
        again = called(
            "join", *door, *own, *name, "--token-file", "-", "--json", input=f"{printed[0]}\n"
        )
        assert json.loads(again.stdout)["node_id"] == str(node_id)
        another = ("--key", tmp_path / "other" / "key", "--name", "attic")
        refused = called("join", *door, *another, "--token-file", files[0], code=2)
        assert "this token was used by another key" in refused.stderr
        taken = called("join", *door, *another[:2], *name, "--token-file", files[1], code=2)
        assert "registered with another key" in taken.stderr
        # Flower's own SuperNode comes in with the key.
        deployment._node_commands["porch"] = commands.supernode(
            deployment.at, deployment.tls.ca, own[1], port=free_port(), config={}
        )
        deployment.start("porch")
        wait_for(lambda: deployment.control.nodes()[node_id] == "online")
        deployment.processes.kill("porch")
    finally:
        monkeypatch.setenv("FLWR_HOME", deployment.operator_environment()["FLWR_HOME"])
        called("revoke", "porch", "--audit", tmp_path / "operator.jsonl")
    gone = called("join", *door, *own, *name, "--token-file", files[0], code=2)
    assert "no node's any more" in gone.stderr
    text = (deployment.database.parent / LOG).read_text()
    (done,) = [
        line
        for line in map(json.loads, text.splitlines())
        if (line["what"], line["outcome"], line.get("name")) == ("enrol", "done", "porch")
    ]
    assert (done["node_id"], done["token"]) == (str(node_id), token_id(printed[0]))
    assert done["address"] == "127.0.0.1"
    logs = [path.read_text(errors="replace") for path in deployment.folder.rglob("*.log")]
    assert "/fedstale/enrol" in "".join(logs)
    assert not [token for token in printed if token in "".join([text, *logs])]


@pytest.mark.deployment
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
def test_a_device_waits_while_others_flood_the_door(deployment, tmp_path):
    (token,) = Tokens.of(deployment.database).make(1, HOUR_S, AuditLog(tmp_path / "audit"))
    is_full, is_over, said = threading.Event(), threading.Event(), []

    def flood():
        trusted = ssl.create_default_context(cafile=str(deployment.tls.ca))
        with httpx.Client(verify=trusted, timeout=60.0) as client:
            while not is_over.is_set():
                answer = client.post(f"https://{deployment.at}{JOIN_PATH}", content=b"{}")
                if answer.status_code == 503:
                    is_full.set()

    def heard(line):
        said.append(line)
        is_over.set()

    with ThreadPoolExecutor(1) as threads:
        flooding = threads.submit(flood)
        try:
            assert is_full.wait(100)
            key = tmp_path / "node" / "key"
            node_id = join(deployment.at, deployment.tls.ca, token, key, "shed", say=heard)
        finally:
            is_over.set()
        flooding.result()
    assert "is busy: trying again in 2 s" in said[0]
    assert deployment.control.nodes()[node_id] == "registered"


@pytest.mark.deployment
def test_a_device_says_in_a_sentence_what_is_wrong_and_sends_no_token(deployment, tmp_path):
    (other := tmp_path / "other").mkdir()
    commands.write_private(tmp_path / "token", b"secret")
    given = ("--key", tmp_path / "node" / "key", "--token-file", tmp_path / "token")
    ca, at = ("--ca", deployment.tls.ca), ("--server", deployment.at)
    wrong = ("--ca", write_certificates(other, ["127.0.0.1"]).ca)
    said = called("join", *at, *wrong, *given, code=2).stderr
    assert "was not signed by the given authority" in said
    nowhere = ("--server", f"127.0.0.1:{free_port()}")
    assert "nothing listens" in called("join", *nowhere, *ca, *given, code=2).stderr
    assert not (tmp_path / "node").exists()
    assert "none of this server's" in called("join", *at, *ca, *given, "--name", "a", code=2).stderr
    assert "name = '17'" in called("join", *at, *ca, *given, "--name", "17", code=2).stderr
    (tmp_path / "node").chmod(0o755)
    assert "chmod 700" in called("join", *at, *ca, *given, "--name", "a", code=2).stderr
    (tmp_path / "node").chmod(0o700)
    (tmp_path / "node" / "key").write_bytes(b"no key")
    said = called("join", *at, *ca, *given, "--name", "a", code=2).stderr
    assert "cannot be used" in said
    (tmp_path / "token").chmod(0o644)
    assert "chmod 600" in called("join", *at, *ca, *given, code=2).stderr
    for text in ("", "a b\nc", "\x00", "x" * 300):
        said = called("join", *at, *ca, *given[:2], "--token-file", "-", code=2, input=text).stderr
        assert "expected one token" in said


def test_tokens_are_made_by_the_user_of_the_database(link, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: link.database.stat().st_uid + 1)
    refused = called("tokens", "--database", link.database, code=2)
    assert "run this as that user" in refused.stderr
