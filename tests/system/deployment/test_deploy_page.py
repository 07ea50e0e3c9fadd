"""What docs/deploy.md shows is pasted, as it stands, on a machine that has none of it.

The machine is this one with private mounts, processes and network (tests/fixtures/machine): what
the commands write ends with it. What stands for something else there:

- `scp` and `ssh`: every other machine is this one;
- a line in /etc/hosts: the name service;
- `systemctl`: starts what the units' files say, without their sandbox;
- the block that installs packages is not run: /opt/fedstale leads to the tests' environment.

Left out are the blocks of `fedstale up`, which test_local_deployment.py runs, and of containers.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from safetensors.numpy import load_file

from fedstale.deployment.local import has_nginx
from fedstale.reports.run import Run

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx"),
]

MACHINE = ROOT / "tests" / "fixtures" / "machine" / "machine.sh"
BLOCK = re.compile(r"^```(?:sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = {"Try it on one machine", "Install", "Containers"}

BEFORE = "fedstale new my_app\n"
AFTER = """
until ls /var/lib/flower-app/run-1/*.checkpoint; do sleep 2; done
# While that run goes on.
fedstale deploy model /var/lib/flower-app/run-1 OUT/going-on.safetensors
state() {
    find /etc/flower /etc/systemd/system /etc/passwd -type f -exec md5sum {} + | sort
    pgrep -f '/opt/fedstale/bin/fedstale (deploy superlink|node)'
}
state >OUT/once
ssh root@superlink.example.org sh server/install.sh
ssh root@device-0.example.org sh device/install.sh partition-id=0 num-partitions=2 >again.pub
cmp device-0.pub again.pub
sh my-server/operators/alice/install.sh
state >OUT/twice
cp ./*.safetensors ~/.flwr/config.toml OUT
cp -R /var/lib/flower-app/first-run OUT
stat -c '%a %U %n' /etc/flower /etc/flower/* /etc/flower/private/* /var/lib/flower* >OUT/modes
ps -eww -o user:20,args >OUT/processes
# Where flower-app finds no flwr-serverapp.
env PATH=/usr/bin:/bin timeout 60 /opt/fedstale/bin/fedstale deploy superexec --user flower-app \\
    --insecure --runtime-api-address localhost:1 2>OUT/superexec || true
"""


def pasted():
    """Return the commands of the page, in its order."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    parts = [part.split("\n", 1) for part in page.split("\n## ")[1:]]
    assert {title for title, _ in parts} >= LEFT_OUT
    return "".join(
        block for title, text in parts if title not in LEFT_OUT for block in BLOCK.findall(text)
    )


def require_a_machine():
    missing = [name for name in ("unshare", "ip", "ssh-keygen", "pgrep") if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and {', '.join(missing) or 'nothing else'}")
    if subprocess.run(["unshare", "-mnpf", "true"], check=False).returncode:
        pytest.skip("this root may make no namespaces")
    for path in (sys.prefix, sys.base_prefix, str(ROOT)):
        for folder in (Path(path), *Path(path).parents):
            if folder != Path("/root") and not folder.stat().st_mode & 0o001:
                pytest.skip(f"other users cannot enter {folder}, where this Python is")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Paste the page, and return the folder with what came of it."""
    require_a_machine()
    out = tmp_path_factory.mktemp("machine")
    script = out / "script"
    script.write_text(BEFORE + pasted() + AFTER.replace("OUT", str(out)), encoding="utf-8")
    with (out / "log").open("w") as log:
        command = ["sh", str(MACHINE), str(script), sys.prefix]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=900, check=False)
    assert done.returncode == 0, (out / "log").read_text()[-5000:]
    return out


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_commands_of_the_page_end_with_a_run_of_two_nodes(machine):
    run = Run(machine / "first-run")
    assert (run.summary["status"], run.summary["rounds"]) == ("finished", 3)
    assert set(run.jobs[run.jobs.aggregated_version > 0].device_id) == {*run.jobs.device_id}
    assert run.summary["devices"] == 2
    # The same model from the run folder and from the last checkpoint.
    after, during = (load_file(machine / f"{name}.safetensors") for name in ("model", "now"))
    assert after.keys() == during.keys()
    assert all(np.array_equal(after[name], during[name]) for name in after)
    assert load_file(machine / "going-on.safetensors")
    said = (machine / "log").read_text()
    assert said.count("note: ") >= 9, "it was asked as a stranger"
    assert "fault: " not in said


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_scripts_once_more_change_nothing(machine):
    before, after = ((machine / name).read_text() for name in ("once", "twice"))
    assert len(before.splitlines()) >= 12
    assert before == after
    assert (machine / "config.toml").read_text().count("[superlink.mine]") == 1


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_each_part_is_a_user_s_own_and_secrets_are_root_s(machine):
    modes = [line.split() for line in (machine / "modes").read_text().splitlines()]
    found = {path: (mode, user) for mode, user, path in modes}
    assert found["/etc/flower/ca.crt"] == ("644", "root")
    assert found["/etc/flower/private"] == ("700", "root")
    private = {found[path] for path in found if path.startswith("/etc/flower/private/node-9094")}
    assert ("600", "root") in private
    owners = {path.rpartition("/")[2]: user for path, (_, user) in found.items()}
    expected = {
        "flower": "flower",
        "flower-doors": "flower-door",
        "flower-app": "flower-app",
        "flower-operator": "flower-operator",
        "flower-node-9094": "flower-node",
        "flower-node-9095": "flower-node",
    }
    assert expected.items() <= owners.items()
    assert "flwr-serverapp is not in its PATH" in (machine / "superexec").read_text()
    processes = (machine / "processes").read_text()
    for user, words in (
        ("flower", "deploy superlink"),
        ("flower-door", "nginx: worker"),
        ("flower-app", "deploy superexec"),
        ("flower-node", "fedstale node"),
        ("flower-operator", "deploy run /srv/my_app"),
    ):
        assert re.search(rf"^{user} .*{words}", processes, re.MULTILINE), processes
