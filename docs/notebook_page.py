"""Write docs/notebook.md from examples/first_run.ipynb: its texts, its cells and what they show.

The notebook itself is run by tests/system/project/test_examples.py, which holds its outputs against
what the cells show.

Run it with: python docs/notebook_page.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK, PAGE = ROOT / "examples" / "first_run.ipynb", ROOT / "docs" / "notebook.md"
_AFTER_TITLE = """
<!-- Written by `python docs/notebook_page.py`; edit the notebook instead. -->

This is `examples/first_run.ipynb` of the repository, with what its cells show. It needs
`fedstale[server]`, plotly and Jupyter.
"""
_DRAWN = "*A figure of plotly, which the notebook draws and does not keep.*"


def page() -> str:
    """Return the page of the notebook as it is."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    title, *texts = (_text_of(cell) for cell in cells)
    first, _, rest = title.partition("\n")
    return "\n\n".join([f"{first}\n{_AFTER_TITLE}".rstrip(), rest.strip(), *texts]) + "\n"


def _text_of(cell: dict[str, Any]) -> str:
    """Return a cell in Markdown."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return source
    shown = [_shown(output) for output in cell["outputs"]] or [_DRAWN]
    # A block marked python is one that runs by itself; cells go on from those before them.
    return "\n\n".join([f"```py\n{source}\n```", *shown])


def _shown(output: dict[str, Any]) -> str:
    """Return what a cell shows, a table without the style that Jupyter gives it."""
    data = output.get("data", {})
    if "text/html" not in data:
        text = "".join(data.get("text/plain", output.get("text", [])))
        return f"```text\n{text.rstrip()}\n```"
    plain = re.sub(
        r"<style.*?</style>|<p>.*?</p>", _paragraph, "".join(data["text/html"]), flags=re.S
    )
    return re.sub(r">\s+<", "><", plain).strip()


def _paragraph(found: "re.Match[str]") -> str:
    """Return a paragraph with an empty line after it, and nothing of a style."""
    return "" if found[0].startswith("<style") else f"{found[0]}\n\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
