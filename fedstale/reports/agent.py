"""The pages of a selection agent: how its training went, and how it does against other selectors.

The page of a training reads what the training records: `progress.jsonl` and agent.toml.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale.agents.evaluation import AGENT, Evaluation, tie_sentence, wide
from fedstale.agents.policy import FILES
from fedstale.agents.training import PROGRESS
from fedstale.reports.figure import (
    FROM_ZERO,
    Figure,
    Row,
    band,
    cell_text,
    curve,
    forest,
    reference,
)
from fedstale.reports.page import write_figures

TRAINING_PAGE, EVALUATION_PAGE = "training.html", "evaluation.html"

# Of a normal distribution: 95 % lie within so many standard errors.
_NORMAL = 1.96
# More bands than these hide one another.
_BANDS = 4
_TERMS = ("gain", "time", "waste")
_FORESTS = {
    "reward": ("What the agent earns more than each", "difference in reward"),
    "valid_ratio": ("Share of jobs that are of use", "difference in the share"),
    "wasted_s": ("Device-hours wasted in a window", "difference in device-hours"),
}
_SIZES = {"wasted_s": 3600.0}


def facts_of(folder: str | Path) -> list[tuple[str, str]]:
    """Return what the description of an agent says of its origin, as names and values.

    Args:
        folder: of the agent.
    """
    about = FILES.describe(folder)
    facts: dict[str, Any] = {"parameters": about["parameters"], **about["provenance"]}
    facts["made with fedstale"] = facts.pop("fedstale", "unknown")
    found = []
    for name, value in facts.items():
        for key, part in value.items() if isinstance(value, dict) else (("", value),):
            text = ", ".join(map(str, part)) if isinstance(part, list) else str(part)
            found.append((f"{name} {key}".strip().replace("_", " "), text))
    return found


def write_training(folders: Mapping[int, Path], out: Path) -> Path:
    """Write the page of a training, and return the file.

    Args:
        folders: of the trainings, by seed; each holds an agent and its progress.
        out: folder of the page; the agent that was kept is in it.

    Raises:
        ConfigError: the page cannot be written.
    """
    updates = pd.concat(
        [_progress(folder).assign(seed=seed) for seed, folder in folders.items()],
        ignore_index=True,
    )
    facts = facts_of(out)
    about = dict(facts)
    kept = int(about["training seed"])
    n_seeds = f", the best of {len(folders)} trainings in validation" if len(folders) > 1 else ""
    return write_figures(
        "Training of a selection agent",
        f"The agent of seed {kept} as it was after update {about['best update']} of "
        f"{about['training updates']}{n_seeds}. On devices that it did not learn from, its "
        f"advantage over the heuristic is {float(about['validation']):+.3f} a window.",
        training_figures(updates, kept=kept),
        out / TRAINING_PAGE,
        texts={"Settings": "\n".join(f"{name}: {value}" for name, value in facts)},
    )


def _progress(folder: Path) -> pd.DataFrame:
    lines = (folder / PROGRESS).read_text(encoding="utf-8").splitlines()
    return pd.DataFrame([json.loads(line) for line in lines])


def training_figures(updates: pd.DataFrame, *, kept: int) -> list[Figure]:
    """Return the figures of a training.

    Args:
        updates: lines of `progress.jsonl`, with the seed of their training.
        kept: the seed whose agent was kept.
    """
    validated = updates.dropna(subset="validation")
    return [_advantage(validated), _terms(validated, kept), _rewards(updates)]


def _advantage(validated: pd.DataFrame) -> Figure:
    """Return the advantage over the heuristic in validation, a curve a training."""
    traces: list[dict[str, Any]] = []
    seeds = [int(seed) for seed in validated["seed"].unique()]
    for i, seed in enumerate(seeds):
        one = validated[validated["seed"] == seed]
        x, y = one["update"], one["validation"].to_numpy(dtype=np.float64)
        half = _NORMAL * one["validation_error"].to_numpy(dtype=np.float64)
        if len(seeds) <= _BANDS:
            traces += band("", i, x, y - half, y + half)
        words = {
            "text": [f"± {h:.3f}" for h in half],
            "hovertemplate": f"seed {seed}, update %{{x}}: %{{y}} %{{text}}",
        }
        traces.append(curve(f"seed {seed}", i, x, y, mode="lines+markers", **words))
    ends = [0.0, float(validated["update"].max())]
    traces.append(reference("heuristic", ends, [0.0, 0.0]))
    bands = f" Bands are {_NORMAL} standard errors to either side." if len(seeds) <= _BANDS else ""
    return Figure(
        id="advantage",
        title="Advantage over the heuristic on other devices",
        about="Mean reward of the validation windows minus that of the heuristic on the same "
        f"windows, after every few updates; at 0 the agent is as good.{bands}",
        traces=traces,
        x_title="updates",
        y_title="difference in reward",
        is_wide=True,
        header=["seed", "update", "advantage", "standard error", *_TERMS],
        rows=[
            [
                str(row["seed"]),
                str(row["update"]),
                f"{row['validation']:+.3f}",
                f"{row['validation_error']:.3f}",
                *(f"{row[f'validation_{name}']:+.3f}" for name in _TERMS),
            ]
            for row in validated.to_dict("records")
        ],
    )


def _terms(validated: pd.DataFrame, kept: int) -> Figure:
    """Return of which terms the advantage is the sum."""
    one = validated[validated["seed"] == kept]
    dots: dict[str, Any] = {"mode": "lines+markers"}
    traces = [
        curve(term, i, one["update"], one[f"validation_{term}"], **dots)
        for i, term in enumerate(_TERMS)
    ]
    ends = [0.0, float(one["update"].max())]
    traces.append(reference("as the heuristic", ends, [0.0, 0.0], showlegend=False))
    return Figure(
        id="terms",
        title="Where the advantage comes from",
        about=f"The terms of the reward, each minus the heuristic's, of seed {kept}; their sum is "
        "the advantage. Above 0 is better in all three: more progress, less time, less waste.",
        traces=traces,
        x_title="updates",
        y_title="difference in reward",
    )


def _rewards(updates: pd.DataFrame) -> Figure:
    """Return the reward of the windows that updates learn from."""
    traces = [
        curve(f"seed {seed}", i, one["update"], one["reward"])
        for i, (seed, one) in enumerate(updates.groupby("seed", sort=False))
    ]
    return Figure(
        id="reward",
        title="Reward while learning",
        about="Mean reward of each update's windows, played by sampling. Every update has new "
        "windows, which differ far more than agents do.",
        traces=traces,
        x_title="updates",
        y_title="reward",
        layout={"xaxis": FROM_ZERO},
    )


def write_evaluation(result: Evaluation, about: str, out: Path) -> Path:
    """Write the page of an evaluation, and return the file.

    Args:
        result: of `evaluate`.
        about: what was played, in a sentence.
        out: folder of the page.

    Raises:
        ConfigError: the page cannot be written.
    """
    figures = evaluation_figures(result.table)
    return write_figures(
        "The agent against other selectors",
        " ".join(filter(None, [about, tie_sentence(result.table)])),
        figures,
        out / EVALUATION_PAGE,
        hidden=" ".join(missing(result.table)),
    )


def evaluation_figures(table: pd.DataFrame) -> list[Figure]:
    """Return a forest of all contenders for what decides.

    Args:
        table: as of `Evaluation`.
    """
    looks = {str(name): i for i, name in enumerate(table["contender"].unique())}
    # The strongest on top, in every figure.
    rewards = table[table["metric"].eq("reward")].set_index("contender")["mean"]
    order = rewards.sort_values(ascending=False, kind="stable").index
    found = []
    for metric, (title, x_title) in _FORESTS.items():
        size = _SIZES.get(metric, 1.0)
        part = table[table["metric"].eq(metric)]
        part = part.set_index("contender").reindex(order).dropna(subset="difference")
        numbers = part[["difference", "low", "high"]].to_numpy(dtype=np.float64) / size
        rows = [
            Row(
                name=name,
                look=looks[name],
                value=value,
                low=low,
                high=high,
                text=f"{value:+.3g} [{low:+.3g}, {high:+.3g}]",
                n=int(n),
            )
            for name, n, (value, low, high) in zip(
                map(str, part.index), part["windows"], numbers, strict=True
            )
        ]
        better = "left" if metric == "wasted_s" else "right"
        found.append(
            forest(
                metric.replace("_", "-"),
                title,
                f"The agent minus each contender, mean over windows that both played; {better} of "
                "0 the agent is better.",
                rows,
                x_title=x_title,
                level=0.0,
                header=("contender", "difference and interval", "windows"),
                is_wide=metric == "reward",
            )
        )
    found[0] = replace(found[0], **_means(table))
    return [figure for figure in found if figure.traces]


def _means(table: pd.DataFrame) -> dict[str, Any]:
    """Return the table of all means, the best reward first."""
    shown = wide(table)
    rows = [[*map(cell_text, row)] for row in shown.itertuples()]
    return {"header": ["contender", *shown.columns], "rows": rows}


def missing(table: pd.DataFrame) -> list[str]:
    """Return which contenders are not compared and why, in sentences.

    Args:
        table: as of `Evaluation`.
    """
    rewards = table[table["metric"].eq("reward") & table["contender"].ne(AGENT)]
    found = [
        f"{name}: it has no window with a value that the agent has, too."
        for name in rewards.loc[rewards["windows"].eq(0), "contender"]
    ]
    for metric, (title, _) in _FORESTS.items():
        part = table[table["metric"].eq(metric) & table["contender"].ne(AGENT)]
        if len(part) and part["windows"].eq(0).all():
            found.append(f"{title}: in no window did a job end.")
    return found
