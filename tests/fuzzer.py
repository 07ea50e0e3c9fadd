"""Searches by coverage for a reply that hurts a server, from its bytes to the model.

    pip install atheris             # Linux, Python 3.11 or later
    python tests/fuzzer.py          # an hour
    python tests/fuzzer.py --minutes 5 --seed 2

What is found before a failure, as few inputs as reach the same code, goes into
`tests/fixtures/fuzzed_replies.zip`, which an everyday test sends; so does the input that fails.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
KEPT = TESTS / "fixtures" / "fuzzed_replies.zip"
MOST_BYTES, SLOW_S = 4096, 20
# In the place of this folder, whose own `fedstale` holds tests.
sys.path[0] = str(TESTS / "fixtures")
WATCHED = [f"fedstale.strategies.{room}" for room in ("messages", "server", "types", "stages")]


STARTED = """#!{python}
import sys
sys.path[0] = {tests!r}
from fuzzer import search
search(sys.argv)
"""
"""A program of its own, which libFuzzer starts again and again where it merges."""


def search(arguments):
    """Hand libFuzzer its arguments, the program's name first; it ends by exiting."""
    # No part of the environment of development.
    import atheris

    with atheris.instrument_imports(include=WATCHED):
        from fuzzed_replies import tried
        from virtual_grid import identity
    atheris.Setup(arguments, tried)
    with identity():
        atheris.Fuzz()


def kept():
    """Return the inputs that are kept."""
    if not KEPT.exists():
        return []
    with zipfile.ZipFile(KEPT) as file:
        return [file.read(name) for name in sorted(file.namelist())]


def keep(inputs):
    """Write inputs into the one file, under the same names at each writing."""
    named = {hashlib.sha256(data).hexdigest()[:16]: data for data in inputs}
    with zipfile.ZipFile(KEPT, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in sorted(named.items()):
            file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def main():
    """Search, keep what was found, and return whether something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzzer-") as place:
        found, least, failed = (Path(place, name) for name in ("found", "least", "failed"))
        for folder in (found, least, failed):
            folder.mkdir()
        program = Path(place, "program")
        program.write_text(STARTED.format(python=sys.executable, tests=str(TESTS)))
        program.chmod(0o700)
        for i, data in enumerate(kept() or seeds()):
            (found / str(i)).write_bytes(data)
        common = str(program), f"-max_len={MOST_BYTES}", f"-timeout={SLOW_S}"
        length = f"-max_total_time={60 * given.minutes:.0f}"
        failures = f"-artifact_prefix={failed}/"
        seed = f"-seed={given.seed}"
        searched = subprocess.run([*common, length, failures, seed, str(found)], check=False)
        subprocess.run([*common, "-merge=1", str(least), str(found)], check=True)
        folders = (least, failed)
        keep([path.read_bytes() for folder in folders for path in folder.iterdir()])
        print(f"{len(list(least.iterdir()))} inputs kept, {len(list(failed.iterdir()))} failed")
    return int(searched.returncode != 0)


def seeds():
    """Return the replies that clients send, and a change of each."""
    import fuzzed_replies
    from virtual_grid import identity

    with identity():
        edits = [bytes([1, 0, i, 0]) for i in range(len(fuzzed_replies.seeds()))]
        return fuzzed_replies.seeds() + edits


if __name__ == "__main__":
    sys.exit(main())
