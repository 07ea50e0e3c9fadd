"""Tables within pages: what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""


def markers(name: str) -> tuple[str, str]:
    """Return what stands before a table and after it."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"


def has_place(text: str, name: str) -> bool:
    """Return whether a page has a place for a table."""
    return all(marker in text for marker in markers(name))


def filled(text: str, name: str, inside: str) -> str:
    """Return a page with a table written anew.

    Raises:
        ValueError: the page has no place for it.
    """
    start, end = markers(name)
    before, is_begun, rest = text.partition(start)
    _, is_ended, after = rest.partition(end)
    if not (is_begun and is_ended):
        raise ValueError(f"the page lacks {start.strip()} or {end}")
    return f"{before}{start}{inside}\n{end}{after}"
