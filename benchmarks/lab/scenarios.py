"""Scenarios of an agent on recorded devices, of which no forecaster has learnt.

Fleets are those of `lab.fleets`, seed 0. The agent learns on the part that the embedded
forecasters learnt from, with others, each fitted to the half of the devices that it does not
forecast; it is validated on devices that the embedded ones were only stopped early on, and tested
on those that no model has seen. The three are also of different days of the logs, and the tested
loads and links of other hosts and sessions. A log's first days give devices a history.
"""

import json
from pathlib import Path

from fedstale.agents.env.episodes import EpisodeSettings, JobKinds
from fedstale.agents.env.forecast_table import Parts
from fedstale.agents.env.scenario import Mode, Scenario, Scenarios, cross_fitted
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S
from fedstale.traces.forecast import Forecaster, embedded
from lab.fleets import ASSUMED, fleets

SEED = 0
DAYS = {
    "phones": {"training": (0, 2), "validation": (2, 3), "testing": (3, 5)},
    "desktops": {"training": (7, 49), "validation": (49, 70), "testing": (7, 49)},
    "cars": {"training": (7, 49), "validation": (49, 70), "testing": (7, 49)},
    "mixed": {"training": (0, 2), "validation": (2, 3), "testing": (3, 5)},
}
"""From which day to which of each part's own log; the logs of desktops and cars that are tested
begin months after those that are learnt from."""
PARTS = {"training": "learn", "validation": "stop", "testing": "test"}
STEP_S = {"phones": 300.0, "desktops": 900.0, "cars": 900.0, "mixed": 300.0}
"""Time from one forecast of a device to its next: those that stay for hours forecast less often."""


def recorded_scenarios(
    recordings: Path,
    *,
    kind: str = "phones",
    forecasts: Mode = "forecaster",
    settings: EpisodeSettings | None = None,
    cache: Path | None = None,
) -> Scenarios:
    """Return the three scenarios.

    Args:
        recordings: folder of the published files.
        kind: of the fleet, see `fleets`.
        forecasts: what devices report.
        settings: what episodes are drawn from.
        cache: folder to keep forecasters in.
    """
    parts = fleets(recordings, seed=SEED, kind=kind, assumed=ASSUMED)
    kinds = JobKinds.of_fleet(parts["learn"])

    def scenario(name: str) -> Scenario:
        traces, (first, last) = parts[PARTS[name]], DAYS[kind][name]
        forecaster: Forecaster | Parts | None = embedded("any" if kind == "mixed" else kind)
        if name == "training" and forecasts == "forecaster":
            forecaster = fitted(traces, last * DAY_S, None if cache is None else cache / kind)
        return Scenario.of(
            traces,
            forecasts=forecasts,
            forecaster=forecaster,
            start=first * DAY_S,
            end=last * DAY_S,
            kinds=kinds,
            settings=settings,
            step_s=STEP_S[kind],
        )

    return Scenarios(**{name: scenario(name) for name in PARTS})


def fitted(traces: TraceSet, until: float, cache: Path | None) -> Parts:
    """Return forecasters of which none has learnt from the devices that it is to forecast.

    Args:
        traces: the devices.
        until: instant in s before which they learn.
        cache: folder to keep them in.
    """
    halves = [] if cache is None else [cache / f"half-{i}" for i in range(2)]
    if halves and all((half / "devices.json").exists() for half in halves):
        return [
            (json.loads((half / "devices.json").read_text()), Forecaster.load(half))
            for half in halves
        ]
    made = cross_fitted(traces, range(traces.n_devices), until=until, seed=SEED)
    for half, (devices, forecaster) in zip(halves, made, strict=False):
        forecaster.save(half, {})
        (half / "devices.json").write_text(json.dumps(devices.tolist()))
    return made


def tested(recordings: Path, kind: str) -> Scenario:
    """Return the tested scenario alone, without the two to learn on.

    Args:
        recordings: folder of the published files.
        kind: of the fleet, see `fleets`.
    """
    parts = fleets(recordings, seed=SEED, kind=kind, assumed=ASSUMED)
    first, last = DAYS[kind]["testing"]
    return Scenario.of(
        parts["test"],
        forecaster=embedded("any" if kind == "mixed" else kind),
        start=first * DAY_S,
        end=last * DAY_S,
        kinds=JobKinds.of_fleet(parts["learn"]),
        step_s=STEP_S[kind],
    )
