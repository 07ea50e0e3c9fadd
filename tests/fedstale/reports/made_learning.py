"""What a training and an evaluation of an agent leave, made by hand."""

import json

import numpy as np
import pandas as pd

from fedstale.agents.evaluation import AGENT, METRICS, compared
from fedstale.agents.policy.scorer import Agent, initial, save
from fedstale.agents.training import PROGRESS

CONTENDERS = (AGENT, "p_finish x utility, true forecasts", "random", "Oort", "LinUCB", "FedCS")


def write_training(folder, *, seed=0, values=(-0.5, 0.25, 0.75)):
    """Write an agent and its progress, with a validation after every second update."""
    about = {"training": {"updates": 2 * len(values), "seed": seed}, "validation": max(values)}
    about["best_update"] = 2 * (int(np.argmax(values)) + 1)
    save(Agent(weights=initial(np.random.default_rng(seed)), provenance=about), folder)
    lines = []
    for i, value in enumerate(values):
        lines.append({"update": 2 * i + 1, "reward": float(i)})
        terms = {"gain": value + 0.25, "time": -0.5, "waste": 0.25}
        more = {f"validation_{name}": term for name, term in terms.items()}
        measured = {"validation": value, "validation_error": 0.1, **more}
        lines.append({"update": 2 * i + 2, "reward": -1.0, **measured})
    (folder / PROGRESS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def played(*, alike=False, windows=12):
    """Return the table of an evaluation; contenders earn less, one after the other."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(windows, len(METRICS)))
    parts = []
    for i, name in enumerate(CONTENDERS):
        noise = np.zeros_like(base) if alike else rng.normal(scale=0.1, size=base.shape) - i
        part = pd.DataFrame(base + noise, columns=list(METRICS))
        parts.append(part.assign(contender=name, training_seed=0, window=np.arange(windows)))
    return compared(pd.concat(parts, ignore_index=True))
