"""The factors that a client sends are means over its examples, one by one in the oracle."""

import numpy as np
import pytest
import torch
from torch import nn

from fedstale.contrib.kfac import kronecker_factors
from fedstale.contrib.kfac.merge import unpacked


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()


INPUTS = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 5)))


def loss(outputs):
    """Return the mean of a loss that needs no labels."""
    return (outputs**3).sum(1).mean()


def one_by_one(network, inputs):
    """Return the means of A and G over examples, each of which is passed by itself."""
    found = {name: 0.0 for name in ("0.A", "0.G", "2.A", "2.G")}
    for x in inputs:
        hidden = network[0](x[None])
        hidden.retain_grad()
        active = torch.relu(hidden)
        out = network[2](active)
        out.retain_grad()
        loss(out).backward()
        a = torch.cat([x[None], torch.ones(1, 1)], 1)
        for name, row in (
            *(("0.A", a), ("0.G", hidden.grad)),
            *(("2.A", active.detach()), ("2.G", out.grad)),
        ):
            found[name] = found[name] + (row.T @ row).numpy() / len(inputs)
    return found


def read(record):
    sizes = {"0.A": 6, "0.G": 4, "2.A": 4, "2.G": 3}
    assert set(record) == set(sizes)
    return {name: unpacked(name, record[name], n) for name, n in sizes.items()}


def test_factors_are_means_over_examples_and_leave_the_network_alone(network):
    before = {name: x.clone() for name, x in network.state_dict().items()}
    found = read(kronecker_factors(network, [INPUTS], loss=loss))
    assert all(weight.grad is None for weight in network.parameters())
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network)
    for name, wanted in one_by_one(network, INPUTS).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


def test_means_are_plain_over_the_first_batches_and_exponential_after_them(network):
    batches = INPUTS.split(3)
    parts = [one_by_one(network, batch) for batch in batches]
    for decay, shares in ((0.95, [1 / 4] * 4), (0.5, [1 / 8, 1 / 8, 1 / 4, 1 / 2])):
        found = read(kronecker_factors(network, batches, loss=loss, decay=decay))
        for name, x in found.items():
            wanted = sum(share * part[name] for share, part in zip(shares, parts, strict=True))
            np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)


def test_labels_are_drawn_as_the_model_would(network):
    layer = nn.Sequential(nn.Linear(2, 3))
    with torch.no_grad():
        layer[0].weight.zero_()
        layer[0].bias.copy_(torch.tensor([0.2, 0.3, 0.5]).log())
    inputs = [torch.ones(20_000, 2)]
    found = kronecker_factors(layer, inputs, seed=1)
    p = np.array([0.2, 0.3, 0.5])
    fisher = np.diag(p) - np.outer(p, p)
    np.testing.assert_allclose(unpacked("0.G", found["0.G"], 3), fisher, atol=0.01)
    again, another = (kronecker_factors(layer, inputs, seed=seed) for seed in (1, 2))
    assert np.array_equal(found["0.G"].numpy(), again["0.G"].numpy())
    assert not np.array_equal(found["0.G"].numpy(), another["0.G"].numpy())


def test_a_layer_behind_that_writes_in_place_changes_nothing(network):
    plain = read(kronecker_factors(network, [INPUTS], loss=loss))
    network[1] = nn.ReLU(inplace=True)
    for name, x in read(kronecker_factors(network, [INPUTS], loss=loss)).items():
        assert np.array_equal(x, plain[name])


def test_rows_of_a_sequence_count_as_examples(network):
    long = kronecker_factors(network, [INPUTS], loss=loss)
    folded = kronecker_factors(
        network, [INPUTS.reshape(4, 3, 5)], loss=lambda out: loss(out.flatten(0, 1))
    )
    for name, x in read(folded).items():
        np.testing.assert_allclose(x, read(long)[name], rtol=1e-6, atol=1e-9)


def test_factors_take_the_bytes_of_their_triangles():
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    found = kronecker_factors(network, [torch.ones(2, 64)])
    # 65 inputs with the bias's, 32 outputs; 33 and 10.
    numbers = 65 * 66 // 2 + 32 * 33 // 2 + 33 * 34 // 2 + 10 * 11 // 2
    assert numbers == 3289
    assert sum(array.numpy().nbytes for array in found.values()) == 4 * numbers


def test_a_frozen_layer_that_nothing_learns_before_has_no_factors(network):
    network[0].requires_grad_(False)
    assert set(kronecker_factors(network, [INPUTS], loss=loss)) == {"2.A", "2.G"}
