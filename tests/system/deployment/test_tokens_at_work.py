"""Devices that join with a one-time token: at once, killed as they do, and through the proxy.

What lets one in and what does not is tried in everyday tests of the same name.
"""

import json
import re
import signal
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hostile import Device
from joining_link import JoinableLink, asking, write_state
from places import ROOT
from small_deployment import wait_for
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale
from fedstale.deployment import commands
from fedstale.deployment.commands import write_certificates
from fedstale.deployment.enrolment import JoinError, Tokens
from fedstale.deployment.joining import (
    JOIN_PATH,
    digest_of,
    join,
    token_id,
)
from fedstale.deployment.local import LINK, free_port, has_nginx

HOUR_S = 3600.0


@pytest.fixture
def folder(tmp_path):
    return write_state(tmp_path)


def test_of_threads_and_processes_that_claim_one_token_exactly_one_has_it(folder):
    database = folder / "superlink.db"
    made = Tokens(database).make(20, HOUR_S)

    def claimed(digest, key):
        try:
            Tokens(database).claim(digest, key)
        except JoinError as refused:
            return refused.status
        return 200

    with ThreadPoolExecutor(8) as threads:
        for token in made[:10]:
            found = threads.map(lambda i, t=token: claimed(digest_of(t), f"key-{i}"), range(8))
            assert sorted(found) == [200] + [409] * 7
    code = (
        "import sys; from pathlib import Path; from fedstale.deployment.enrolment import *\n"
        "tokens = Tokens(Path(sys.argv[1]))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for digest in sys.argv[3:]:\n"
        "    try: tokens.claim(digest, sys.argv[2]); print('won')\n"
        "    except JoinError as refused: print(refused.status)\n"
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
from joining_link import JoinableLink
from fedstale.deployment.enrolment import Tokens
from fedstale.flower.superlink import NodeRegister

name, when = sys.argv[3], sys.argv[4]
owner = {"register_node": NodeRegister, "finish": Tokens}[name]
call = getattr(owner, name)


def cut(*given):
    if when == "after":
        call(*given)
    os.kill(os.getpid(), signal.SIGKILL)


setattr(owner, name, cut)
JoinableLink(Path(sys.argv[2])).post(json.loads(sys.stdin.read()))
"""


@pytest.mark.parametrize(
    ("call", "when", "n_nodes"),
    [("register_node", "before", 0), ("register_node", "after", 1), ("finish", "after", 1)],
)
def test_a_join_that_is_killed_is_finished_by_the_same_key_and_by_no_other(
    folder, call, when, n_nodes
):
    database = folder / "superlink.db"
    (token,) = Tokens(database).make(1, HOUR_S)
    device = Device()
    here = str(ROOT / "tests" / "fixtures")
    run = subprocess.run(
        [sys.executable, "-c", CUT, here, str(folder), call, when],
        input=json.dumps(asking(token, device)),
        text=True,
        check=False,
        capture_output=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    link = JoinableLink(folder)
    assert len(link.nodes()) == n_nodes
    assert link.post(asking(token, Device(), name="hall")).status_code == 409
    answer = link.post(asking(token, device))
    assert answer.status_code == 200
    assert list(link.nodes()) == ["kitchen"]
    assert link.nodes()["kitchen"].node_id == int(answer.json()["node_id"])
    assert link.activates(device)


def called(*words, code=0, **more):
    result = CliRunner().invoke(fedstale, ["deploy", *map(str, words)], **more)
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.mark.deployment
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
def test_a_device_joins_through_the_proxy_and_is_a_node_like_others(deployment, tmp_path):
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
        environment = deployment.operator_environment()
        unregister = ["fedstale", "flwr", "supernode", "unregister", str(node_id), LINK]
        subprocess.run(
            commands.found(unregister, environment), env=environment, check=True, timeout=60
        )
    gone = called("join", *door, *own, *name, "--token-file", files[0], code=2)
    assert "no node's any more" in gone.stderr
    logs = [path.read_text(errors="replace") for path in deployment.folder.rglob("*.log")]
    joined = rf"node {node_id} has joined from 127.0.0.1: porch, .*, token {token_id(printed[0])}"
    assert re.search(joined, "".join(logs))
    assert "/fedstale/enrol" in "".join(logs)
    assert not [token for token in printed if token in "".join(logs)]


@pytest.mark.deployment
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
def test_a_device_waits_while_others_flood_the_door(deployment, tmp_path):
    (token,) = Tokens.of(deployment.database).make(1, HOUR_S)
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
