"""What it is worth that slow devices do less: work by forecast against uniform epochs and FedProx.

Phones, digits and settings are those of `methods.run`: in "mixed" a device's digits have nothing
to do with its speed, in "slow alone hold 7-9" three digits are with the slowest third alone. All
arms are FedBuff with 20 jobs at a time and 5 updates a merge, and differ in what a job is: 1, 2 or
5 local epochs; 5 with the proximal term of FedProx; 5 with the directional gap as weighting; or the
share of 5 with which a job takes at most so long, by the device's own forecast. Some devices of
these windows have taught the embedded forecaster, so forecasts are those of persistence: a device
goes on at its last pace.

Every arm has the server's rate with the highest mean accuracy over half of the time on other seeds
and days. What is reported comes from five other seeds, paired with five epochs.

Run it with: python benchmarks/work/run.py RECORDINGS [--keep FILE] [--quick]
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from threadpoolctl import threadpool_limits

from fedstale.client import CompressionMod, ForecastMod
from fedstale.simulation import Executor
from fedstale.strategies import Compression, LocalWork, Stage
from fedstale.strategies.weighting import DirectionalGap, Weighting
from fedstale.traces import TraceSet
from fedstale.traces.forecast import Forecaster, Persistence

sys.path.append(str(Path(__file__).parents[1]))
from forecasts.run import examples
from lab.apps import opened
from lab.fleets import fleets
from lab.kept import Kept
from lab.results import write_result
from messages.runs import WithMods
from methods.run import MIXED, PLACES, SLOW, Comparison, Row, Trial, buffered, shown
from methods.runs import SEEDS, Curve, Setting, devices

REFERENCE = "5 epochs"
SMALL = Compression("int4", down="int8")
SETTINGS = (MIXED, SLOW)
N_EXAMPLES = 10_000
"""That persistence counts the spread of rates on."""
FASTEST = 9.6
"""The server's largest rate, beside those of `strategies`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What a job is."""

    epochs: int = 5
    mu: float = 0.0
    """Of the proximal term."""
    work: LocalWork | None = None
    weighting: Callable[[], Weighting] | None = None
    compression: Compression | None = None

    def trial(self) -> Trial:
        """Return FedBuff with this arm, before its tuning."""
        stages: list[Stage] = [stage for stage in (self.compression, self.work) if stage]
        parts = {"stages": stages, "weighting": self.weighting}
        return Trial(make=buffered(**{name: part for name, part in parts.items() if part}))


ARMS = {
    REFERENCE: Arm(),
    "2 epochs": Arm(epochs=2),
    "1 epoch": Arm(epochs=1),
    **{f"FedProx, mu {mu:g}": Arm(mu=mu) for mu in (0.01, 0.1, 1.0)},
    "directional gap": Arm(weighting=DirectionalGap),
    **{
        f"at most {at_most_s:g} s": Arm(work=LocalWork(within_s=at_most_s))
        for at_most_s in (60.0, 120.0)
    },
    "5 epochs, small messages": Arm(compression=SMALL),
    "1 epoch, small messages": Arm(epochs=1, compression=SMALL),
    "at most 60 s, small messages": Arm(work=LocalWork(within_s=60.0), compression=SMALL),
}


class LessWork(Setting):
    """Devices and digits of one seed, and what a job is."""

    def __init__(self, title: str, traces: TraceSet, seed: int, arm: Arm, recordings: Path) -> None:
        """Deal the digits of a setting."""
        place = PLACES[title]
        super().__init__(
            opened("digits"),
            traces,
            seed,
            slow=place.slow,
            grid_s=place.grid_s,
            config={"local-epochs": arm.epochs},
        )
        self.arm, self.recordings = arm, recordings
        self.config |= {"proximal-mu": arm.mu} if arm.mu else {}

    def executor(self) -> Executor:
        """Return what trains, with the mods that the arm needs."""
        mods = []
        if self.arm.compression:
            mods.append(CompressionMod())
        if self.arm.work:
            mod = ForecastMod()
            vars(mod)["_forecaster"] = persistence(self.recordings)
            mods.append(mod)
        return WithMods(super().executor(), mods) if mods else super().executor()


@cache
def persistence(recordings: Path) -> Forecaster:
    """Return what devices forecast by; it counts the spread of rates on other phones."""
    parts = fleets(recordings, 0, "phones")
    learn, stop, _ = examples(parts, N_EXAMPLES, 0)
    return Persistence().fit(learn, stop, seed=0)


def measure(title: str, recordings: Path, kept: Kept, quick: bool) -> Iterator[Row]:
    """Yield a row for each arm in one setting."""
    place = PLACES[title]
    reference: list[Curve] = []
    tuning, seeds = ((), SEEDS[:1]) if quick else (place.tuning_seeds, SEEDS)
    fleets = {seed: devices(recordings, place.kind, seed) for seed in (*tuning, *seeds)}
    for name, arm in ARMS.items():
        comparison = Comparison(
            title=title,
            settings={
                seed: LessWork(title, traces, seed, arm, recordings)
                for seed, traces in fleets.items()
            },
            tuning_seeds=tuning,
            seeds=seeds,
            target=place.target,
            horizon_s=place.horizon_s / (4 if quick else 1),
            kept=kept,
        )
        rates = place.rates[1:2] if quick else (*place.rates, FASTEST)
        rate, curves = comparison.measure(name, arm.trial(), rates)
        reference = reference or curves
        yield comparison.row(name, rate, curves, reference)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the time")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    measured = partial(measure, recordings=options.recordings, kept=Kept(options.keep))
    settings = SETTINGS[:1] if options.quick else SETTINGS
    with threadpool_limits(1):
        rows = [row for title in settings for row in shown(measured(title, quick=options.quick))]
    command = "python benchmarks/work/run.py RECORDINGS"
    print(write_result("less_work", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
