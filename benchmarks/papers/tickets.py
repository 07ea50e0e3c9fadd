"""Do random tickets help phones with slow links: time to a target against formats, or without them.

Recorded phones train for three hours with messages of 56 MB over LTE and UMTS (`messages.runs`).
Weak are those on the slower half of the links. They get a random sub-network of a quarter of the
weights by `Tickets`, with layers and masks of each kind; or all send formats; or the weak are left
out. The network of the app `digits` is one place, a wider and deeper one of 64-128-128-128-10 units
another: the paper's claim is of networks with more weights than they need, and smart ratios differ
from uniform ones by depth.

Each arm has the server's rate with the highest mean accuracy over the first half of the time on two
windows of other phones. The target is what full messages reach there after that half, rounded down
to 0.01. What is reported comes from five windows of phones that no rate has seen, in pairs.

Reference:
    Su, Chen, Cai, Wu, Gao, Wang, Lee. Sanity-Checking Pruning Methods: Random Tickets can Win the
    Jackpot. NeurIPS 2020.

Run it with: python benchmarks/papers/tickets.py RECORDINGS [--keep FILE] [--quick]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import floor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from threadpoolctl import threadpool_limits
from torch import nn

from fedstale.contrib.tickets import Tickets, TicketsMod
from fedstale.contrib.tickets.tickets import TICKETS
from fedstale.strategies import Compression, Stage
from fedstale.strategies.types import Forecast

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import APPS, Digits, TrainingApp, opened
from lab.curves import by_minute, difference, ratio
from lab.kept import Kept
from lab.results import write_result
from lab.training import FIRST_NODE, HOUR_S, Window
from messages.run import outcome
from messages.runs import Curve, Place, run, windows_of

SEEDS, TUNING_SEEDS, RATES = (501, 502, 503, 504, 505), (511, 512), (1.2, 2.4, 4.8)
UNTIL_S, RATIO, LINKS = 3 * HOUR_S, 0.25, "mahimahi"
FULL = "all in full"
UNITS = 64, 128, 128, 128, 10


class Wide(Digits):
    """The images of `digits` for a network of four layers."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self._network = _network(0)

    def trained(self, message: Message, job: dict[str, Any]) -> Message:
        """Train by autograd."""
        return TrainingApp.trained(self, message, job)

    def initial(self, seed: int) -> ArrayRecord:
        """Return the first model."""
        return ArrayRecord(_network(seed).state_dict())


def _network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [each for pair in pairwise(UNITS) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


APPS["wide digits"] = Wide


class ForWeak(Tickets):
    """Gives a sub-network to some nodes, which the benchmark knows to be weak."""

    nodes: ClassVar[frozenset[int]] = frozenset()

    def ratio_of(self, node_id: int, forecast: Forecast, last: float = 1.0) -> float:
        """Return the ratio for a weak node, and 1 for others."""
        return self.ratio if node_id in self.nodes else 1.0


ARMS: dict[str, Stage | None] = {
    FULL: None,
    "weak left out": None,
    "int8, int8 down": Compression("int8", down="int8"),
    "int4, int8 down": Compression("int4", down="int8"),
    "tickets, uniform": ForWeak(RATIO),
    "tickets, smart": ForWeak(RATIO, layers="smart"),
    "tickets, smart, a round": ForWeak(RATIO, layers="smart", masks="round"),
    "tickets, smart, nested": ForWeak(RATIO, layers="smart", masks="nested"),
    "tickets, smart, less work": ForWeak(RATIO, layers="smart"),
    "tickets for all, uniform": Tickets(RATIO),
    "tickets for all, smart": Tickets(RATIO, layers="smart"),
}
"""Masks are one a device where nothing else is said. With less work a quarter of the weights is a
quarter of the work, which no dense kernel does: the most that a sparse one could save."""
PLACES = {
    name: Place(app=name, model_bytes=56_000_000, links=LINKS) for name in ("digits", "wide digits")
}


WIDE = [
    *(FULL, "weak left out", "int8, int8 down", "int4, int8 down", "tickets, smart, less work"),
    *("tickets for all, uniform", "tickets for all, smart"),
]
"""Arms of the wide network, whose runs take four times as long: no kinds of masks there, and of
sub-networks for the weak alone those that are ahead by assumption."""


def weak(window: Window) -> list[int]:
    """Return the phones whose uplink carries less than that of the median phone in the window."""
    n = window.n_devices
    carried = window.traces.channel("uplink").integral(np.arange(n), 0.0, window.hours_s)
    return np.flatnonzero(carried < np.median(carried)).tolist()


def trained(place: str, arm: str, window: Window, rate: float, until_s: float) -> dict[str, object]:
    """Return a run; see `messages.runs.run`."""
    slow = weak(window)
    ForWeak.nodes = frozenset(FIRST_NODE + i for i in slow)
    stage, who, work = ARMS[arm], None, None
    if arm == "weak left out":
        who = sorted(set(range(window.n_devices)) - set(slow))
    if arm.endswith("less work"):
        work = _less(place, window)
    mods = [TicketsMod()] if isinstance(stage, Tickets) else None
    options: dict[str, Any] = {"who": who, "work": work} | ({"mods": mods} if mods else {})
    with threadpool_limits(1):
        return run(PLACES[place], stage, window, rate, until_s, **options)


def _less(place: str, window: Window) -> Callable[[Message], float]:
    """Return the assumption that a sub-network is as much less work as it has less weights."""
    examples = opened(PLACES[place].app).examples(window.n_devices, 0.3, window.seed)
    own = window.work * examples / examples.mean()

    def work(message: Message) -> float:
        about = message.content.config_records.get(TICKETS, {})
        return float(own[message.metadata.dst_node_id - FIRST_NODE] * about.get("ratio", 1.0))

    return work


def rows_of(
    place: str,
    arms: list[str],
    windows: tuple[list[Window], list[Window]],
    rates: tuple[float, ...],
    *,
    kept: Kept,
    until_s: float,
) -> list[dict[str, object]]:
    """Return a row for each arm.

    Args:
        place: a name of `PLACES`.
        arms: names of `ARMS`, the first of which the others are compared with.
        windows: those that rates are chosen on, and those that are reported.
        rates: of the server.
        kept: runs that need not be made again.
        until_s: length of a run in s.
    """

    def curve(arm: str, window: Window, rate: float, length_s: float) -> Curve:
        of = [place, arm, window.seed, rate, length_s]
        return Curve(**kept.get(of, partial(trained, place, arm, window, rate, length_s)))

    def halfway(arm: str, rate: float) -> list[list[float]]:
        half_s, found = until_s / 2, [curve(arm, w, rate, until_s / 2) for w in windows[0]]
        return [by_minute(one.at_s, one.accuracy, half_s).tolist() for one in found]

    rate_of, target, found = {}, 0.0, {}
    for arm in arms:
        by_rate = {rate: halfway(arm, rate) for rate in rates}
        rate_of[arm] = max(by_rate, key=lambda rate: float(np.mean(by_rate[rate])))
        if arm == arms[0]:
            ends = [one[-1] for one in by_rate[rate_of[arm]]]
            target = floor(100 * float(np.mean(ends))) / 100
        each = [curve(arm, window, rate_of[arm], until_s) for window in windows[1]]
        found[arm] = [outcome(one, target, until_s) for one in each]
        print(place, arm, rate_of[arm], target, [round(x["hours"], 2) for x in found[arm]])

    def compared(base: str, arm: str) -> list[float]:
        pair = ([one["hours"] for one in found[name]] for name in (base, arm))
        return [round(x, 4) for x in ratio(*pair)]

    def above(uniform: str, arm: str) -> list[float] | None:
        """Return by how much smart ratios end higher than the same with uniform ones."""
        if uniform == arm or uniform not in arms:
            return None
        pair = ([one["final_accuracy"] for one in found[name]] for name in (uniform, arm))
        return [round(x, 4) for x in difference(*pair)]

    return [
        {
            "place": place,
            "arm": arm,
            "server_rate": rate_of[arm],
            "target": target,
            "seeds": [window.seed for window in windows[1]],
            "never": sum(one["reached"] == 0.0 for one in found[arm]),
            **{
                name: round(float(np.mean([one[name] for one in found[arm]])), 4)
                for name in ("hours", "up_gb", "down_gb", "jobs", "final_accuracy")
            },
            "final_by_seed": [round(one["final_accuracy"], 4) for one in found[arm]],
            "hours_by_seed": [round(one["hours"], 3) for one in found[arm]],
            "hours_ratio": compared(arms[0], arm),
            "hours_ratio_to_int8": compared("int8, int8 down", arm),
            "final_to_uniform": above(arm.replace("smart", "uniform"), arm),
        }
        for arm in arms
    ]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, help="folder of the published recordings")
    parser.add_argument("--keep", type=Path, help="file of the runs that are kept")
    parser.add_argument(
        "--quick", action="store_true", help="three windows, one rate, two arms more"
    )
    args = parser.parse_args()
    tuning, seeds, rates, arms, places = TUNING_SEEDS, SEEDS, RATES, list(ARMS), list(PLACES)
    if args.quick:
        tuning, seeds, rates, places = tuning[:1], seeds[:3], RATES[1:2], places[:1]
        arms = [FULL, "int8, int8 down", "tickets, uniform", "tickets, smart"]
    windows = (
        windows_of(args.recordings, "stop", LINKS, tuning),
        windows_of(args.recordings, "test", LINKS, seeds),
    )
    kept, rows = Kept(args.keep), []
    for place in places:
        some = [arm for arm in arms if place != "wide digits" or arm in WIDE]
        rows += rows_of(place, some, windows, rates, kept=kept, until_s=UNTIL_S)
    for row in rows:
        print(
            f"{row['place']:12s} {row['arm']:26s} rate {row['server_rate']} {row['hours']:.2f} h "
            f"to {row['target']} ({row['never']} never), x {row['hours_ratio']}, to int8 x "
            f"{row['hours_ratio_to_int8']}, in the end {row['final_accuracy']:.3f}"
        )
    command = "python benchmarks/papers/tickets.py RECORDINGS"
    write_result("tickets", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
