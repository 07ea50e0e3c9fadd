"""What the page on clusters shows is taken by those who read it, as far as they are here."""

import re
import shutil
import subprocess

import pytest
import yaml
from places import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def block(kind, word):
    """Return the block of a kind that has a word."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if word in text]
    return found


def test_rays_launcher_takes_its_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(block("yaml", "provider:")))
    validate_config(config)
    assert config["max_workers"] == 2


def test_kuberays_file_has_the_fields_of_its_kind():
    spec = yaml.safe_load(block("yaml", "kind: RayCluster"))["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        # Ray's parameters are texts in Kubernetes, and a pod has containers with images.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert all(one["image"] for one in group["template"]["spec"]["containers"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_script_of_slurm_is_one_and_calls_what_ray_has():
    from click.testing import CliRunner
    from ray.scripts.scripts import cli

    text = block("text", "#SBATCH")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    said = CliRunner().invoke(cli, ["symmetric-run", "--help"]).output
    assert all(option in said for option in ("--address", "--min-nodes", "--num-cpus"))
