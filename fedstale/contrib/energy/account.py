"""Where the energy of a run went: its accounts in joules and grams, and what they assume."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from fedstale.contrib.energy.carbon import GRAMS, J_PER_KWH, Intensity, with_carbon
from fedstale.contrib.energy.power import FIGURES, JOULES, Fleet, with_energy
from fedstale.errors import ProtocolError
from fedstale.reports import Figure, Run, account_figure, write_text
from fedstale.runs import OUTCOMES
from fedstale.traces import outline

ACCOUNTS = "energy.json"
"""File of a run's folder."""
PARTS = ("download", "training", "upload", "network")
_UNITS = (("kWh", J_PER_KWH), ("Wh", 3600.0), ("J", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """What the jobs of a run took."""

    joules: pd.DataFrame
    """In J; rows: `PARTS`, columns: used, wasted, in-flight."""
    grams: pd.DataFrame | None
    """In g of CO2 equivalents, the network within its transfers; None if none were asked for."""
    assumptions: pd.DataFrame
    """A row for each figure: `class`, `figure`, `value`, `half` and `double` (by which share the
    sum of joules changes if it is half or twice as much), `source`."""

    __repr__ = outline

    @property
    def in_unit(self) -> tuple[str, pd.DataFrame]:
        """The joules in a unit that can be read."""
        total = float(self.joules.to_numpy().sum())
        unit, size = next(((u, s) for u, s in _UNITS if total >= s), _UNITS[-1])
        return unit, self.joules / size

    def plain(self) -> dict[str, object]:
        """Return them in plain values, as `energy.json` has them."""
        return {
            "joules": self.joules.to_dict("index"),
            "grams": None if self.grams is None else self.grams.to_dict("index"),
            "assumptions": self.assumptions.to_dict("records"),
        }


def accounts(run: Run, fleet: Fleet, intensity: Intensity | None = None) -> Accounts:
    """Return where the energy of a run went.

    Args:
        run: that is over.
        fleet: its devices.
        intensity: of their electricity, if grams are asked for.

    Raises:
        ConfigError: something that it needs is not known.
    """
    jobs = with_energy(run.jobs, fleet)
    grams = None
    if intensity is not None:
        grams = _by_outcome(with_carbon(jobs, fleet, intensity, end_s=run.end_s), GRAMS)
    total = _sum(jobs)
    rows = []
    for name in fleet.classes:
        power = fleet.power[name]
        for figure in FIGURES:
            value = float(getattr(power, figure))
            half = max(value / 2, 1.0 if figure == "plug" else 0.0)
            change = {
                way: _sum(with_energy(run.jobs, other)) / total - 1.0 if total else 0.0
                for way, to in (("half", half), ("double", 2 * value))
                for other in [fleet.with_figure(name, figure, to)]
            }
            source = power.sources.get(figure, "your own")
            rows.append(
                {"class": name, "figure": figure, "value": value, **change, "source": source}
            )
    return Accounts(joules=_by_outcome(jobs, JOULES), grams=grams, assumptions=pd.DataFrame(rows))


def _sum(jobs: pd.DataFrame) -> float:
    """Return the joules of jobs."""
    return float(jobs["energy_j"].sum())


def _by_outcome(jobs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the sums of columns (rows) by outcome (columns)."""
    sums = jobs.groupby("outcome")[list(columns)].sum().reindex(OUTCOMES, fill_value=0.0).T
    return sums.set_axis(PARTS[: len(columns)]).rename_axis(columns=None)


def figure(run: Run) -> Figure | None:
    """Return where the energy of a run went, or None if nobody has asked (`fedstale energy`)."""
    path = run.folder / ACCOUNTS
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            pd.DataFrame.from_dict(found[name], "index")[list(OUTCOMES)]
            for name in ("joules", "grams")
            if found[name] is not None
        ]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ProtocolError(
            f"{path} cannot be read: {problem}; fedstale energy writes it"
        ) from None
    made = Accounts(joules=tables[0], grams=None, assumptions=pd.DataFrame())
    unit, shown = made.in_unit
    if not shown.to_numpy().any():
        return None
    drawn = account_figure("energy", "Where energy went", shown, unit)
    return drawn if len(tables) == 1 else _with_grams(drawn, tables[1])


def _with_grams(drawn: Figure, grams: pd.DataFrame) -> Figure:
    sums = {name: float(grams[name].sum()) for name in OUTCOMES}
    said = ", ".join(f"{grams_of:,.4g} g {name}" for name, grams_of in sums.items() if grams_of)
    return replace(drawn, about=f"{drawn.about} CO2 equivalents: {said}.")


def keep(run: Run, found: Accounts) -> None:
    """Write accounts into the run's folder, where `fedstale report` finds them."""
    write_text(json.dumps(found.plain(), indent=2), run.folder / ACCOUNTS)
