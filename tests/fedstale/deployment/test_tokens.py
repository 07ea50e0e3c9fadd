"""Devices that join with a one-time token: what lets one in, what lets nobody in, and what is left.

Flower's own app answers here, with its state in SQLite. `test_tokens_at_work.py` joins through a
proxy and kills what joins; `test_stranger.py` attacks the same path while a run goes on.
"""

import asyncio
import json
import os
import sqlite3
import stat

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
)
from flwr.common.constant import NOOP_FLWR_AID
from hostile import Device
from joining_link import JoinableLink, asking, public_line, write_state
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale
from fedstale.deployment.enrolment import NodeKey, Tokens, rotate
from fedstale.deployment.joining import (
    JOIN_PATH,
    digest_of,
    token_id,
)
from fedstale.errors import ConfigError

HOUR_S = 3600.0


@pytest.fixture
def link(tmp_path):
    return JoinableLink(write_state(tmp_path))


def test_a_token_lets_one_key_in_and_the_log_says_who_by_what_and_from_where(link, caplog):
    (token,) = link.tokens.make(1, HOUR_S)
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
    key = NodeKey.parse("", public_line(device)).fingerprint
    joined = f"node {node_id} has joined from 192.0.2.7: kitchen, key {key}, token "
    rejected = "a device at 192.0.2.7 may not join: this token was used by another key, token "
    assert [record.getMessage() for record in caplog.records if "fedstale" in record.name] == [
        *[joined + token_id(token)] * 2,
        rejected + token_id(token),
    ]
    assert token not in caplog.text


def test_of_the_tokens_only_hashes_are_kept_in_a_private_file(link):
    made = link.tokens.make(3, HOUR_S)
    assert len(set(made)) == 3
    assert min(len(token) for token in made) == 43
    link.post(asking(made[0], Device()))
    kept = b"".join(path.read_bytes() for path in link.database.parent.iterdir())
    assert digest_of(made[0]).encode() in kept
    assert not [token for token in made if token.encode() in kept]
    assert stat.S_IMODE(link.tokens.path.stat().st_mode) == 0o600
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


def test_whatever_else_is_sent_lets_nobody_in_uses_no_token_up_and_is_logged(link, caplog):
    (token,) = link.tokens.make(1, HOUR_S)
    tried = [
        (body, status, link.post(body).status_code) for body, status in bodies(token, Device())
    ]
    assert [one for one in tried if one[1] != one[2]] == []
    assert link.nodes() == {}
    assert len([line for line in caplog.messages if "may not join" in line]) == len(tried)
    assert token not in caplog.text
    assert link.post(asking(token, Device())).status_code == 200


def test_other_methods_and_spellings_of_the_path_are_none(link):
    (token,) = link.tokens.make(1, HOUR_S)
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
    (late,) = link.tokens.make(1, -1.0)
    unused, used = link.tokens.make(2, HOUR_S)
    device = Device()
    assert link.post(asking(used, device)).status_code == 200
    assert link.tokens.revoke() == [token_id(unused)]
    for token in (late, unused):
        answer = link.post(asking(token, Device(), name="hall"))
        assert (answer.status_code, answer.json()["detail"]) == (410, "this token has expired")
    assert list(link.nodes()) == ["kitchen"]
    # Who was let in stays in.
    assert link.post(asking(used, device)).status_code == 200
    assert link.activates(device)


def test_a_token_bound_to_a_key_that_has_not_joined_expires_too(link):
    (token,) = link.tokens.make(1, HOUR_S)
    device = Device()
    link.tokens.claim(digest_of(token), NodeKey.parse("", public_line(device)).fingerprint)
    assert link.tokens.revoke() == [token_id(token)]
    assert link.post(asking(token, device)).status_code == 410
    assert link.nodes() == {}


def test_a_used_token_does_not_bring_back_a_key_that_was_rotated_or_revoked(link):
    (first, second) = link.tokens.make(2, HOUR_S)
    rotated, revoked, new = Device(), Device(), Device()
    node_id = int(link.post(asking(first, rotated)).json()["node_id"])
    gone = int(link.post(asking(second, revoked, name="hall")).json()["node_id"])
    key = NodeKey.parse("new", public_line(new))
    assert rotate(link.database, "kitchen", key) == node_id
    link.state.delete_node(NOOP_FLWR_AID, gone)
    for token, device, name in ((first, rotated, "kitchen"), (second, revoked, "hall")):
        for called in (name, "another"):
            answer = link.post(asking(token, device, name=called))
            assert answer.status_code == 410
            assert "no node's any more" in answer.json()["detail"]
        assert not link.activates(device)
    assert link.activates(new)


def test_a_name_that_is_taken_costs_no_token(link):
    first, second = link.tokens.make(2, HOUR_S)
    device = Device()
    assert link.post(asking(first, Device())).status_code == 200
    answer = link.post(asking(second, device))
    assert answer.status_code == 409
    assert "registered with another key" in answer.json()["detail"]
    # Another key cannot have the token meanwhile.
    assert link.post(asking(second, Device(), name="hall")).status_code == 409
    assert link.post(asking(second, device, name="hall")).status_code == 200


def test_of_many_who_show_one_token_at_once_exactly_one_joins(link):
    (token,) = link.tokens.make(1, HOUR_S)
    asked = [asking(token, Device(), name=f"node-{i}") for i in range(12)]

    async def together():
        transport = httpx.ASGITransport(link.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://link") as client:
            return await asyncio.gather(*(client.post(JOIN_PATH, json=one) for one in asked))

    found = sorted(answer.status_code for answer in asyncio.run(together()))
    assert found == [200] + [409] * 11
    assert len(link.nodes()) == 1


def test_what_the_server_cannot_do_is_503_and_the_token_waits(link, monkeypatch):
    (token,) = link.tokens.make(1, HOUR_S)
    device = Device()

    def broken(*given, **more):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(type(link.state), "create_node", broken)
        answer = link.post(asking(token, device))
    assert (answer.status_code, "disk" in answer.text) == (503, False)
    assert link.post(asking(token, device)).status_code == 200


def test_the_address_is_the_proxy_s_word_at_its_socket_alone(link, caplog):
    def last(client, **headers):
        link.post(b"{}", client=client, headers=headers)
        return caplog.messages[-1].split()[3]

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
    for words in (["--valid", "soon"], ["--valid", "0h"], ["--valid", "400d"]):
        assert "valid = " in called("tokens", *at, *words, code=2).stderr
    nowhere = ("--database", tmp_path / "nowhere" / "x.db")
    assert "expected the file" in called("tokens", *nowhere, code=2).stderr


def test_tokens_are_made_by_the_user_of_the_database(link, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: link.database.stat().st_uid + 1)
    refused = called("tokens", "--database", link.database, code=2)
    assert "run this as that user" in refused.stderr


def write_public(path, device):
    path.write_text(public_line(device))
    return path


def test_another_key_keeps_the_node_s_id_and_ends_the_old_key(link, tmp_path):
    old, new = Device(), Device()
    (token,) = link.tokens.make(1, HOUR_S)
    node_id = int(link.post(asking(token, old)).json()["node_id"])
    key, at = write_public(tmp_path / "new.pub", new), ("--database", link.database)
    assert f"node {node_id} has another key" in called("rotate", "kitchen", key, *at).stdout
    assert not link.activates(old)
    assert link.activates(new)
    again = called("rotate", str(node_id), key, *at)
    assert f"node {node_id} has another key" in again.stdout
    for who, said in (("attic", "0 registered nodes"), ("hall", "was registered before")):
        if who == "hall":
            (token,) = link.tokens.make(1, HOUR_S)
            link.post(asking(token, Device(), name="hall"))
        assert said in called("rotate", who, key, *at, code=2).stderr
    (tmp_path / "none").write_text("nothing")
    assert "no public key" in called("rotate", "hall", tmp_path / "none", *at, code=2).stderr


def test_keys_of_other_curves_and_files_that_are_no_database_are_refused(tmp_path):
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with pytest.raises(ConfigError, match="expected a key of a NIST curve"):
        NodeKey.parse("a", line)
    (tmp_path / "none.db").write_bytes(b"no database" * 100)
    key = write_public(tmp_path / "key.pub", Device())
    refused = called("rotate", "a", key, "--database", tmp_path / "none.db", code=2)
    assert "expected the file of flower-superlink" in refused.stderr
