"""How a command tells its user what is wrong: one sentence on stderr, exit code 2, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedstale.errors import FedstaleError


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn the errors that a user can mend into one sentence and exit code 2."""
    try:
        yield
    except FedstaleError as problem:
        typer.echo(f"fedstale: {problem}", err=True)
        raise typer.Exit(2) from None
