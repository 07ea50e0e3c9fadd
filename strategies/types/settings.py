"""One sentence for each setting that is unknown or out of range: field, value, what is right."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from fedstale.errors import ConfigError


def require(holds: bool, field: str, value: object, accepted: str) -> None:
    """Raise unless a setting is acceptable.

    Args:
        holds: whether it is.
        field: its name as the user wrote it.
        value: what it was set to.
        accepted: what would be accepted, and what to do.

    Raises:
        ConfigError: it is not.

    Example:
        >>> require(False, "buffer_size", 0, "an integer >= 1")
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.buffer_size = 0: expected an integer >= 1
    """
    if not holds:
        raise ConfigError(f"strategy.{field} = {value!r}: expected {accepted}")


def require_count(
    field: str, value: object, accepted: str = "an integer >= 1", *, least: int = 1
) -> None:
    """Raise ConfigError unless a setting is an integer (and no bool) of at least some size."""
    require(is_count(value, least), field, value, accepted)


def require_choice(field: str, value: object, *choices: str) -> None:
    """Raise ConfigError unless a setting is one of some words."""
    require(value in choices, field, value, "|".join(choices))


def require_known(
    name: str, known: Iterable[str], owner: str, parts: Mapping[str, Iterable[str]]
) -> None:
    """Raise unless a setting exists, and name the part that has it or the nearest one there is.

    Args:
        name: of the setting, as the user wrote it.
        known: settings that exist.
        owner: what they belong to.
        parts: settings of its parts, by the text of each part, such as "schedule=Schedule".

    Raises:
        ConfigError: it does not exist.

    Example:
        >>> require_known("bufer_size", ["concurrency", "buffer_size"], "FedBuff", {})
        Traceback (most recent call last):
        fedstale.errors.ConfigError: FedBuff has no setting 'bufer_size': expected 'buffer_size'
    """
    names = list(known)
    if name not in names:
        near = [f"{part}({name}=...)" for part, settings in parts.items() if name in settings]
        near += map(repr, get_close_matches(name, names, n=1))
        accepted = near[0] if near else f"one of {', '.join(names)}"
        raise ConfigError(f"{owner} has no setting {name!r}: expected {accepted}")


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer (and no bool) of at least some size."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
