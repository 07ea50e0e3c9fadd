"""Keys, secrets, databases, checkpoints, journals, recordings are their owner's by any umask."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from databases import write_fresh
from open_files import open_to_others
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale
from fedstale.deployment.diagnosis import show_certificate
from fedstale.deployment.local import LocalDeployment
from fedstale.deployment.superlink import check_database, hold_database, run
from fedstale.errors import ConfigError
from fedstale.files import check_private
from fedstale.strategies import Checkpoints

INIT = ("deploy", "init", "server", "--host", "x.example.org", "--operator", "alice=run")


@pytest.fixture(params=[0o000, 0o022], ids=["umask-000", "umask-022"])
def _umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def called(*words):
    return CliRunner().invoke(fedstale, [*map(str, words)])


@pytest.mark.usefixtures("_umask")
def test_what_init_writes_is_private(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called(*INIT).exit_code == 0
    assert open_to_others(tmp_path / "server") == set()
    assert len([path for path in (tmp_path / "server").rglob("*") if path.is_file()]) == 19


@pytest.fixture
def _unheard(monkeypatch):
    """Let ports be found, at which nothing listens."""
    monkeypatch.setattr(socket.socket, "listen", lambda *backlog: None)


@pytest.mark.usefixtures("_umask", "_unheard")
def test_a_deployment_s_folder_is_private(tmp_path):
    made = LocalDeployment(tmp_path / "up", nodes=1, has_proxy=True)
    assert open_to_others(made.folder) == set()


@pytest.mark.usefixtures("_umask")
def test_checkpoints_are_private_and_a_folder_that_others_may_change_is_refused(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "in" / "kept")
    checkpoints.keep(1, lambda: {"w": np.zeros(3)})
    assert open_to_others(checkpoints.folder) == set()
    assert len(list(checkpoints.folder.iterdir())) == 1

    (readable := tmp_path / "readable").mkdir(mode=0o755)
    readable.chmod(0o755)
    Checkpoints(readable)
    assert f"mode 0755, and other users may enter it: chmod 700 {readable}" in caplog.text
    readable.chmod(0o775)
    with pytest.raises(ConfigError, match=r"mode 0775, .* may change it: chmod go-w "):
        Checkpoints(readable)
    # There, others could add a later version.
    readable.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"mode 1777, .* may change it: chmod go-w "):
        Checkpoints(readable)
    (readable / "key").touch(mode=0o600)
    check_private("--ssl-keyfile", readable / "key")
    with pytest.raises(ConfigError, match="mode 1777"):
        check_private("--database", readable / "key", folder=True)


@pytest.mark.usefixtures("_umask")
def test_a_journal_and_its_recording_are_private(tmp_path):
    (journal := tmp_path / "phone.parquet.journal").mkdir()
    out, rest = tmp_path / "phone.parquet", ("--compute", "1e9 flop")
    result = called("traces", "record", "--out", out, "--every", "1s", "--for", "1s", *rest)
    assert result.exit_code == 0, result.output
    files = sorted(file.name for file in journal.iterdir())
    assert any(name.endswith(".sqlite") for name in files)
    assert open_to_others(journal) == open_to_others(out) == set()


@pytest.mark.parametrize("option", ["--ssl-keyfile", "--superexec-auth-secret-file", "--database"])
def test_a_superlink_names_the_file_that_others_may_read(tmp_path, option):
    (folder := tmp_path / "server").mkdir(mode=0o700)
    (path := folder / "file").touch()
    before = os.umask(0o022)
    path.chmod(0o644)
    with pytest.raises(ConfigError) as refused:
        run([option, str(path)])
    assert str(refused.value) == (
        f"{option}: {path} has mode 0644, and other users may read it: chmod 600 {path}"
    )
    path.chmod(0o600)
    folder.chmod(0o777)
    with pytest.raises(ConfigError) as refused:
        run([option, str(path)])
    os.umask(before)
    chmod = "700" if option == "--database" else "go-w"
    assert str(refused.value) == (
        f"{option}: {folder} has mode 0777, and other users may change it: chmod {chmod} {folder}"
    )


DAMAGED = {
    "no database": lambda whole: b"rows of another program",
    "a half": lambda whole: whole[: len(whole) // 2],
    "a header of noise": lambda whole: b"\xff" * 100 + whole[100:],
    "pages of noise": lambda whole: whole[:8192] + b"\xff" * (len(whole) - 8192),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_superlink_does_not_start_with_a_damaged_database(tmp_path, damage):
    (folder := tmp_path / "state").mkdir(mode=0o700)
    database = write_fresh(folder / "superlink.db")
    check_database(database)
    before = DAMAGED[damage](database.read_bytes())
    database.write_bytes(before)
    mask = os.umask(0o077)
    with pytest.raises(ConfigError, match=r"cannot be used: .*; if .* go on from .*checkpoints$"):
        run(["--database", str(database)])
    os.umask(mask)
    # Whoever knows how to save some of it still can.
    assert database.read_bytes() == before


def test_a_second_superlink_is_kept_from_the_database(tmp_path):
    (folder := tmp_path / "state").mkdir(mode=0o700)
    database = folder / "superlink.db"
    descriptor = hold_database(database)
    with pytest.raises(ConfigError, match=f"in use by a SuperLink, process {os.getpid()} of"):
        hold_database(database)
    os.close(descriptor)
    os.close(hold_database(database))
    assert open_to_others(folder) == set()


def test_a_superexec_and_an_operator_show_no_key_that_others_may_read(tmp_path):
    tmp_path.chmod(0o700)
    (path := tmp_path / "secret").write_bytes(bytes(32))
    path.chmod(0o640)
    result = called("deploy", "superexec", "--superexec-auth-secret-file", path)
    assert result.exit_code == 2
    assert f"{path} has mode 0640" in result.stderr
    with pytest.raises(ConfigError, match=f"client-certificate: {path} has mode 0640"):
        show_certificate(None, path)


def test_what_systemd_gave_to_a_service_alone_is_taken_as_it_is(tmp_path, monkeypatch):
    (path := tmp_path / "server.key").touch()
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="0440"):
        check_private("--ssl-keyfile", path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    check_private("--ssl-keyfile", path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(Path(tmp_path / "other")))
    with pytest.raises(ConfigError, match="0440"):
        check_private("--ssl-keyfile", path)
