"""The commands, units and services that docs/deploy.md shows are the ones that tests run."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedstale.deployment import commands
from fedstale.deployment.commands import Address, TlsFiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
FILES = ROOT / "docs" / "deploy"
UNITS = sorted(FILES.glob("*.service"))
AT = Address("127.0.0.1", 8000)
ANY = Path("any")

# What fedstale starts, and so what is known to work.
OURS = {
    "fedstale deploy superlink": commands.superlink(ANY, TlsFiles(ANY, ANY, ANY), ANY, ANY),
    "fedstale deploy superexec": commands.superexec(AT, ANY, ANY, "somebody"),
    "nginx": commands.proxy(ANY, ANY),
    "flower-supernode": commands.supernode(AT, ANY, ANY, port=9094, config={"a": 1}),
    "fedstale flwr run": commands.run(ANY, "name", "a=1"),
}


def program(words):
    """Return which of these programs a command starts, or None."""
    line = " ".join([Path(words[0]).name, *words[1:]]) if words else ""
    return next((name for name in OURS if line.startswith(f"{name} ")), None)


def shown():
    """Return the commands of the page, each as a list of words."""
    for block in re.findall(r"^```(?:sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if program(words):
                yield words


def unit(path):
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(path.read_text().replace("\\\n", " "))
    return parser


def options(words):
    return {word.split("=")[0] for word in words if re.match("-[-a-z]", word)}


def test_the_page_shows_every_command_that_fedstale_runs():
    assert {program(words) for words in shown()} == set(OURS)


def test_the_page_uses_no_option_that_fedstale_does_not():
    for words in shown():
        assert options(words) <= options(OURS[program(words)]), words


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_fedstale_starts(path):
    words = shlex.split(unit(path)["Service"]["ExecStart"])
    assert options(words) == options(OURS[program(words)])
    assert path.name in PAGE


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


def test_the_services_of_compose_start_what_fedstale_starts():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    started = []
    for service in compose["services"].values():
        words = service["command"]
        started.append(program(words))
        assert options(words) <= options(OURS[started[-1]])
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        given = [word.partition("=")[2] or word for word in words]
        assert {word for word in given if word.startswith("/secrets/")} <= mounted
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert {name for name in named if not name.startswith(".")} <= set(compose["volumes"])
        assert set(service.get("depends_on", ())) <= set(compose["services"])
    assert sorted(started) == sorted([*(set(OURS) - {"fedstale flwr run"}), "flower-supernode"])


def test_only_the_doors_are_published():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    published = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}
    assert published == {"doors": ["8000:8000", "8001:8001"]}
    for path in UNITS:
        assert "0.0.0.0" not in path.read_text()
