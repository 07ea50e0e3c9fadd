"""Turns the formulas of the pages into MathML while the site is built.

A formula stands between dollar signs, as GitHub shows it: `$...$` within a line, `$$` on the lines
before and after one of its own. Browsers draw MathML themselves, and screen readers read it: a page
needs no script for it. A formula that cannot be converted, or that has a command which is not
known, ends the build with its text.
"""

import re
import xml.etree.ElementTree as ET
from typing import Any

from latex2mathml import converter
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor

INLINE = r"(?<![\\$\w])\$(?![\s$])([^$\n]*[^$\s])\$(?![$\w])"
DISPLAYED = re.compile(r"\$\$\n(.+)\n\$\$\s*", re.DOTALL)
BEFORE_ESCAPES = 185
"""Priority of the pattern: code comes first, and a backslash is the formula's own."""
BEFORE_TABLES = 90
PARTS = {
    **dict.fromkeys(("mfrac", "mroot", "msub", "msup", "munder", "mover"), 2),
    **dict.fromkeys(("msubsup", "munderover"), 3),
}
"""How many elements stand in one."""


def mathml(formula: str, display: str = "inline") -> str:
    """Return a formula as MathML.

    Args:
        formula: LaTeX.
        display: "inline" or "block".

    Raises:
        ValueError: it cannot be converted, has an unknown command, or is not whole.
    """
    try:
        found = converter.convert(formula, display=display)
    except Exception as error:
        raise ValueError(f"${formula}$ is no formula: {type(error).__name__} {error}") from error
    if unknown := re.search(r"\\\w*", found):
        raise ValueError(f"${formula}$ has the unknown command {unknown[0]}")
    # The converter says nothing of an argument or a brace that is missing.
    elements = list(ET.fromstring(found).iter())
    names = [element.tag.rpartition("}")[2] for element in elements]
    whole = all(PARTS.get(name, len(x)) == len(x) for name, x in zip(names, elements, strict=True))
    if not whole or formula.count("{") != formula.count("}"):
        raise ValueError(f"${formula}$ lacks an argument or a brace")
    return found


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class _Displayed(BlockProcessor):
    def test(self, parent: ET.Element, block: str) -> bool:
        return DISPLAYED.fullmatch(block) is not None

    def run(self, parent: ET.Element, blocks: list[str]) -> None:
        found = DISPLAYED.fullmatch(blocks.pop(0))
        assert found is not None
        made = f'<div class="formula">{mathml(found[1], "block")}</div>'
        ET.SubElement(parent, "p").text = self.parser.md.htmlStash.store(made)


class Formulas(Extension):
    """Converts formulas within lines and formulas of their own."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        """Register both."""
        md.inlinePatterns.register(_Inline(INLINE, md), "formula", BEFORE_ESCAPES)
        md.parser.blockprocessors.register(
            _Displayed(md.parser), "displayed-formula", BEFORE_TABLES
        )


def on_config(config: Any) -> Any:
    """Add the extension to the site, as a hook of MkDocs."""
    config["markdown_extensions"].append(Formulas())
    return config
