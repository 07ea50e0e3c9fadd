"""What a notebook shows of a public class that holds arrays or tables is a line."""

import dataclasses
import importlib
import inspect
import pkgutil

import numpy as np
import pandas as pd
import pytest
from shared_fleets import named

import fedstale
from fedstale.agents.policy import Agent, embedded, load
from fedstale.comparison import Comparison, Variant
from fedstale.contrib.tuning import Tuning
from fedstale.traces import TraceSet

MADE = {TraceSet: lambda: named("synthetic:100"), Agent: lambda: load(embedded())}
LARGE = [
    np.zeros((50, 40)),
    pd.DataFrame({"loss": np.zeros(200)}),
    {f"weights {i}": np.zeros(9) for i in range(50)},
    ("runs/FedBuff/1",) * 60,
]


def holding_arrays():
    """Yield the public classes of all doors with a field of arrays or tables."""
    for found in pkgutil.walk_packages(fedstale.__path__, "fedstale."):
        if found.ispkg and not found.name.startswith(("fedstale.apps.", "fedstale.cluster")):
            door = importlib.import_module(found.name)
            for name in set(getattr(door, "__all__", ())) - {"ClusterPool"}:
                one = getattr(door, name)
                if inspect.isclass(one) and dataclasses.is_dataclass(one):
                    types = [str(f.type) for f in dataclasses.fields(one) if f.repr]
                    held = " ".join(each for each in types if "Callable" not in each)
                    if "ndarray" in held or "DataFrame" in held:
                        yield one


def filled(kind):
    """Return an object whose every field is large, whatever it would be."""
    made = object.__new__(kind)
    for i, field in enumerate(dataclasses.fields(kind)):
        object.__setattr__(made, field.name, LARGE[i % len(LARGE)])
    return made


# A comparison says what it shows: tests/fedstale/comparison.
CLASSES = sorted(
    {*holding_arrays(), *MADE, Variant, Tuning} - {Comparison}, key=lambda c: c.__name__
)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_that_holds_arrays_shows_itself_in_a_line(kind):
    text = repr(MADE[kind]() if kind in MADE else filled(kind))
    assert text.startswith(f"{kind.__name__}(")
    assert len(text) <= 300
    assert "\n" not in text


def test_classes_of_all_four_packages_are_looked_at():
    rooms = {".".join(kind.__module__.split(".")[:2]) for kind in CLASSES}
    assert {"fedstale.traces", "fedstale.strategies", "fedstale.agents"} <= rooms
    assert len(CLASSES) > 20


def test_a_notebook_shows_what_traces_know():
    traces = named("synthetic:100")
    for shown in (repr(traces), traces._repr_html_()):
        for fact in ("100", *traces.known, "604800", traces.epoch):
            assert fact in shown
    assert "604800" not in repr(traces.between(0.0, 3600.0))
