"""A preconditioned gradient solves the dense Kronecker equations, and a site keeps inverses."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from own_optima import record
from torch import nn
from torch.nn.functional import cross_entropy

from fedstale.contrib.kfac import Preconditioner, exchange_inverses, kronecker_factors
from fedstale.contrib.kfac.merge import (
    ABOUT,
    INVERSES,
    LARGEST,
    damped,
    inverses,
    layers_of,
    symmetric,
)
from fedstale.strategies.types import RejectionError

DAMPING, NO_CLIP = 0.01, 1e12
rng = np.random.default_rng(0)
INPUTS = torch.from_numpy(rng.normal(size=(20, 4))).float()
LABELS = torch.from_numpy(rng.integers(0, 3, 20))
SIZES = {"0.A": 5, "0.G": 3, "2.A": 3, "2.G": 3}
"""Of the network's factors; the second layer has no bias."""


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
    cross_entropy(made(INPUTS), LABELS).backward()
    return made


def factors_of(network):
    found = kronecker_factors(network, [INPUTS], seed=1)
    return {name: symmetric(name, found[name], n) for name, n in SIZES.items()}


def inverses_of(factors):
    found = {}
    for layer in layers_of(factors):
        pair = {name: factors[name] for name in (f"{layer}.A", f"{layer}.G")}
        found |= inverses(damped(pair, DAMPING))
    return record(found)


def gradients(network):
    """Return the gradient of each layer, with that of the bias as its last column."""
    first, second = network[0], network[2]
    joined = torch.cat([first.weight.grad, first.bias.grad[:, None]], 1)
    return {"0": joined.double().numpy().copy(), "2": second.weight.grad.double().numpy().copy()}


def dense(factors, grads):
    """Solve for each layer with its Kronecker product formed, pi by the traces."""
    found = {}
    for layer, grad in grads.items():
        a, g = factors[f"{layer}.A"], factors[f"{layer}.G"]
        pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
        a = a + pi * np.sqrt(DAMPING) * np.eye(len(a))
        g = g + np.sqrt(DAMPING) / pi * np.eye(len(g))
        found[layer] = np.linalg.solve(np.kron(g, a), grad.ravel()).reshape(grad.shape)
    return found


def test_a_gradient_becomes_what_the_dense_equations_say(network):
    factors, before = factors_of(network), gradients(network)
    Preconditioner(network, inverses_of(factors), clip=NO_CLIP)(0.1)
    wanted, found = dense(factors, before), gradients(network)
    for layer in before:
        np.testing.assert_allclose(found[layer], wanted[layer], rtol=1e-4, atol=1e-5)
        assert not np.allclose(found[layer], before[layer], rtol=0.5)


def test_the_clip_bounds_what_all_layers_change_together(network):
    factors, before, rate, clip = factors_of(network), gradients(network), 0.1, 1e-6
    Preconditioner(network, inverses_of(factors), clip=clip)(rate)
    wanted = dense(factors, before)
    total = sum((wanted[layer] * before[layer]).sum() for layer in before)
    scale = np.sqrt(clip / (rate**2 * total))
    assert scale < 0.5
    for layer, found in gradients(network).items():
        np.testing.assert_allclose(found, scale * wanted[layer], rtol=1e-4, atol=1e-7)


def test_a_layer_without_inverses_or_gradients_stays_as_it_is(network):
    before, found = gradients(network), inverses_of(factors_of(network))
    some = ArrayRecord({name: x for name, x in found.items() if name.startswith("2.")})
    Preconditioner(network, some, clip=NO_CLIP)(0.1)
    after = gradients(network)
    assert np.array_equal(after["0"], before["0"])
    assert not np.allclose(after["2"], before["2"])
    network[0].bias.grad = None
    weight = network[0].weight.grad.clone()
    Preconditioner(network, found, clip=NO_CLIP)(0.1)
    assert torch.equal(network[0].weight.grad, weight)


def test_gradients_of_zeros_stay_zeros(network):
    found = inverses_of(factors_of(network))
    network.zero_grad(set_to_none=False)
    Preconditioner(network, found)(0.1)
    assert all((grad == 0).all() for grad in gradients(network).values())


@pytest.mark.parametrize(
    "changed",
    [
        {"0.A": np.ones(14, np.float32)},
        {"0.A": np.full(15, np.nan, np.float32)},
        {"0.G": np.full(6, 2 * LARGEST)},
        {"0.G": np.ones(6, int)},
        {"1.A": np.ones(1), "1.G": np.ones(1)},
        {"9.A": np.ones(1), "9.G": np.ones(1)},
    ],
    ids=["shape", "NaN", "too large", "integers", "no linear layer", "no layer"],
)
def test_inverses_that_do_not_fit_the_network_are_refused(network, changed):
    found = dict(inverses_of(factors_of(network)))
    with pytest.raises(RejectionError, match=r"kfac|inverses of"):
        Preconditioner(network, ArrayRecord(found | {k: Array(x) for k, x in changed.items()}))


def test_factors_of_zeros_are_damped_alike_and_indefinite_ones_have_no_inverse():
    zeros = damped({"A": np.zeros((2, 2)), "G": np.zeros((1, 1))}, 0.25)
    assert np.array_equal(zeros["A"], 0.5 * np.eye(2))
    assert np.array_equal(zeros["G"], [[0.5]])
    assert inverses({"A": np.eye(2), "G": -np.eye(1)}) == {}
    assert inverses({"A": np.eye(2), "G": np.eye(1) / (2 * LARGEST)}) == {}
    assert inverses({"A": np.eye(2) / 2})["A"].tolist() == [2.0, 0.0, 2.0]


def message(measure, **arrays):
    content = {INVERSES: record(arrays), ABOUT: ConfigRecord({"measure": measure})}
    return Message(RecordDict(content), 1, "train")


@pytest.mark.usefixtures("_identity")
def test_a_site_keeps_inverses_and_takes_newer_ones():
    context = Context(0, 1, {}, RecordDict(), {})
    factors = record({"0.A": np.ones(1), "0.G": np.ones(1)})
    held, reply = exchange_inverses(message(True), context, lambda: factors)
    assert (dict(held), reply) == ({}, {"kfac": factors})
    pair = {"0.A": np.ones(1), "0.G": np.ones(1)}
    held, reply = exchange_inverses(message(False, **pair), context, pytest.fail)
    assert (set(held), reply) == (set(pair), {})
    newer = {"1.A": np.ones(1), "1.G": np.ones(1), "0.A": np.zeros(1), "0.G": np.ones(1)}
    held, _ = exchange_inverses(message(False, **newer), context, pytest.fail)
    assert set(held) == set(newer)
    assert held["0.A"].numpy() == 0.0
    assert exchange_inverses(message(False), context, pytest.fail)[0] == held


@pytest.mark.usefixtures("_identity")
def test_a_server_without_the_stage_is_answered_as_ever():
    context = Context(0, 1, {}, RecordDict(), {})
    plain = Message(RecordDict({"arrays": record({"w": np.ones(1)})}), 1, "train")
    held, reply = exchange_inverses(plain, context, pytest.fail)
    assert (dict(held), reply, dict(context.state)) == ({}, {}, {})
