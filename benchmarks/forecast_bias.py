"""Does it cost selectors anything to add a bias to stated chances in place of a factor?

`Candidates.p_finish` corrects what a device states by what came of its jobs. A factor, (finished +
4) / (expected + 4), leaves a stated 0 at 0 whatever the record; the bias that stands in its place,
(finished - expected) / (ended + 4), does not. Both play the windows that no model has seen: the
embedded agent, which learnt with the factor, and the two rules that go by `p_finish`. No window has
devices that understate themselves, so this measures what the change costs, and not what it brings.

Run it with: OMP_NUM_THREADS=1 python benchmarks/forecast_bias.py RECORDINGS --cache FOLDER
"""

import argparse
from functools import cached_property
from pathlib import Path

import numpy as np
from agent_windows import FLEETS, LIARS, lied_to
from recorded_fleets import ASSUMED, fleets
from recorded_scenarios import DAYS, SEED, STEP_S
from results_file import write_result

from fedstale.agents import Scenario, load
from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.evaluation import AGENT, HEURISTIC, contenders, evaluate
from fedstale.agents.policy.scorer import embedded
from fedstale.strategies.types import Candidates
from fedstale.traces.arrays import DAY_S, Array
from fedstale.traces.forecast import embedded as forecaster_of

WINDOWS = 100
AMONG = (AGENT, HEURISTIC, "p_finish")
SHOWN = ("reward", "progress", "wasted_s")


def by_factor(candidates: Candidates) -> Array:
    """Return chances to finish with a factor in place of a bias; shape (n,)."""
    factor = (candidates.times_finished + 4.0) / (candidates.expected_finishes + 4.0)
    stated = np.minimum(candidates.forecast_p_finish * factor, 1.0)
    return np.where(np.isnan(stated), candidates.share_finished, stated)


def testing(recordings: Path, kind: str, cache: Path) -> Scenario:
    """Return the devices and hours of a fleet that no model has seen; see `recorded_scenarios`."""
    parts = fleets(recordings, seed=SEED, kind=kind, assumed=ASSUMED)
    first, last = DAYS[kind]["testing"]
    return Scenario.of(
        parts["test"],
        forecasts="forecaster",
        forecaster=forecaster_of("any" if kind == "mixed" else kind),
        start=first * DAY_S,
        end=last * DAY_S,
        kinds=JobKinds.of_fleet(parts["learn"]),
        settings=None,
        step_s=STEP_S[kind],
        cache=cache / f"{kind}.npz",
    )


def main() -> None:
    """Let both play, and write the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="folder to keep forecasts in")
    options = parser.parse_args()
    rows = []
    agent, by_bias = load(embedded()), Candidates.__dict__["p_finish"]
    factor = cached_property(by_factor)
    factor.__set_name__(Candidates, "p_finish")
    for fleet in FLEETS:
        scenario = testing(options.recordings, fleet, options.cache)
        for liars, how in {"as in training": None, **LIARS}.items():
            told = contenders(scenario if how is None else lied_to(scenario, how), [agent])
            playing = {name: told[name] for name in AMONG}
            found = {}
            for name, rule in (("factor", factor), ("bias", by_bias)):
                setattr(Candidates, "p_finish", rule)  # noqa: B010 - mypy: it is no attribute
                found[name] = evaluate(playing, windows=WINDOWS).windows.set_index("contender")
            for who in AMONG:
                row: dict[str, object] = {"fleet": fleet, "liars": liars, "selector": who}
                for metric in SHOWN:
                    one, two = (found[n].loc[who, metric].to_numpy() for n in ("factor", "bias"))
                    by = two - one
                    half = 1.96 * by.std(ddof=1) / np.sqrt(by.size)
                    row |= {
                        metric: [round(float(one.mean()), 4), round(float(two.mean()), 4)],
                        f"{metric}_difference": [round(float(by.mean()), 4), round(half, 4)],
                    }
                rows.append(row)
                print(row, flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/forecast_bias.py RECORDINGS --cache FOLDER"
    print(write_result("forecast_bias", rows, command=command))


if __name__ == "__main__":
    main()
