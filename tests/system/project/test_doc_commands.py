"""The commands that the pages show but no machine runs as they stand run too, cut short.

`test_page_blocks.py` runs the blocks marked sh. What stands in a block marked text wants a device,
a day, or files of the reader's: here each such command of fedstale runs in a folder that has these
files.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from clothes import write_clothes
from made_agent import save
from places import RECORDINGS, ROOT
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.traces import TraceSet

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHORT = {
    "simulate": ["--until", "2m"],
    "record": ["--for", "2s", "--every", "1s"],
    # Phones are away for hours; a trace is acted in real time.
    "replay": ["--traces", "synthetic:4@desktops", "-c", "num-server-rounds=1"],
    "forecaster train": ["--kind", "last-value"],
    "forecaster backtest": ["--step", "6h", "--examples", "200"],
}
"""What ends a command early, by its name; the last of two equal options counts."""

ELSEWHERE = {
    "fetch": "tests/fedstale/test_trace_commands.py",  # from a server on loopback
    "agent train": "tests/fedstale/test_agent_commands.py",
    "agent evaluate": "tests/fedstale/test_agent_commands.py",
    "own.toml": "tests/system/journeys/test_researcher.py",
    "picks.toml": "tests/system/journeys/test_researcher.py",
    "--power": "tests/contrib/energy/test_energy.py",
    "--verify": "tests/contrib/audit/test_verify_command.py",
    "suite": "tests/system/contrib/suite/test_suite_command.py",
    "tune": "tests/system/contrib/tuning/test_tune_command.py",
    "up": "tests/fedstale/deployment/test_check_app.py",
    "--resume": "tests/fedstale/cli/test_options.py",
    "--server": "tests/system/deployment/test_stranger.py",
    "--socket": "tests/system/deployment/test_stranger.py",  # deploy superlink
    "--user": "tests/system/deployment/test_stranger.py",  # deploy superexec
    "flwr": "tests/system/deployment/test_stranger.py",
    "node": "tests/system/deployment/test_stranger.py",
    "--checkpoints": "tests/system/deployment/test_killed_server_app.py",  # deploy run
}
"""Commands and options that another test runs."""

IN_ORDER = {"first-app.md", "first-comparison.md"}
"""Pages whose commands run one after the other, in `tests/system/journeys/test_student.py`."""

LONG = {"waiting.toml"}
ALIASES = {
    "flash-days.json": "cached_timers.json",
    "ai-benchmark-devices.json": "models.json",
}
"""Files of recordings by the names that the README gives them."""


def shown():
    """Yield each command of fedstale in the text blocks of the pages, once."""
    commands = {}
    for page in (page for page in PAGES if page.name not in IN_ORDER):
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if line.startswith("fedstale ") else []
                if words:
                    commands.setdefault(tuple(words[1:]), page.name)
    for words, page in commands.items():
        marks = [pytest.mark.slow] if LONG & set(words) else []
        yield pytest.param(list(words), id=f"{page}: {' '.join(words)[:60]}", marks=marks)


RUN = ["simulate", "digits", "--traces", "synthetic:20", "--until", "10m", "--out"]
PLAN = """
app = "digits"
traces = "synthetic:20"
until = "5m"
seeds = [1, 2]
target = "accuracy 0.85"

[variants.A]
run-config = { strategy = "FedBuff(10, 5)" }

[variants.B]
run-config = { strategy = "GapAware(10, 5)" }
"""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """Return a folder that has the app and the traces of the pages, to be copied."""
    folder = tmp_path_factory.mktemp("pages")
    called("new", folder / "my_app")
    phones = TraceSet.synthetic(60, days=3, seed=0)
    phones.write(folder / "phones.parquet")
    # Five have one digit in their names, so that no device is in both.
    TraceSet.synthetic(5, seed=0, population="desktops").write(folder / "desktops.parquet")
    # A week or more, of which one device can learn on a part.
    single = TraceSet.synthetic(3, days=8, seed=0)
    for i, name in enumerate(("boxes", "phone", "tablet")):
        single.take([i]).write(folder / f"{name}.parquet")
    (folder / "waiting.toml").write_text(PLAN, encoding="utf-8")
    (folder / "log.csv").write_text("who,from,to\na,2024-06-01 08:00,2024-06-01 09:00\n")
    (folder / "grid.csv").write_text("time,g_per_kwh\n0,100\n3600,300\n")
    write_clothes(folder / "clothes")
    (folder / "examples").symlink_to(ROOT / "examples")
    speech = "To be, or not to be, that is the question.\n" * 800
    (folder / "plays.txt").write_text(f"HAMLET:\n{speech}", encoding="utf-8")
    for recording in RECORDINGS.iterdir() if RECORDINGS.is_dir() else ():
        (folder / recording.name).symlink_to(recording)
        alias = ALIASES.get(recording.name)
        if alias:
            (folder / alias).symlink_to(recording)
    return folder


@pytest.fixture
def place(furnished, tmp_path, monkeypatch):
    """Go to a copy of that folder."""
    shutil.copytree(furnished, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")


def called(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"fedstale {' '.join(map(str, words))}\n{result.output}"


def prepare(name, words):
    """Make what one command reads and others do not."""
    if name == "compose" and not RECORDINGS.is_dir():
        pytest.skip(f"{RECORDINGS} is not there")
    if "fleet.parquet" in words and name.partition(" ")[0] in {"simulate", "forecaster"}:
        shutil.copy("phones.parquet", "fleet.parquet")
        save(Path("agents/mine"))
        Path("agents/pace").mkdir()
        shutil.copy(ROOT / "agents/policy/pace.toml", "agents/pace")
    if "own.parquet" in words and name in {"compose", "describe"}:
        log = ("log.csv", "device=who", "start=from", "end=to", "--time-zone", "UTC")
        called("traces", "convert", *log, "--out", "own.parquet")
    if name == "merge":
        for device in ("phone", "tablet"):
            out = ("--out", f"{device}.parquet", "--device", device)
            called("traces", "record", *out, "--overwrite", "--compute", "10 u", *SHORT["record"])
    if name == "forecaster backtest":
        given = ("--traces", words[words.index("--traces") + 1])
        out = ("--out", words[2])
        called("forecaster", "train", *given, *out, *SHORT["forecaster train"])
    if name in {"record", "compose"} and "own.parquet" not in words:
        Path(words[words.index("--out") + 1]).unlink(missing_ok=True)
    if any("runs/base" in word for word in words) and "--out" not in words:
        small = ("-c", "width=32 layers=1 local-steps=2 text='plays.txt' num-server-rounds=1")
        sites = ("--traces", "synthetic:12@sites")
        called("simulate", "examples/letters", *sites, *small, "--out", "runs/base")
    if name == "compare" and "runs/a" in words:
        for i, run in enumerate(words[1:5]):
            strategy = ("FedBuff", "GapAware")[i // 2]
            called(*RUN, run, "--seed", i % 2, "-c", f"strategy='{strategy}(10, 5)'")


def test_there_are_such_commands():
    assert len(list(shown())) >= 15


@pytest.mark.parametrize("words", list(shown()))
def test_a_command_of_the_pages_runs(words, place):
    name = next(word for word in words if word != "traces")
    name = " ".join(words[:2]) if name in {"agent", "forecaster"} else name
    for word, test in ELSEWHERE.items():
        if word in {*words, name}:
            quoted = '"' + '", "'.join(word.split()) + '"'
            assert quoted in (ROOT / test).read_text(encoding="utf-8"), f"{test}: no {word}"
            return
    prepare(name, words)
    small = ["-c", "width=32 layers=1 local-steps=2"] if "examples/letters" in words else []
    # On devices that take no time no time passes.
    short = ["--until", "2 rounds"] if any("ideal:" in word for word in words) else []
    called(*words, *SHORT.get(name, []), *small, *short)
