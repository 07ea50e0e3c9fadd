"""The commands, units and services that the pages show are the ones that tests run."""

import configparser
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import yaml
from places import ROOT
from shown_commands import OURS, PAGE, UNITS, program, shown
from small_deployment import wait_for

from fedstale.deployment import commands
from fedstale.deployment.commands import write_private
from fedstale.deployment.processes import ProcessGroup

FILES = ROOT / "docs" / "deploy"
KEPT = "/of/superexec/run-1"


# What fedstale starts, and so what is known to work.
def unit(path):
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(path.read_text().replace("\\\n", " "))
    return parser


def options(words):
    return {word.split("=")[0] for word in words if re.match("-[-a-z]", word)}


def test_units_and_pages_show_every_command_that_fedstale_runs():
    assert {program(words) for words in shown()} == set(OURS)


def test_units_and_pages_use_no_option_that_fedstale_does_not():
    for words in shown():
        assert options(words) <= options(OURS[program(words)]), words


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_fedstale_starts(path):
    words = shlex.split(unit(path)["Service"]["ExecStart"])
    assert options(words) == options(OURS[program(words)])
    assert path.stem.rstrip("@") in PAGE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_a_unit_little_exposed(path, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    (copy := tmp_path / path.name.replace("@.", "@9094.")).write_text(path.read_text())
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d)", run.stdout)
    if found is None:
        pytest.skip(f"systemd-analyze knows no --offline: {run.stderr}")
    assert float(found[1]) < 3.0, run.stdout


def test_each_unit_has_a_user_and_a_state_folder_of_its_own_and_checkpoints_a_place():
    services = {path.name: unit(path)["Service"] for path in UNITS}
    texts = {path.name: path.read_text() for path in UNITS}
    users = {name: service.get("User", "root") for name, service in services.items()}
    assert len(set(users.values())) == len(users)
    assert [name for name, user in users.items() if user == "root"] == ["flower-superexec.service"]
    superexec = services["flower-superexec.service"]
    assert "--user flower-app" in superexec["ExecStart"]
    states = {service.get("StateDirectory", "flower-app") for service in services.values()}
    assert len(states) == len(services)
    for service in services.values():
        assert service.get("StateDirectoryMode", "0700") == "0700"
        assert service["UMask"] == "0077"
    # The sandbox lets ServerApps write there, and all that the page shows is there.
    (writable,) = superexec["ReadWritePaths"].split()
    places = r"(?:checkpoints=|resume=|run-folder=|--checkpoints )'?(/[^\s'`]+)"
    shown_at = re.findall(places, PAGE)
    kept = services["flower-run@.service"]["ExecStart"].split("--checkpoints ")[1].split()[0]
    assert len(shown_at) >= 1
    assert {str(Path(path).parent) for path in (*shown_at, kept)} == {writable}
    # Secrets are root's, and each unit gets those that it names.
    for name, service in services.items():
        for word in re.findall(r"%d/(\S+)", service["ExecStart"]):
            assert f"LoadCredential={word}:/etc/flower/" in texts[name]
        assert "/etc/flower/private" not in service["ExecStart"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(path, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    text = path.read_text().replace("/opt/fedstale/bin", str(Path(sys.executable).parent))
    # It need not be installed where the tests run.
    text = text.replace("/usr/sbin/nginx", sys.executable)
    copy = tmp_path / path.name.replace("@.", "@9094.")
    copy.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


@pytest.mark.deployment
@pytest.mark.slow
def test_parts_start_with_the_rights_that_units_leave_them():
    """A SuperLink needs neither network nor capabilities, a SuperExec two of them."""
    if os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")):
        pytest.skip("needs root, setpriv and unshare")

    def limited(capabilities):
        return ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={capabilities}"]

    with TemporaryDirectory() as place, ProcessGroup() as processes:
        folder = Path(place)
        folder.chmod(0o711)
        for name in ("state", "app"):
            (folder / name).mkdir(mode=0o700)
        shutil.chown(folder / "app", "daemon")
        write_private(folder / "secret", bytes(32))
        secret = ["--superexec-auth-secret-file", str(folder / "secret")]
        link = ["fedstale", "deploy", "superlink", "--insecure", "--isolation=process", *secret]
        link += ["--socket", str(at := folder / "link" / "s.sock")]
        link += ["--database", str(folder / "state" / "superlink.db")]
        link += ["--disable-runtime-dependency-installation"]
        execs = ["fedstale", "deploy", "superexec", "--insecure", "--user", "daemon", *secret]
        execs += ["--runtime-api-address", "127.0.0.1:1"]
        for name, home, words in (
            ("link", "state", ["unshare", "-n", *limited("-all"), *link]),
            ("exec", "app", [*limited("-all,+setuid,+setgid"), *execs]),
        ):
            environment = commands.environment(folder / home)
            found = commands.found(words, environment)
            processes.start(name, found, environment=environment, log=folder / f"{name}.log")
        wait_for(at.exists)
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(at))
            asked.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert asked.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: "Connection attempt failed" in (folder / "exec.log").read_text())
        (one,) = [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(folder / "secret") in (process.info["cmdline"] or ())
            and "superexec" in process.info["cmdline"]
            and "fedstale.deployment.processes" not in process.info["cmdline"]
        ]
        assert one.username() == "daemon"


def test_the_services_of_compose_start_what_fedstale_starts():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    started = []
    for service in compose["services"].values():
        words = service["command"]
        started.append(program(words))
        assert options(words) <= options(OURS[started[-1]])
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        given = [Path(word.partition("=")[2] or word) for word in words]
        # The checkpoints of a run are where its ServerApp is.
        for path in {path for path in given if path.is_absolute()} - {Path(KEPT)}:
            assert {str(place) for place in (path, *path.parents)} & mounted, path
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert {name for name in named if not name.startswith(".")} <= set(compose["volumes"])
        assert set(service.get("depends_on", ())) <= set(compose["services"])
    assert sorted(started) == sorted([*(set(OURS) - {"fedstale flwr run"}), "fedstale node"])


def test_compose_gives_each_service_as_little_as_it_can():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    dockerfile = (FILES / "Dockerfile").read_text()
    for name, service in compose["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")
        assert {"mem_limit", "cpus", "pids_limit"} <= set(service), name
        assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"]), name
        assert service["restart"] == ("on-failure" if name == "run" else "always")
        assert re.fullmatch(r"fedstale:\d+\.\d+\.\d+", service["image"])
        user, group = service["user"].split(":")
        if name == "superexec":
            # It becomes another user before any app's code runs, and can do nothing else.
            assert (user, service["cap_add"]) == ("0", ["SETUID", "SETGID"])
            assert "--user=flower-app" in service["command"]
        else:
            assert int(user) > 10_000 < int(group)
            assert "cap_add" not in service
            assert re.search(rf"useradd --uid {user} ", dockerfile)
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            assert mode == ["ro"] or target.startswith(("/of/", "/door")), volume
            assert "docker.sock" not in source
    users = [service["user"] for service in compose["services"].values()]
    # All but the two nodes, which are on machines of their own when they are no trial.
    assert len(set(users)) == len(users) - 1
    assert f"--checkpoints={KEPT}" in compose["services"]["run"]["command"]
    assert f"superexec-state:{Path(KEPT).parent}" in compose["services"]["superexec"]["volumes"]
    pinned = r"^FROM .*:(\S+)$|==([\d.]+)|=(1[\d.]+\*)|^COPY fedstale-([\d.]+)-"
    assert len(re.findall(pinned, dockerfile, re.MULTILINE)) == 4
    assert "latest" not in dockerfile


def test_only_the_doors_are_published():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    published = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}
    assert published == {"doors": ["8000:8000", "8001:8001"]}
    for path in UNITS:
        assert "0.0.0.0" not in path.read_text()
