"""Flower's older API: what of it is taken over, and what an app of it is known by."""

import numpy as np
from flwr.app import Context, RecordDict
from flwr.common import FitIns, Parameters, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerAppComponents, server
from flwr.serverapp import ServerApp

from fedstale.flower import legacy


def test_an_app_is_older_unless_it_has_a_main_function_and_empty_if_it_has_nothing():
    empty, older, newer = (
        ServerApp(),
        ServerApp(server_fn=lambda _: ServerAppComponents()),
        ServerApp(),
    )
    newer.main()(lambda grid, context: None)
    assert [legacy.is_empty(app) for app in (empty, older, newer)] == [True, False, False]
    assert [legacy.is_older(app) for app in (empty, older, newer)] == [True, True, False]


def test_what_asks_the_clients_of_a_round_is_told_how_requests_travel():
    asked = []
    stand_ins = dict(legacy.stand_ins(run=print, update=print, ask=lambda *a: asked.append(a)))
    stand_ins[server.fit_clients]("clients", 3)
    stand_ins[server.evaluate_clients]("others", 4)
    (fit, *one), (evaluate, *two) = asked
    assert (fit.kind, one, evaluate.kind, two) == (
        "train",
        ["clients", 3],
        "evaluate",
        ["others", 4],
    )
    ins = FitIns(ndarrays_to_parameters([np.ones(2)]), {"round": 1})
    (arrays,) = fit.pack(ins).array_records.values()
    assert arrays.to_numpy_ndarrays()[0].tolist() == [1.0, 1.0]
    # The same request goes to the next client.
    assert len(ins.parameters.tensors) == 1


def test_a_model_has_arrays_only_if_they_are_numpys():
    arrays = legacy.arrays_of(ndarrays_to_parameters([np.ones(2)]))
    assert arrays.to_numpy_ndarrays()[0].tolist() == [1.0, 1.0]
    assert legacy.arrays_of(Parameters([b"{}"], "json")) is None
    assert legacy.arrays_of(None) is None


def test_contexts_of_workflows_are_heard_of_while_the_block_runs():
    heard, before = [], LegacyContext.__init__
    context = Context(1, 1, {}, RecordDict(), {})
    with legacy.contexts_heard(heard.append):
        made = LegacyContext(context)
    LegacyContext(context)
    assert heard == [made]
    assert LegacyContext.__init__ is before


def test_without_workflows_nothing_is_heard_and_nothing_breaks(without):
    without("flwr.server.compat:LegacyContext")
    with legacy.contexts_heard(print):
        assert LegacyContext(Context(1, 1, {}, RecordDict(), {})).strategy is not None
