"""The steps of the built-in apps' clients are those of torch.optim.SGD, to the bit."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedstale.apps.client import train

N, BATCH, EPOCHS, RATE = 20, 8, 3, 0.1


def network():
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 3))
    # What is frozen has no gradient.
    made[0].bias.requires_grad_(False)
    return made


def loss(network, x, y):
    return cross_entropy(network(x), y)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_training_takes_the_steps_of_torchs_sgd(mu, max_norm):
    ours, theirs = network(), network()
    start = [w.detach().clone() for w in theirs.parameters()]
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    order = np.array([np.random.default_rng(e).permutation(N) for e in range(EPOCHS)])
    sgd, losses = torch.optim.SGD(theirs.parameters(), lr=RATE), []
    for rows in torch.from_numpy(order):
        for batch in rows.split(BATCH):
            sgd.zero_grad()
            value = loss(theirs, x[batch], y[batch])
            losses.append((value.item(), len(batch)))
            value.backward()
            for w, w0 in zip(theirs.parameters(), start, strict=True):
                if mu and w.grad is not None:
                    w.grad.add_(w.detach() - w0, alpha=mu)
            if max_norm:
                nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            sgd.step()
    settings = {"batch_size": BATCH, "learning_rate": RATE, "max_norm": max_norm, "proximal_mu": mu}
    mean = train(ours, loss, (x, y), order, **settings)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    last, counts = zip(*losses[-3:], strict=True)
    assert mean == pytest.approx(np.average(last, weights=counts))
