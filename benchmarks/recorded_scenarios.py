"""Scenarios of an agent on recorded devices, of which no forecaster has learnt.

The forecaster that comes with the package learnt from half of the phones, hosts and links
(`recorded_fleets`, seed 0). The agent learns on the next quarter, on which that forecaster was only
stopped early, and is tested on the last, with the loads of other days. Tests begin after a day, of
which devices have a history then.
"""

from pathlib import Path

from recorded_fleets import ASSUMED, fleets, span

from fedstale.agents.env.episodes import EpisodeSettings, JobKinds
from fedstale.agents.env.scenario import Mode, Scenario, Scenarios
from fedstale.traces.arrays import DAY_S
from fedstale.traces.forecast import split

SEED = 0


def recorded_scenarios(
    recordings: Path,
    *,
    forecasts: Mode = "forecaster",
    settings: EpisodeSettings | None = None,
    cache: Path | None = None,
    kind: str = "phones",
) -> Scenarios:
    """Return the three scenarios.

    Args:
        recordings: folder of the published files.
        forecasts: what devices report.
        settings: what episodes are drawn from.
        cache: folder to keep forecasts in.
        kind: of the fleet, see `fleets`.
    """
    parts = fleets(recordings, seed=SEED, kind=kind, assumed=ASSUMED)
    learn, test = parts["stop"], parts["test"]
    kinds = JobKinds.of_fleet(learn)
    divided = split(learn, seed=SEED)
    places = {
        "training": (learn, [*divided.training, *divided.testing], 0.0, span(learn)),
        "validation": (learn, divided.validation, 0.0, span(learn)),
        "testing": (test, range(test.n_devices), DAY_S, span(test)),
    }
    made = {
        name: Scenario.of(
            traces,
            forecasts=forecasts,
            devices=list(devices),
            start=start,
            end=end,
            kinds=kinds,
            settings=settings,
            cache=None if cache is None else cache / f"{name}-{forecasts}.npz",
        )
        for name, (traces, devices, start, end) in places.items()
    }
    return Scenarios(**made)
