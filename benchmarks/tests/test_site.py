"""The documentation site draws its formulas, is searched from the disk, and asks no other host."""

import hashlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from browser import browsing, missing
from places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
NO_SCRIPT = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$[^$\n]+\$")
DISPLAYED = re.compile(r"^\$\$\n[^$]+\n\$\$$", re.MULTILINE)


def prose(page):
    """Return a page without its code."""
    return NO_SCRIPT.sub("", (DOCS / page).read_text(encoding="utf-8"))


def n_formulas(page):
    """Return how many formulas a page has, and what is left of it without them."""
    rest, displayed = DISPLAYED.subn("", prose(page))
    rest, inline = INLINE.subn("", rest)
    return displayed + inline, rest


@pytest.fixture
def formulas():
    """Return the module that converts formulas."""
    for name in ("latex2mathml", "markdown"):
        pytest.importorskip(name, reason=f"{name} is not installed: make setup")
    import formulas

    return formulas


@pytest.mark.parametrize("page", PAGES)
def test_every_formula_of_a_page_becomes_mathml(formulas, page):
    import markdown

    n, rest = n_formulas(page)
    assert "$" not in rest
    # Code within the text first: what stands in it is no formula.
    made = markdown.markdown(
        re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S),
        extensions=["tables", formulas.Formulas()],
    )
    assert made.count("<math") == made.count("</math>") == n
    assert "$" not in re.sub(r"<code>.*?</code>", "", made, flags=re.DOTALL)


def test_the_weightings_have_formulas():
    assert n_formulas("weightings.md")[0] > 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a $x^2$ b", 1),
        ("($x$), $y$.", 2),
        ("`$x$` and \\$5 and $HOME", 0),
        ("costs 5$ or 6$ a day", 0),
        ("$$\nx\n$$", 1),
        ("| a | b |\n|---|---|\n| $\\lvert x \\rvert$ | `$y$` |", 1),
    ],
)
def test_formulas_are_what_github_takes_for_them(formulas, text, expected):
    import markdown

    made = markdown.markdown(text, extensions=["tables", formulas.Formulas()])
    assert made.count("<math") == expected


def test_a_displayed_formula_stands_alone_and_keeps_its_backslashes(formulas):
    import markdown

    text = "Text.\n\n$$\nr \\gets \\{ \\theta \\}\n$$\n\nMore."
    made = markdown.markdown(text, extensions=[formulas.Formulas()])
    assert made.count('display="block"') == 1
    assert made.count("<p>") == 2, "those of the text"
    assert made.count('<div class="formula">') == 1
    assert "\\" not in made


@pytest.mark.parametrize("wrong", [r"\frac{1}", r"\thetta", r"{x", "x^a^b"])
def test_a_formula_that_is_none_ends_the_build_with_its_text(formulas, wrong):
    import markdown

    with pytest.raises(ValueError, match=re.escape(wrong)):
        markdown.markdown(f"a ${wrong}$ b", extensions=[formulas.Formulas()])


def test_the_program_for_search_is_the_one_published():
    program = DOCS / "vendor" / "iframe-worker.js"
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    assert digest == "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609"
    assert "Martin Donath" in (DOCS / "vendor" / "iframe-worker.LICENSE.txt").read_text()


class _Asked(HTMLParser):
    """Collects what a browser fetches to show a page, and counts formulas."""

    def __init__(self, text):
        super().__init__()
        self.asked, self.n_formulas, self._in_formula = [], 0, False
        self.raw = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "math":
            self.n_formulas += 1
            self._in_formula = True
        if tag == "link" and not {"canonical", "next", "prev"} & set(attrs["rel"].split()):
            self.asked.append(attrs["href"])
        self.asked += [attrs[key] for key in ("src", "srcset", "poster", "data") if key in attrs]

    def handle_endtag(self, tag):
        self._in_formula &= tag != "math"

    def handle_data(self, data):
        if self._in_formula:
            self.raw += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the site, built strictly."""
    for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(name, reason="needs the extra docs: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_what_it_shows(site):
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) == len(PAGES)
    for page in pages:
        asked = _Asked(page.read_text(encoding="utf-8")).asked
        assert any(address.endswith("iframe-worker.js") for address in asked)
        for address in asked:
            place = urlsplit(address)
            assert not place.netloc, f"{page.name}: {address}"
            assert place.scheme in {"", "data"}, f"{page.name}: {address}"
            if not place.scheme:
                assert (page.parent / place.path).exists(), f"{page.name}: {address}"
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", sheet.read_text())
        assert not [address for address in found if urlsplit(address).netloc], sheet.name


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("api/")])
def test_a_page_of_the_site_has_its_formulas_and_no_raw_ones(site, page):
    made = _Asked((site / page).with_suffix(".html").read_text(encoding="utf-8"))
    assert made.n_formulas == n_formulas(page)[0]
    assert "\\" not in made.raw
    assert "$" not in made.raw


@pytest.mark.slow
def test_the_site_is_searched_from_the_disk(site):
    if why := missing():
        pytest.skip(why)
    with browsing() as browser:
        browser.call("POST", "/url", {"url": (site / "index.html").as_uri()})
        browser.ask("document.querySelector('[data-md-toggle=search]').click()")
        browser.wait("return document.querySelector('.md-search__input').offsetWidth > 0")
        query = {"using": "css selector", "value": "[data-md-component=search-query]"}
        box = browser.call("POST", "/element", query)
        (element,) = box.values()
        browser.call("POST", f"/element/{element}/value", {"text": "staleness"})
        found = (
            "return [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href)"
        )
        browser.wait(f"{found}.length > 0")
        links = browser.ask(found)
        assert any("weightings.html" in link for link in links), links
        # What is found opens, from the disk too.
        browser.call("POST", "/url", {"url": links[0]})
        assert browser.ask("return location.protocol") == "file:"
        assert browser.ask("return document.querySelectorAll('article h1').length") == 1
        assert browser.requests() == []


@pytest.mark.slow
def test_a_browser_draws_the_formulas_within_a_phone(site):
    if why := missing():
        pytest.skip(why)
    with browsing(width=390) as browser:
        for page in (page for page in PAGES if n_formulas(page)[0]):
            browser.call("POST", "/url", {"url": (site / page).with_suffix(".html").as_uri()})
            assert browser.ask("return document.documentElement.scrollWidth <= innerWidth"), page
        browser.call("POST", "/url", {"url": (site / "weightings.html").as_uri()})
        sizes = browser.ask(
            "return [...document.querySelectorAll('math')].map((m) => m.getBoundingClientRect())"
            ".map((box) => [box.width, box.height])"
        )
        assert len(sizes) == n_formulas("weightings.md")[0]
        assert all(width > 3 and height > 5 for width, height in sizes)
        # A fraction is higher than a line: it is drawn as one.
        assert max(height for _, height in sizes) > 30
        assert browser.requests() == []
