"""nginx reads what `deploy init` writes for it."""

import os
import shutil
import subprocess

import pytest
from initialised import initialised

from fedstale.deployment.local import has_nginx


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return initialised(tmp_path_factory.mktemp("deploy") / "server")


def test_nginx_accepts_what_init_writes(server, tmp_path):
    if not has_nginx():
        pytest.skip("nginx is not installed: apt-get install nginx")
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    command = [program, "-t", "-p", str(tmp_path), "-c", str(server / "nginx.conf"), "-e", "stderr"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "warn" not in run.stderr
