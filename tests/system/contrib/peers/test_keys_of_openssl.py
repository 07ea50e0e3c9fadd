"""Keys of sites that OpenSSL has made, by the commands of the page of peers, seal and open."""

import re
import subprocess

import numpy as np
from places import ROOT
from virtual_grid import record

from fedstale.contrib.peers.sealing import Seals

PAGE = (ROOT / "docs" / "contrib" / "peers.md").read_text(encoding="utf-8")


def commands():
    (block,) = re.findall(r"^```text\n(\(umask.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return block


def made(folder):
    """Return the public half of a new key, as the page says to take it."""
    folder.mkdir(mode=0o700)
    shown = subprocess.run(
        ["sh", "-e", "-c", commands()], cwd=folder, check=True, capture_output=True, text=True
    )
    _, middle, _ = shown.stdout.strip().splitlines()
    return middle


def test_the_commands_of_the_page_make_keys_that_seal_and_open(tmp_path):
    public = [made(tmp_path / name) for name in ("one", "two")]
    sites = []
    for i, name in enumerate(("one", "two")):
        peers = tmp_path / name / "peers.toml"
        peers.write_text(f'[peers]\n{1 - i} = "{public[1 - i]}"\n', encoding="utf-8")
        sites.append(Seals(tmp_path / name / "site.key", peers))
    sealed = sites[0].seal(record(w=np.ones(3)), site=0, run_id=1, counter=1)
    _, found = sites[1].open(sealed, sender=0, site=1, run_id=1)
    assert found["w"].numpy().tolist() == [1.0, 1.0, 1.0]


def test_the_file_of_the_page_is_one(tmp_path):
    made(tmp_path / "site")
    (text,) = re.findall(r"^```toml\n(\[peers\].*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    peers = tmp_path / "site" / "peers.toml"
    peers.write_text(text, encoding="utf-8")
    assert Seals(tmp_path / "site" / "site.key", peers).neighbours == [1, 3]
