"""The rule of judging: a rate chosen on tuning seeds, then the test seeds once, paired by seed.

A method is a Python file that returns a strategy for a scenario and a rate, or a text of one. The
file is its author's own code, and is imported as an app is: nothing keeps it from anything.

The accuracy is that of the server's evaluations, read 200 times in a run and averaged over the last
ten readings. The target is reached where that is, within the budgets of time and device-hours; a
run that does not reach it counts with all of both.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain, product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from flwr.serverapp.strategy import Strategy

from fedstale import api
from fedstale.comparison import difference
from fedstale.contrib.suite.scenarios import Scenario, Setting, Task
from fedstale.errors import ConfigError, first_line, nearest
from fedstale.live import progress_line
from fedstale.parallel import Report, WorkerPool
from fedstale.reports import Run, write_text
from fedstale.runs import CONFIG, make_folder, status_of
from fedstale.strategies import parse
from fedstale.strategies.types import n_cores
from fedstale.version import __version__

REFERENCE, ROWS, PAGE, SCENARIO = "FedBuff", "rows.json", "row.md", "scenario.toml"
READINGS, SMOOTHED = 200, 10
RATES, MOST = (0.3, 1.0), 5
"""Rates of the server that are tried where a file names none, and how many it may name."""
RATIOS = {"hours": "hours", "device_hours": "device-hours", "gigabytes": "GB"}
SHARES = {"accuracy": "accuracy", "slow": "slow third", "gap": "fast - slow"}
"""Scores that are compared as ratios, or else as differences, and the words for them."""
Row = dict[str, Any]
Trial = tuple[Setting, tuple[str, str], str, Path, float, float, int]
"""Scenario, task, method, folder, rate, skew and seed of a run, as its process is given it."""
TABLE = Path(__file__).with_name("table.json")
_HERE, _task, _kept = Path(__file__).parent, cache(Task), dict[tuple[str, str, int], Any]()


@dataclass(frozen=True, slots=True)
class Method:
    """What is judged: a title, rates to try, and the function `strategy` of its file."""

    source: str
    title: str
    rates: tuple[float, ...]
    checksum: str
    make: Callable[[Scenario, float], Any]

    @classmethod
    def of(cls, source: str) -> "Method":
        """Import the file at a path, or take a text; ConfigError if it is no method."""
        path = Path(source)
        if path.suffix != ".py":
            parse(source)
            checksum = sha256(source.encode()).hexdigest()
            return cls(source, source, (1.0,), checksum, lambda scenario, rate: source)
        spec = spec_from_file_location(f"fedstale_suite_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"method = {source!r}: no such file")
        # Its classes are found by its name, and modules beside it as those beside a script.
        module = sys.modules[spec.name] = module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))
        try:
            spec.loader.exec_module(module)
        except Exception as problem:
            raise _raised(source, problem) from None
        finally:
            sys.path.remove(str(path.resolve().parent))
        make, rates = getattr(module, "strategy", None), getattr(module, "RATES", RATES)
        if not callable(make):
            raise ConfigError(f"method = {source!r}: expected a function strategy(scenario, rate)")
        several = isinstance(rates, tuple | list) and 1 <= len(rates) <= MOST
        if not several or not all(type(x) in {int, float} and 0 < x < inf for x in rates):
            told = f"RATES = {rates!r}: expected one to {MOST} numbers > 0"
            raise ConfigError(f"method = {source!r}: {told}")
        title = ((module.__doc__ or "").strip() or path.stem).splitlines()[0].partition(":")[0]
        checksum = sha256(path.read_bytes()).hexdigest()
        return cls(source, title.rstrip("."), (*rates,), checksum, make)

    def strategy(self, scenario: Scenario, rate: float) -> Strategy:
        """Make the strategy of one run; ConfigError if the file's function returns none."""
        try:
            made = self.make(scenario, rate)
        except Exception as problem:
            raise _raised(self.source, problem) from None
        made = parse(made, seed=scenario.seed) if isinstance(made, str) else made
        if not isinstance(made, Strategy):
            told = f"returned {made!r}: expected a strategy, or a text such as 'FedBuff(20, 5)'"
            raise ConfigError(f"method = {self.source!r}: strategy() {told}")
        return made


def _raised(source: str, problem: Exception) -> ConfigError:
    told = first_line(f"{type(problem).__name__}: {problem}")
    return ConfigError(f"method = {source!r} raised {told}")


def played(trial: Trial, report: Report) -> Row:
    """Play a run, or go on with it, and return its scores; ConfigError if it failed."""
    setting, of, source, root, rate, skew, seed = trial
    task, seen, about = _task(*of), setting.seen(seed), setting.table[of[0]]
    if (key := (setting.name, task.name, seed)) not in _kept:
        _kept[key] = setting.devices(seed, task)
    traces, waits = _kept[key]
    folder = root / f"{rate:g}-{skew:g}-{seed}"
    ended = status_of(folder) if (folder / CONFIG).is_file() else "new"
    fixed = {"num-server-rounds": 10**9, "round-timeout": seen.timeout_s, **task.own}
    costs = {key.replace("-", "_"): value for key, value in about["costs"].items()}
    run = Run(folder) if ended in {"finished", "stopped", "stuck"} else None
    run = run or api.simulate(
        task.app.directory,
        traces=traces,
        strategy=Method.of(source).strategy(seen, rate),
        until=f"{setting.table['budget-h']}h",
        seed=seed,
        out=folder,
        resume=ended in {"", "interrupted"},
        overwrite=ended == "failed",
        run_config=about["run-config"] | fixed | ({"alpha": skew} if task.has_skew else {}),
        executor="inline",
        progress=False,
        **costs | {"model_bytes": setting.table["model-bytes"]},
    )
    if run.status == "interrupted":
        raise KeyboardInterrupt
    if run.status == "failed":
        where = f"with rate {rate:g}, skew {skew:g} and seed {seed}"
        raise ConfigError(f"method = {source!r} failed {where}: {run.reason}")
    found = scores(run, setting.table, about["target"])
    # Without a step there is no model.
    none = np.array([[0.0], [1.0]]) + np.zeros(seen.n_devices)
    accuracy, sizes = task.right(run.model, skew, seed, seen.n_devices) if run.model else none
    fast, *_, slow = np.array_split(np.argsort(waits, kind="stable"), 3)
    found["slow"] = np.average(accuracy[slow], weights=sizes[slow])
    found["gap"] = np.average(accuracy[fast], weights=sizes[fast]) - found["slow"]
    rounded = {name: round(float(value), 5) for name, value in found.items()}
    return {"rate": rate, "skew": skew, "seed": seed} | rounded


def scores(run: Run, of: Mapping[str, Any], target: float) -> dict[str, float]:
    """Return what a run of a scenario's table came to by its budgets, but for its devices."""
    end_s, budget_s = 3600.0 * of["budget-h"], 3600.0 * of["budget-h"] * of["concurrency"]
    instants = end_s / READINGS * np.arange(1, READINGS + 1)
    at_s, accuracy = run.curve("accuracy", "server")
    accuracy = accuracy if accuracy.size else np.zeros(1)
    read = np.nan_to_num(accuracy[np.searchsorted(at_s, instants, side="right") - 1])
    padded = np.concatenate([np.repeat(accuracy[:1], SMOOTHED - 1), read])
    smooth = np.convolve(padded, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
    if run.costs["device_s"] > budget_s:
        used = np.array([run.device_s_until(at) for at in instants])
        smooth = smooth[: max(int(np.searchsorted(used, budget_s, side="right")), 1)]
    when = np.flatnonzero(smooth >= target)
    at = float(instants[when[0]] if when.size else end_s)
    found = {"reached": when.size > 0, "hours": at / 3600.0}
    found["device_hours"] = (run.device_s_until(at) if when.size else budget_s) / 3600.0
    return found | {"gigabytes": run.costs["bytes"] / 1e9, "accuracy": smooth[-1]}


def judge(
    source: str,
    scenario: str,
    out: Path,
    *,
    task: str = "digits",
    data: str = "",
    quick: bool = False,
    recordings: Path | None = None,
    workers: int | None = None,
    progress: bool | None = False,
) -> Row:
    """Judge a method, a file or a text, and write its row and a page into a folder.

    Runs that are over are kept, and interrupted ones go on; a file that has changed begins anew.

    Args:
        source: of the method.
        scenario: its name; with a folder of recordings that of NAME@recorded.
        out: the folder.
        task: what is trained.
        data: path of its data, where it brings none.
        quick: one skew, one tuning seed and two test seeds: a look, which no table has.
        recordings: what `fedstale traces fetch` brings.
        workers: runs at a time; None takes one for each core.
        progress: whether a line on stderr tells of runs; None on a terminal.

    Raises:
        ConfigError: something cannot be, is another here, or a run failed.
    """
    setting, method = Setting.find(scenario, recordings), Method.of(source)
    if task not in (tasks := setting.table["tasks"]):
        raise ConfigError(f"task = {task!r}: expected {nearest(task, tasks)}")
    skews = setting.skews(_task(task, data))
    tuning, seeds = setting.table["tuning-seeds"], setting.table["seeds"]
    if quick:
        skews, tuning, seeds = skews[len(skews) // 2 :][:1], tuning[:1], seeds[:2]
    for rate in method.rates:
        method.strategy(setting.seen(seeds[0]), rate)
    make_folder(out)
    about = setting, (task, data), source, out / "runs" / method.checksum[:12]
    with progress_line(progress) as say, WorkerPool(played, out / "log.txt") as pool:

        def play(rates: Sequence[float], some: Sequence[int]) -> list[Row]:
            found, trials = list[Row](), [(*about, *one) for one in product(rates, skews, some)]
            events = pool.work(trials, workers or n_cores())
            for _, news, what in chain([(None, "begin", None)], events):
                if news in {"rejected", "died"}:
                    raise ConfigError(what)
                found += [what] if news == "done" else []
                if say is not None:
                    say(f"{len(found)} of {len(trials)} runs with the seeds {some} are over")
            return sorted(found, key=lambda run: (run["rate"], run["skew"], run["seed"]))

        tuned = play(method.rates, tuning) if len(method.rates) > 1 else []
        best = min(method.rates, key=lambda rate: _cost(x for x in tuned if x["rate"] == rate))
        runs = play([best], seeds)
    row = {"scenario": setting.name, "task": task, "method": method.title, "quick": quick}
    row |= {"rate": best if tuned else None, "checksum": method.checksum}
    row |= {"fedstale": __version__, "tuned": tuned, "runs": runs}
    write_text(json.dumps(row, indent=1) + "\n", out / ROWS)
    write_text(tomli_w.dumps({setting.name: setting.table}), out / SCENARIO)
    write_text(page(row, setting), out / PAGE)
    return row


def _cost(runs: Iterable[Row]) -> list[float]:
    """Return the mean device-hours of runs, and what decides where these are equal."""
    own = [(run["device_hours"], -run["accuracy"]) for run in runs] or [(0.0, 0.0)]
    return np.mean(own, axis=0).tolist()


def standing(scenario: str, task: str = "digits") -> list[Row]:
    """Return the rows of standing methods, with the scores of each run; the reference is one."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if TABLE.is_file() else []
    return [row for row in rows if (row["scenario"], row["task"]) == (scenario, task)]


def table(rows: Sequence[Row], own: Row | None = None) -> str:
    """Return a table in Markdown, the fewest device-hours first; a row of one's own is bold."""
    base, lines = next((row for row in rows if row["method"] == REFERENCE), None), []
    for row in [*rows, *([own] if own else [])]:
        runs, name = row["runs"], f"**{row['method']}**" if row is own else row["method"]
        reached = f"{sum(int(run['reached']) for run in runs)} of {len(runs)}"
        rate = "-" if row["rate"] is None else f"{row['rate']:g}"
        cells = [name, rate, reached, *(cell(row, base, score) for score in [*RATIOS, *SHARES])]
        lines.append(
            (np.mean([*by_seed(row, "device_hours").values()]), f"| {' | '.join(cells)} |")
        )
    names = ["method", "rate", "reached", *RATIOS.values(), *SHARES.values()]
    head = f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}"
    return "\n".join([head, *(line for _, line in sorted(lines))])


def by_seed(row: Row, score: str) -> dict[int, float]:
    """Return the mean of a score over skews, by seed."""
    seeds = dict.fromkeys(run["seed"] for run in row["runs"])
    return {s: float(np.mean([x[score] for x in row["runs"] if x["seed"] == s])) for s in seeds}


def cell(row: Row, base: Row | None, score: str) -> str:
    """Return a score in words, and in brackets how it stands to the reference's."""
    own, is_ratio = by_seed(row, score), score in RATIOS
    is_bound = score in {"hours", "device_hours"} and not all(x["reached"] for x in row["runs"])
    text = "≥ " * is_bound + format(np.mean([*own.values()]), ".3g" if is_ratio else ".3f")
    if base is None or base is row:
        return text
    both = [
        {s: np.log(x) if is_ratio else x for s, x in v.items()} for v in (own, by_seed(base, score))
    ]
    found = difference(both[0], both[1])
    ends = [f"{np.exp(x):.2f}" if is_ratio else f"{x:+.3f}" for x in (found.low, found.high)]
    return text if np.isnan(found.low) else f"{text} ({' to '.join(ends)})"


def page(row: Row, setting: Setting) -> str:
    """Return the page of a row: it beside the standing ones, or alone where there are none."""
    rows, of = [] if row["quick"] else standing(row["scenario"], row["task"]), setting.table
    words = {"quick": "A quick look, not comparable to the table.\n\n" * row["quick"]}
    words |= {"target": of[row["task"]]["target"], "hours": of["budget-h"]}
    words |= {"device_hours": of["budget-h"] * of["concurrency"], "table": table(rows, row)}
    return (_HERE / "page.md").read_text(encoding="utf-8").format(**row | words)
