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
from small_deployment import apart, superexec

from fedstale.deployment import commands
from fedstale.deployment.commands import Address, TlsFiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
FILES = ROOT / "docs" / "deploy"
UNITS = sorted(FILES.glob("*.service"))
AT = Address("127.0.0.1", 8000)
ANY = Path("any")

# What fedstale and its tests start, and so what is known to work.
OURS = {
    "flower-superlink": commands.superlink(AT, TlsFiles(ANY, ANY, ANY), ANY) + apart(ANY),
    "flower-superexec": superexec(AT, ANY, ANY),
    "flower-supernode": commands.supernode(AT, ANY, ANY, port=9094, config={"a": 1}),
    "flwr": commands.run(ANY, "name", "a=1"),
}


def shown():
    """Return the commands of the page, each as a list of words."""
    for block in re.findall(r"^```(?:sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and Path(words[0]).name in OURS:
                yield words


def unit(path):
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(path.read_text().replace("\\\n", " "))
    return parser


def options(words):
    return {word.split("=")[0] for word in words if word.startswith("--")}


def test_the_page_shows_every_command_that_fedstale_runs():
    assert {Path(words[0]).name for words in shown()} == set(OURS)


def test_the_page_uses_no_option_that_fedstale_does_not():
    for words in shown():
        if words[0] == "flwr" and words[1] != "run":
            continue
        assert options(words) <= options(OURS[words[0]]), words


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_fedstale_starts(path):
    words = shlex.split(unit(path)["Service"]["ExecStart"])
    assert options(words) == options(OURS[Path(words[0]).name])
    assert path.name in PAGE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(path, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    text = path.read_text().replace("/opt/fedstale/bin", str(Path(sys.executable).parent))
    copy = tmp_path / path.name.replace("@.", "@9094.")
    copy.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


def test_the_services_of_compose_start_what_fedstale_starts():
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    names = {"flower-superlink": 0, "flower-supernode": 0}
    volumes = set(compose["volumes"])
    for service in compose["services"].values():
        program, *words = service["command"]
        names[program] += 1
        assert options(words) <= options(OURS[program])
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        for word in words:
            value = word.partition("=")[2]
            if value.startswith("/secrets/"):
                assert value in mounted
        assert {volume.split(":")[0] for volume in service["volumes"][-1:]} <= volumes or (
            program == "flower-superlink"
        )
        assert set(service.get("depends_on", ())) <= set(compose["services"])
    assert names == {"flower-superlink": 1, "flower-supernode": 2}
