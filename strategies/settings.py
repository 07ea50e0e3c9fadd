"""One sentence for every setting that is out of range: field, value, what is accepted."""

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


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1 (and not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
