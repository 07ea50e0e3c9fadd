"""An operator by hand: an app is simulated and deployed, and its run killed and resumed.

What the page shows is pasted, as it stands, on a machine that has none of it. The machine is this
one with private mounts, processes and network (tests/fixtures/machine): what the commands write
ends with it. What stands for something else there:

- `scp` and `ssh`: every other machine is this one;
- a line in /etc/hosts: the name service;
- `systemctl`: starts what the units' files say, without their sandbox;
- the block that installs packages is not run: /opt/fedstale leads to the tests' environment.

Left out are the blocks of installation and of containers.
"""

import json
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
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx"),
]

MOST_STEPS = 34
MACHINE = ROOT / "tests" / "fixtures" / "machine" / "machine.sh"
PAGE = "docs/deploy.md"
TRIED, BEFORE_RUN = (
    ["Try it on one machine"],
    [
        "Make what each machine needs",
        "Start the server",
        "Become an operator",
        "Let devices in",
    ],
)
RUN = "Run an app"
AFTER_RUN = ["Take the model out", "Ask as a stranger", "A run that is started again"]
LEFT_OUT = {"", "Install", "Units", "Containers", "What was tried", "From here"}

KILLED = """
({run}) &
set +x
until ls /var/lib/flower-app/first/*.checkpoint 2>/dev/null; do sleep 0.05; done
set -x
kill -9 $(pgrep -f bin/flwr-serverapp)
kill $!
"""
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
cp -R first-run OUT
stat -c '%a %U %n' /etc/flower /etc/flower/* /etc/flower/private/* /var/lib/flower* >OUT/modes
ps -eww -o user:20,args >OUT/processes
# Where flower-app finds no flwr-serverapp.
env PATH=/usr/bin:/bin timeout 60 /opt/fedstale/bin/fedstale deploy superexec --user flower-app \\
    --insecure --runtime-api-address localhost:1 2>OUT/superexec || true
"""


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


def script(journey):
    """Return all that the operator types, in the order of the pages."""

    def shown(*titles):
        blocks = [block for block in journey.read(PAGE, *titles) if block.kind in {"sh", "text"}]
        journey.steps += sum(len(block.commands) for block in blocks)
        return "".join(block.text for block in blocks)

    text = (ROOT / PAGE).read_text(encoding="utf-8")
    titles = {"", *re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert titles == {*TRIED, *BEFORE_RUN, RUN, *AFTER_RUN, *LEFT_OUT}
    simulated = [b for b in journey.read("README.md", "Your own Flower app") if b.kind == "sh"]
    journey.steps += sum(len(block.commands) for block in simulated)
    run = shown(RUN)
    (resume,) = re.findall(r"with `(resume='[^`]+')` added", text)
    resumed = run.rstrip().removesuffix('"') + f' {resume}"\n'
    journey.steps += 1
    return "".join(
        [
            *(block.text for block in simulated),
            shown(*TRIED, *BEFORE_RUN),
            KILLED.format(run=run),
            resumed,
            shown(*AFTER_RUN),
        ]
    )


@pytest.fixture
def machine(journey, tmp_path):
    """Type all of it, and return the folder with what came of it."""
    require_a_machine()
    typed = tmp_path / "script"
    typed.write_text(script(journey) + AFTER.replace("OUT", str(tmp_path)), encoding="utf-8")
    with (tmp_path / "log").open("w") as log:
        command = ["sh", str(MACHINE), str(typed), sys.prefix]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=900, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-5000:]
    return tmp_path


def test_an_operator_gets_from_a_simulation_to_a_model_of_real_devices(journey, machine):
    run = Run(machine / "first-run")
    assert (run.summary["status"], run.summary["rounds"]) == ("finished", 3)
    assert set(run.jobs[run.jobs.aggregated_version > 0].device_id) == {*run.jobs.device_id}
    assert run.summary["devices"] == 2
    record = (machine / "first-run" / "record.jsonl").read_text(encoding="utf-8").splitlines()
    assert "resumed" in {json.loads(line)["kind"] for line in record}, "it was killed"
    # The same model from the run folder and from the last checkpoint.
    after, during = (load_file(machine / f"{name}.safetensors") for name in ("model", "now"))
    assert after.keys() == during.keys()
    assert all(np.array_equal(after[name], during[name]) for name in after)
    assert load_file(machine / "going-on.safetensors")
    said = (machine / "log").read_text()
    assert said.count("note: ") >= 9, "it was asked as a stranger"
    assert "fault: " not in said
    check_scripts_once_more(machine)
    check_users_and_secrets(machine)
    journey.end(MOST_STEPS)


def check_scripts_once_more(machine):
    """They change nothing."""
    before, after = ((machine / name).read_text() for name in ("once", "twice"))
    assert len(before.splitlines()) >= 12
    assert before == after
    assert (machine / "config.toml").read_text().count("[superlink.mine]") == 1


def check_users_and_secrets(machine):
    """Each part is a user's own, and secrets are root's."""
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
