"""Reader of AI Benchmark's ranking of phones: how fast each model's processor is.

The column is CPU_F_AI_Score: floating-point networks run on the processor alone. On-device training
computes in floating point, and mobile training libraries run it on the processor. FP32_Score and
AI_Score also count what graphics and neural accelerators reach in inference, which sets flagship
models apart by factors that training does not see. A score is taken as proportional to speed.

Reference:
    Ignatov et al. AI Benchmark: All About Deep Learning on Smartphones in 2019. ICCV Workshops
    2019.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Series, TraceSet
from fedstale.traces.sources.archives import number, read_json

COMPUTE_UNIT = "seconds of the median phone of the ranking, all of its processor"
_SCORE = "CPU_F_AI_Score"


def read(path: str | Path, *, score: str = _SCORE) -> TraceSet:
    """Return the constant speed of each phone model, the median one being 1.

    A model that is listed more than once differs in its chip, its Android or its memory; each is a
    device of its own, named with what tells it apart.

    Args:
        path: the JSON list of models, gzipped or not.
        score: column to take as the speed.

    Returns:
        A set that knows compute only.

    Raises:
        TraceError: the file is missing or damaged, or no model has a score.
    """
    path = Path(path)
    rows = read_json(path)
    if not isinstance(rows, list):
        raise TraceError(f"{path}: expected a JSON list of phone models")
    counts: Counter[str] = Counter()
    phones: list[dict[str, object]] = []
    scores: list[float] = []
    for row in rows:
        value = _number(row.get(score)) if isinstance(row, dict) else None
        if value is None:
            counts[f"dropped: {score} is not a number above 0"] += 1
        elif not _text(row, "Model"):
            counts["dropped: model without a name"] += 1
        else:
            phones.append(row)
            scores.append(value)
    if not phones:
        raise TraceError(f"{path}: no model with a {score}: expected AI Benchmark's list of phones")
    ids = pd.Index(_names(phones, counts), dtype="str", name=None)
    first = ~ids.duplicated()
    counts["dropped: the same phone again"] = int((~first).sum())
    speeds = np.array(scores)[first]
    return TraceSet(
        device_ids=ids[first],
        compute=Series.constant(speeds / np.median(speeds)),
        compute_unit=COMPUTE_UNIT,
        repairs=counts,
    )


def _names(phones: list[dict[str, object]], counts: Counter[str]) -> "pd.Series[str]":
    """Return the model of each phone, with chip, Android and memory where it occurs again."""
    names = pd.Series([_text(phone, "Model") for phone in phones], dtype="str")
    counts["renamed: model that is listed more than once"] = int(names.duplicated(keep=False).sum())
    for extra, prefix in (("CPU", ""), ("Android", "Android "), ("RAM", "")):
        longer = names + [f", {prefix}{_text(phone, extra)}" for phone in phones]
        names = names.mask(names.duplicated(keep=False), longer)
    return names


def _text(row: dict[str, object], key: str) -> str:
    value = row.get(key)
    return " ".join(value.split()) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    try:
        score = float(value) if isinstance(value, str) else number(value)
    except ValueError:
        return None
    return score if math.isfinite(score) and score > 0 else None
