"""One deployment and one run, to which one fault after the other happens, of all kinds.

The deployment, the run and how its updates are counted are those of `kills.py`. Faults come in
random order, at random moments, also while the run has not got over the one before: any part is
killed by `kill -9`; any process is stopped for a while (SIGSTOP); what devices send, or what they
are answered, is lost on its way (nftables, in a network namespace of the run's own); the network is
cut whole; a disk is full; the clock of the server or of a device is wrong by up to five minutes
(`clock.c`). What this machine has not, such as root's rights, is left out, and is named in the
result.

Flower ends a run when the server's clock goes ahead by a minute, and believes in a node or a
ServerApp until the instant that a wrong clock named: one that dies then counts as alive until the
time has come. So a longer jump would only make the run wait longer.

Run it with: python benchmarks/robustness/history.py [--faults 200] [--seed 0] [--kind KIND]
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import commit, write_result
from robustness.kills import (
    MOMENTS,
    PARTS,
    STUCK_S,
    Breakable,
    Note,
    Watched,
    kept_alive,
    kill,
    obstacle,
)

STOP, LOSS, CLOCK, SERVER = "stopped-process", "one-sided-loss", "clock", "server"
WITHIN = "FEDSTALE_HISTORY_NETWORK"
"""Says that this process has a network of its own."""
VERSIONS_EACH = 4
"""How many versions of the run there are for each fault."""
KINDS = (*PARTS, STOP, LOSS, CLOCK)
LONGEST_S, LONGEST_JUMP_S, GAP_S = 40.0, 300.0, 4.0
"""Longest time that something lasts; that a clock is wrong by; that a fault waits for a version."""


class Shaken(Breakable):
    """A deployment with small disks, whose server and devices have clocks of their own."""

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        """Mount the disks, and make the clocks, that some kinds of fault need."""
        super().__init__(folder, kinds)
        self._library = folder / "clock.so" if CLOCK in kinds else None
        if self._library is not None:
            source = Path(__file__).with_name("clock.c")
            build = ["cc", "-shared", "-fPIC", "-o", str(self._library), str(source)]
            subprocess.run(build, check=True)

    def set_clock(self, machine: str, ahead_s: int) -> None:
        """Set how far the clock of the server, or of a node, is ahead."""
        path = self._clock(machine)
        path.touch()
        # In place: it is mapped.
        with path.open("r+b", buffering=0) as file:
            file.write(ahead_s.to_bytes(8, sys.byteorder, signed=True))

    def _clock(self, machine: str) -> Path:
        return self.folder / f"clock-{machine}"

    def _start(self, name: str, command: list[str]) -> None:
        # Of nginx none is asked for anything but its log.
        if self._library is not None and name != "proxy":
            machine = name if name.startswith("node") else SERVER
            if not self._clock(machine).exists():
                self.set_clock(machine, 0)
            own = [f"LD_PRELOAD={self._library}", f"CLOCK_FILE={self._clock(machine)}"]
            command = ["env", *own, *command]
        super()._start(name, command)


def missing(kind: str) -> str:
    """Return why a kind of fault cannot happen on this machine; empty if it can."""
    if kind == LOSS and WITHIN not in os.environ:
        return "a network of one's own takes root, unshare, ip and nft"
    if kind == CLOCK and not shutil.which("cc"):
        return "a clock of one's own takes a C compiler"
    return obstacle(kind)


def happen(kind: str, rng: random.Random, deployment: Shaken, run: Watched, at: Note) -> bool:
    """Cause a fault, end it if it is one that lasts, and return whether it could happen."""
    lasts_s = LONGEST_S ** rng.random()
    if kind == STOP:
        everyone = psutil.Process().children(recursive=True)
        process = rng.choice(sorted(everyone, key=lambda one: one.pid))
        try:
            process.suspend()
        except psutil.NoSuchProcess:
            return False
        time.sleep(lasts_s)
        # It may have been killed.
        with suppress(psutil.NoSuchProcess):
            process.resume()
    elif kind == LOSS:
        side = rng.choice(["dport", "sport"])
        nft(f"add rule ip history out tcp {side} {deployment.at.port} drop")
        time.sleep(lasts_s)
        nft("flush chain ip history out")
    elif kind == CLOCK:
        machine = rng.choice([SERVER, f"node-{at['node']}"])
        deployment.set_clock(machine, round(rng.choice([-1, 1]) * LONGEST_JUMP_S ** rng.random()))
        time.sleep(lasts_s)
        deployment.set_clock(machine, 0)
    else:
        return kill(deployment, run, kind, at, cut_s=lasts_s)
    return True


def nft(words: str) -> None:
    """Change the rules of this process's network."""
    subprocess.run(["nft", *words.split()], check=True)


def history(n_faults: int, seed: int, folder: Path, kinds: Sequence[str] = KINDS) -> Note:
    """Cause many faults in a run, await its end, and count its versions and updates.

    Args:
        n_faults: how many.
        seed: of their order, kinds and moments.
        folder: for the deployment and the run.
        kinds: of `KINDS`; those that cannot happen here are left out.

    Raises:
        TimeoutError: nothing goes on, or the run ends before the last fault.
    """
    rng = random.Random(seed)
    left_out = {kind: why for kind in kinds if (why := missing(kind))}
    able = [kind for kind in kinds if kind not in left_out]
    rounds, happened = VERSIONS_EACH * n_faults + 20, Counter[str]()
    with Shaken(folder, able) as deployment, Watched(deployment, folder, rounds) as run:
        began = time.monotonic()
        with kept_alive(deployment):
            run.next_moment(MOMENTS[0])
            while happened.total() < n_faults:
                least, until = run.version + 1, time.monotonic() + GAP_S
                run.wait(lambda a=least, b=until: run.version >= a or time.monotonic() > b)
                at = run.next_moment(rng.choice(MOMENTS), GAP_S) or run.notes("devices")[-1]
                time.sleep(rng.uniform(0.0, 0.5))
                kind = rng.choice(able)
                so_far = f"{time.monotonic() - began:.0f} s: fault {happened.total()}"
                print(f"{so_far}: {kind} at version {run.version}", flush=True)
                happened[kind] += happen(kind, rng, deployment, run, at)
            run.wait(lambda: run.version >= rounds)
            until = time.monotonic() + STUCK_S
            while (status := run.status()) is None and time.monotonic() < until:
                time.sleep(0.5)
        found = run.outcome() | {"runs": len(deployment.control.runs())}
    return {
        "faults": n_faults,
        "of_kind": dict(sorted(happened.items())),
        "left_out": left_out,
        "seed": seed,
        "exit": status,
        "versions_asked": rounds,
        **found,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "commit": commit(),
    }


def in_own_network(command: list[str]) -> int | None:
    """Run a command in a network of its own; return its status, or None where there is none."""
    is_able = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "nft")))
    if WITHIN in os.environ or not is_able:
        return None
    inside = ["unshare", "--net", *command]
    return subprocess.run(inside, env={**os.environ, WITHIN: "1"}, check=False).returncode


def prepare_network() -> None:
    """Give a new network its loopback, and a chain for rules."""
    if WITHIN not in os.environ:
        return
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    nft("add table ip history")
    nft("add chain ip history out { type filter hook output priority 0 ; }")


def main() -> int:
    """Cause faults, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="these alone; writes nothing"
    )
    parser.add_argument("--quick", action="store_true", help="three faults")
    options = parser.parse_args()
    status = in_own_network([sys.executable, *sys.argv])
    if status is not None:
        return status
    prepare_network()
    with tempfile.TemporaryDirectory() as folder:
        n = 3 if options.quick else options.faults
        row = history(n, options.seed, Path(folder), options.kind or KINDS)
    print(json.dumps(row))
    if options.kind is None:
        command = f"python benchmarks/robustness/history.py --faults {options.faults}"
        command += f" --seed {options.seed}"
        print(write_result("history", [row], command=command, quick=options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
