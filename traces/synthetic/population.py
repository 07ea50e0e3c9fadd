"""The numbers of a generated population, as a TOML file that says where each is from.

`fit` makes them, `generate` uses them. The file of the embedded population
also records the marginals of the recordings it was fitted on, for comparison.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from fedstale.errors import TraceError
from fedstale.traces.io.atomic import replacing
from fedstale.traces.synthetic.links import LEVELS as LINK_LEVELS
from fedstale.traces.synthetic.links import Regimes
from fedstale.traces.synthetic.load import LEVELS as LOAD_LEVELS
from fedstale.traces.synthetic.load import Background
from fedstale.traces.synthetic.presence import LEVELS, PARTS, Diurnal, Group

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of a population."""

    median_log: float
    """Mean, over links, of the logarithm of a downlink's median rate in bit/s."""
    median_log_sd: float
    """Its standard deviation."""
    uplink_share_log: float
    """Mean logarithm of the median uplink, divided by the median downlink of the same link."""
    uplink_share_log_sd: float
    """Its standard deviation."""
    downlink: Regimes
    """How downlinks move around their median."""
    uplink: Regimes
    """How uplinks do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """All numbers of a generator of devices."""

    availability: Diurnal
    """When devices come and go."""
    links: Links
    """How fast they send and receive."""
    background: Background
    """What else their processors do."""
    speed: tuple[float, ...]
    """Work units/s of idle devices, one number for each of equally large classes."""
    compute_unit: str
    """What one work unit is, in words."""


def load(path: str | Path | None = None) -> Population:
    """Return the population in a TOML file, the embedded one for None.

    Raises:
        TraceError: the file is missing, not TOML, or a number is missing or out of range.
    """
    table = _table(path)
    where = "the embedded population" if path is None else str(path)
    if "population" not in table:
        raise TraceError(f"{where}: expected a table [population], as fedstale traces fit writes")
    table = table["population"]
    try:
        links = dict(table["links"])
        population = Population(
            availability=Diurnal(
                groups=tuple(_of(Group, g) for g in table["availability"]["groups"])
            ),
            links=_of(
                Links,
                links | {side: _of(Regimes, links[side]) for side in ("downlink", "uplink")},
            ),
            background=_of(Background, table["background"]),
            speed=_tuples(table["speed"]),
            compute_unit=str(table["compute_unit"]),
        )
        _check(population)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise TraceError(
            f"{where}: not the numbers of a population ({problem}): "
            "expected a file that fedstale traces fit wrote"
        ) from None
    return population


def targets() -> Mapping[str, Any]:
    """Return the marginals of the recordings that the embedded population was fitted on."""
    return dict(_table(None)["targets"])


def save(
    population: Population,
    path: str | Path,
    *,
    provenance: Mapping[str, Any],
    targets: Mapping[str, Any],
) -> None:
    """Write a population with its provenance and the marginals it should have, whole or not at all.

    Raises:
        TraceError: the file cannot be written.
    """
    path = Path(path)
    document = {
        "provenance": dict(provenance),
        "population": asdict(population),
        "targets": dict(targets),
    }
    try:
        with replacing(path) as file:
            tomli_w.dump(document, file)
    except OSError as problem:
        raise TraceError(f"{path}: cannot be written ({problem.strerror})") from None


def _table(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        text = (resources.files("fedstale.traces.synthetic") / "synthetic.toml").read_text("utf-8")
        return tomllib.loads(text)
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as problem:
        raise TraceError(f"{path}: cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{path}: not a TOML file ({problem})") from None


def _of(kind: type[_T], table: Mapping[str, Any]) -> _T:
    unknown = set(table) - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"unknown {sorted(unknown)[0]!r}")
    return kind(**{name: _tuples(value) for name, value in table.items()})


def _tuples(value: Any) -> Any:  # noqa: ANN401 - any value of TOML
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _check(population: Population) -> None:
    """Raise a ValueError that names the first number that cannot be."""
    groups = population.availability.groups
    _expect(bool(groups), "availability has no groups")
    _expect(sum(g.weight for g in groups) <= 1 + 1e-9, "the weights of groups exceed 1")
    for group in groups:
        _expect(0 <= group.another < 1, "another is not in [0, 1)")
        _expect(len(group.hourly) == 24 and min(group.hourly) > 0, "hourly is not 24 numbers > 0")
        tables = (group.gap_s, group.pause_s, *group.session_s)
        _expect(len(group.session_s) == PARTS, f"session_s has not {PARTS} parts of the day")
        for quantiles in tables:
            _expect(_rising(quantiles, LEVELS.size) and quantiles[0] > 0, "quantiles do not rise")
    for regimes in (population.links.downlink, population.links.uplink):
        k = len(regimes.share)
        _expect(k == 2 * LINK_LEVELS, f"share is not {2 * LINK_LEVELS} states")
        _expect(
            len(regimes.move) == k and all(abs(sum(row) - 1) < 1e-3 for row in regimes.move),
            "move is not a matrix whose rows sum to 1",
        )
        _expect(all(0 <= phi < 1 for phi in regimes.phi), "phi is not in [0, 1)")
    load = population.background.load
    _expect(_rising(load, LOAD_LEVELS.size) and load[0] >= 0 and load[-1] <= 1, "load")
    _expect(bool(population.speed) and min(population.speed) > 0, "speed is not > 0")


def _rising(numbers: tuple[float, ...], count: int) -> bool:
    return len(numbers) == count and all(a <= b for a, b in pairwise(numbers))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
