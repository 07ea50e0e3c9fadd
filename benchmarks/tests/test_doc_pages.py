"""The pages follow the map, are short, up to date with the code, and their anchors are there."""

import re
import struct
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from places import RECORDINGS, ROOT

DOCS = ROOT / "docs"

PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
SECTIONS = ["Start", "Use", "Shelf", "Extend", "Explain", "Reference", "Evidence"]
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
MOST_LINES = 250
MOST_PAGES = 42
MOST_LINKS = 15


def pages_in(entry):
    """Return the pages of a part of the nav, however deep."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_in(part)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read_in_one_sitting(page):
    assert len((DOCS / page).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_page_has_one_place_in_the_navigation():
    assert [title for entry in NAV for title in entry] == SECTIONS
    # Decisions are for developers.
    shelf = [page for page in pages_in(NAV) if page.startswith("contrib/")]
    assert len(pages_in(NAV)) - len(shelf) <= MOST_PAGES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"](docs/{page})" in readme.partition("\n## More\n")[2] for page in shelf)
    assert Counter(pages_in(NAV)) == Counter(page for page in PAGES if page != "decisions.md")


def linked(page):
    """Return the pages that a page of docs/ links to."""
    folder, text = (DOCS / page).parent, (DOCS / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([\w/.-]+\.md)(?:#[\w-]+)?\)", text)
    return [(folder / t).resolve().relative_to(DOCS).as_posix() for t in targets]


def test_the_first_page_has_few_links_and_leads_to_all_pages():
    assert len(linked("index.md")) <= MOST_LINKS
    reached = {"index.md"}
    for _ in range(4):
        reached |= {target for page in reached for target in linked(page)}
    assert set(PAGES) - reached == set()


def test_the_tables_of_synthetic_devices_are_what_the_command_prints():
    if not RECORDINGS.is_dir():
        pytest.skip("published recordings are not here")
    page = (DOCS / "trace-sources.md").read_text(encoding="utf-8")
    shown = page.split("<!-- populations: begin -->\n")[1].split("\n<!-- populations: end -->")[0]
    command = [sys.executable, str(ROOT / "benchmarks/populations/compared.py"), str(RECORDINGS)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == shown


def test_the_page_of_commands_is_what_the_commands_say():
    from commands_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/commands_page.py"


def test_the_page_of_the_notebook_is_what_the_notebook_shows():
    from notebook_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/notebook_page.py"


def test_the_page_of_commands_has_every_command_and_option():
    from commands_page import page
    from typer.testing import CliRunner

    from fedstale.cli.main import app

    text = page()
    rows = {
        tuple(re.match(r"\| `fedstale ([a-z-]+(?: [a-z-]+)?)", line)[1].split()): line
        for line in text.splitlines()
        if line.startswith("| `fedstale ")
    }
    assert 20 < len(rows) <= 37, "few commands, which a reader can keep in mind"
    for words, row in rows.items():
        if words in {("node",), ("flwr",), ("deploy", "superlink"), ("deploy", "superexec")}:
            continue  # Flower's own program answers.
        result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0, words
        lines = re.findall(r"^│ (?:\* )? *(--[a-z-]+)", result.output, re.MULTILINE)
        assert set(re.findall(r"`(--[a-z-]+)`", row)) == set(lines) - {"--help"}, words
        needed = re.findall(r"^│ \* +(--[a-z-]+)", result.output, re.MULTILINE)
        assert set(re.findall(r"\*\*`(--[a-z-]+)`\*\*", row)) == set(needed), words
    # Their own options are explained on the page, since their help is Flower's.
    for option in ("--socket", "--hold", "--user"):
        assert re.search(rf"^\| `{option}` \| [A-Z].*\. \|", text, re.MULTILINE), option


FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors_of(path):
    """Return the anchors of a page's headings, as the site and GitHub name them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", slug) for slug in slugs}


def test_an_anchor_is_made_as_the_site_makes_it(tmp_path):
    (page := tmp_path / "a.md").write_text(
        "# What `up` starts\n```sh\n# no title\n```\n## FADAS, x\n"
    )
    assert anchors_of(page) == {"what-up-starts", "fadas-x"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=str)
def test_anchors_of_links_are_there(page):
    links = re.findall(r"\]\(([\w/.-]*?)#([\w-]+)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        path = page.parent / target if target else page
        assert anchor in anchors_of(path), f"{target}#{anchor}"


LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=str)
def test_links_lead_to_files_that_are_there(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve()
        assert found.exists(), target
        # The documentation site holds nothing but docs/.
        assert page.name == "README.md" or found.is_relative_to(DOCS), target


def test_pages_that_code_and_units_name_are_there():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a clone")
    named = set()
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".toml", ".md", ".yaml", ".yml", ".service"} and path.is_file():
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", text))
    assert ("docs/formats.md", "") in named
    for page, anchor in named:
        assert (ROOT / page).is_file(), page
        assert not anchor or anchor in anchors_of(ROOT / page), f"{page}#{anchor}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=str)
def test_tests_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    for test in re.findall(r"(?:benchmarks/)?tests/[\w/]*test_\w+\.py", text):
        assert (ROOT / test).is_file(), test


def size_of(picture):
    """Return width and height of a PNG, in pixels."""
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_every_screenshot_is_drawn_by_the_script_and_shown():
    from screenshots import SHOTS

    shown = set(re.findall(r"images/([\w-]+)\.png", (DOCS / "watch.md").read_text()))
    assert shown == set(SHOTS) == {path.stem for path in (DOCS / "images").glob("*.png")}
    for name, shot in SHOTS.items():
        picture = DOCS / "images" / f"{name}.png"
        assert picture.stat().st_size < 200_000
        # A phone has two pixels for one of CSS.
        assert size_of(picture)[0] == shot["width"] * (1 if shot["width"] >= 500 else 2)


@pytest.mark.slow
def test_the_script_draws_all_screenshots(tmp_path):
    from screenshots import SHOTS, main, missing

    if why := missing():
        pytest.skip(why)
    main(tmp_path)
    for name in SHOTS:
        assert size_of(tmp_path / f"{name}.png") == size_of(DOCS / "images" / f"{name}.png")


COMMAND = re.compile(r"python (?:\\\n\s*)?(benchmarks/[\w/]+\.py)((?:[^`\n;#]|\\\n)*)")
NAMING = [
    *(ROOT / name for name in ("Makefile", "benchmarks/Makefile", "README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for end in ("md", "py") for path in sorted((ROOT / "benchmarks").glob(f"*/*.{end}"))),
]


def test_commands_of_benchmarks_name_scripts_and_options_that_are_there():
    unknown, n_options = [], 0
    for path in (path for path in NAMING if path.parent.name != "tests"):
        for name, rest in COMMAND.findall(path.read_text(encoding="utf-8")):
            script = ROOT / name
            if not script.exists():
                unknown.append((path.name, name))
                continue
            # A script may read its options by a function of the one beside it.
            texts = "".join(p.read_text(encoding="utf-8") for p in script.parent.glob("*.py"))
            options = re.findall(r"--[a-z-]+", rest)
            unknown += [(path.name, name, each) for each in options if f'"{each}"' not in texts]
            n_options += len(options)
    assert unknown == []
    assert n_options > 150
