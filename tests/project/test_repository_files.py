"""What stands beside the code and names parts of it: the parts are there."""

import re
import tomllib
from collections import Counter

import pytest
import yaml
from places import ROOT

from fedstale import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = {
    target
    for name in ("Makefile", "benchmarks/Makefile")
    for target in re.findall(r"^([a-z-]+):", (ROOT / name).read_text(), re.MULTILINE)
}


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


EXTRAS = {"client", "server", "torch", "agents", "ray", "privacy", "docs", "dev"}
TEXTS = [
    path
    for place in ("*.md", "[a-z]*/**/*.md", "[a-z]*/**/*.py", "[a-z]*/**/*.ipynb", "docs/deploy/*")
    for path in ROOT.glob(place)
    if path.is_file() and path.name != "CHANGELOG.md"
    if not {"build", "runs"} & {*path.relative_to(ROOT).parts}
]


def test_version_changelog_citation_and_pages_agree():
    citation = read("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors", "cff-version"} <= set(citation)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    newest = next(heading for heading in headings if heading != "Unreleased")
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", newest)
    for name in (
        "README.md",
        "docs/deploy.md",
        "docs/deploy/Dockerfile",
        "docs/deploy/compose.yaml",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        said = set(re.findall(r"fedstale[-:](\d+\.\d+\.\d+)", text))
        assert said == {__version__}, name


def test_each_extra_that_is_named_exists_and_no_index_is_said_to_have_fedstale():
    assert set(PROJECT["optional-dependencies"]) == EXTRAS
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"(?:fedstale|\.whl|'\.)\[([a-z,]+)\]", text)
        assert set(",".join(named).split(",")) - {""} <= EXTRAS, path
        assert not re.search(r"pip install (--\S+ )*['\"]?fedstale(\[|\s|=|$)", text), path


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_the_pages_name_is_there(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    text = text.replace("make -f benchmarks/Makefile ", "make ")
    for words in re.findall(r"\bmake ((?:[a-z-]+ ?)+)(?=\s|`|;|$)", text):
        assert set(words.split()) & TARGETS, words
    assert {
        "setup",
        "test",
        "test-all",
        "test-system",
        "test-pages",
        "lint",
        "typecheck",
        "bench",
        "check",
    } <= TARGETS


def test_the_readme_says_how_each_python_of_the_classifiers_was_tested():
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert pythons
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = text.partition("\n## Install\n")[2].partition("\n## ")[0]
    assert re.findall(r"Python (3\.\d+)", said) == pythons


def test_what_a_server_installs_has_hashes_and_the_versions_of_the_constraints():
    lock = (ROOT / "docs/deploy/requirements.lock").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", lock, re.M
    )
    assert lock.count("==") == len(entries)
    fixed = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    fixed = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in fixed.items()}
    assert [(n, v) for n, v, _ in entries if fixed.get(n, v) != v] == []
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    names = {re.match(r"[\w-]+", text)[0].lower() for text in needed} - {"fedstale"}
    assert names <= {name for name, *_ in entries}
    for name in ("docs/deploy.md", "docs/deploy/Dockerfile"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(r"--require-hashes .*-r \S*requirements\.lock", text), name


def test_no_two_files_of_tests_have_one_name():
    # They are modules without a package: pytest refuses the second.
    rooms = ROOT / "tests", ROOT / "benchmarks" / "tests"
    names = [path.name for room in rooms for path in room.rglob("test_*.py")]
    assert len(names) > 300
    assert [name for name, n in Counter(names).items() if n > 1] == []
