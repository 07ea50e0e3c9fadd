"""Tables within pages: what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table whose first columns are words."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


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


def refilled(pages: Iterable[Path], tables: Mapping[str, str]) -> dict[Path, str]:
    """Return pages with tables written anew, each on the one page that has its place.

    Args:
        pages: files to read; none is written.
        tables: by name, what stands between the markers.

    Raises:
        ValueError: no page has a place for a table, or several have.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for name, inside in tables.items():
        having = [page for page, text in texts.items() if has_place(text, name)]
        if len(having) != 1:
            asked = ", ".join(page.name for page in texts)
            raise ValueError(f"{name}: expected one place on {asked}, found {len(having)}")
        texts[having[0]] = filled(texts[having[0]], name, inside)
    return texts


def rewrite(texts: Mapping[Path, str]) -> None:
    """Write pages."""
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
