"""An optimizer's moments stay in the context of a node."""

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto

from fedstale.contrib.sites import keeping_moments
from fedstale.errors import ConfigError

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "Adam, AMSGrad": lambda weights: torch.optim.Adam(weights, lr=0.1, amsgrad=True),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "plain": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1),
}


def new_context():
    return Context(1, 1, {}, RecordDict(), {})


def weights_of(n=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(3, i + 1, generator=generator)) for i in range(n)]


def step(optimizer, weights, target):
    optimizer.zero_grad()
    sum(((w - target) ** 2).sum() for w in weights).backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_jobs_are_one_run_of_the_optimizer(name):
    context, weights, whole = new_context(), weights_of(), weights_of()
    uninterrupted = OPTIMIZERS[name](whole)
    for job in range(3):
        # A process of its own for each job has the context as Flower stores it.
        context = context_from_proto(context_to_proto(context))
        optimizer = OPTIMIZERS[name](weights)
        with keeping_moments(optimizer, context):
            for i in range(4):
                step(optimizer, weights, job + i)
                step(uninterrupted, whole, job + i)
    assert all(torch.equal(one, other) for one, other in zip(weights, whole, strict=True))


def test_a_job_says_its_own_learning_rate():
    context, weights = new_context(), weights_of()
    for rate in (0.1, 0.5):
        optimizer = torch.optim.AdamW(weights, lr=rate)
        with keeping_moments(optimizer, context):
            assert optimizer.param_groups[0]["lr"] == rate
            step(optimizer, weights, 0.0)


def test_moments_stay_as_they_were_before_a_job_that_fails():
    context, weights = new_context(), weights_of()
    optimizer = torch.optim.AdamW(weights)
    with keeping_moments(optimizer, context):
        step(optimizer, weights, 0.0)

    def fail():
        optimizer = torch.optim.AdamW(weights)
        with keeping_moments(optimizer, context):
            step(optimizer, weights, 0.0)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert context.state["moments"]["0.step"].numpy() == 1


def test_moments_of_other_weights_are_refused_by_name():
    context, weights = new_context(), weights_of()
    optimizer = torch.optim.AdamW(weights)
    with keeping_moments(optimizer, context):
        step(optimizer, weights, 0.0)
    for others in (weights_of(1), weights[::-1]):
        with (
            pytest.raises(ConfigError, match=r"context.state\['moments'\] holds '\d\."),
            keeping_moments(torch.optim.AdamW(others), context),
        ):
            pass
    with keeping_moments(torch.optim.AdamW(weights[::-1]), context, "others"):
        pass
