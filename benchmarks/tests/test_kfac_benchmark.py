"""The benchmark of Kronecker factors measures what it says, and the page says what came out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lab.results import read_result


@pytest.fixture(scope="module")
def bench():
    from papers import kfac

    return kfac


def test_fisher_information_is_the_mean_square_of_gradients_at_labels_that_are_drawn(bench):
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(3, 4)), torch.rand(5, 3)
    random = torch.Generator().manual_seed(7)
    labels = torch.multinomial(network(inputs).detach().softmax(1), 1, generator=random)[:, 0]
    wanted = 0.0
    for x, label in zip(inputs, labels, strict=True):
        loss = cross_entropy(network(x[None]), label[None])
        wanted = wanted + torch.autograd.grad(loss, network[0].weight)[0].square() / len(inputs)
    found = bench.fisher(network, inputs, 7)["0.weight"].numpy()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)


def test_a_run_merges_by_what_a_method_sends(bench):
    runs = {method: bench.run("digits", method, 1e-2, 7) for method in bench.METHODS}
    mean, fisher, kfac = (runs[method] for method in bench.METHODS)
    # 2,410 weights; factors of 65 and 33 inputs with the bias's, and of 32 and 10 outputs.
    assert mean.reply_bytes == 4 * 2410
    assert fisher.reply_bytes == 2 * 4 * 2410
    assert kfac.reply_bytes == 4 * (2410 + 3289)
    # All begin with the same model, and then part.
    assert len({run.accuracy[0] for run in runs.values()}) == 1
    assert len({run.accuracy[5] for run in runs.values()}) == 3
    assert kfac.residual > 0 == mean.residual


def row(name, merges, method):
    (found,) = (
        row
        for row in read_result(f"kfac_{name}")["rows"]
        if row["merges"] == merges and row["method"].startswith(method)
    )
    return found


def against(name, merges, method, other):
    """Return the interval of a method's accuracy less another's."""
    return row(name, merges, method)[f"to_{other}"][1:]


def test_what_the_page_says_of_when_it_pays_is_what_came_out():
    for name, merges in (("digits", 1), ("digits", 5), ("long", 1), ("clothes", 1)):
        assert against(name, merges, "Kronecker", "mean")[0] > 0.03
    assert against("long", 1, "Kronecker", "fisher")[0] > 0.05
    for name, merges in (
        *(("digits", 1), ("digits", 5), ("long", 5)),
        *(("clothes", 1), ("clothes", 5), ("clothes_long", 1), ("clothes_long", 5)),
    ):
        low, high = against(name, merges, "Kronecker", "fisher")
        assert low < 0 < high
    for name, merges in (("long", 5), ("clothes", 5), ("clothes_long", 1)):
        for method in ("Kronecker", "Fisher"):
            low, high = against(name, merges, method, "mean")
            assert low < 0 < high
    for method in ("Kronecker", "Fisher"):
        assert against("clothes_long", 5, method, "mean")[1] < 0
    mean, factors = row("clothes", 5, "mean"), row("clothes", 1, "Kronecker")
    assert mean["accuracy"] > factors["accuracy"] + 0.1
    assert 13.0 < factors["reply_bytes"] / mean["reply_bytes"] < 13.5


def test_dampings_are_ends_of_what_was_tried_in_the_cases_that_are_named(bench):
    ends = {
        (name, merges)
        for name in bench.TASKS
        for merges in bench.MERGES
        if row(name, merges, "Kronecker")["damping"] in (bench.DAMPINGS[0], bench.DAMPINGS[-1])
    }
    assert ends == {("long", 5), ("clothes", 5), ("clothes_long", 5)}
    assert row("long", 5, "Kronecker")["residual"] < 0.004
