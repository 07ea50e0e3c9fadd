"""A traced step is the step: same gradients, same losses, to the last bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import Conv2d, Flatten, Linear, Module, ReLU, Sequential, Tanh
from torch.nn.functional import cross_entropy

from fedstale.simulation.executors import many_sgd
from fedstale.simulation.executors.many_sgd import MeanLoss, TracedStep

CLIENTS, EXAMPLES = 5, 4
DENSE = Sequential(Linear(6, 7), ReLU(), Linear(7, 3))
CONVOLUTIONS = Sequential(
    Conv2d(1, 2, 3, padding=1), Tanh(), Conv2d(2, 2, 3), Flatten(), Linear(8, 3)
)
WEIGHTS_OF_CLASSES = torch.tensor([1.0, 2.0, 0.5])


def mean_loss_of(network: Module, losses: Callable[[Tensor, Tensor], Tensor]) -> MeanLoss:
    def mean_loss(params: dict[str, Tensor], batch: tuple[Tensor, ...], weights: Tensor) -> Tensor:
        x, y = batch
        return (losses(functional_call(network, params, (x,)), y) * weights).sum()

    return mean_loss


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    doubled = (logits * 1).mul_(2.0)
    return cross_entropy(doubled + logits, labels, reduction="none")


def with_constant(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, weight=WEIGHTS_OF_CLASSES, reduction="none")


def inputs(network: Module, n: int, shape: tuple[int, ...], seed: int) -> tuple:
    rng = torch.Generator().manual_seed(seed)
    params = {
        name: torch.randn(n, *p.shape, generator=rng) for name, p in network.named_parameters()
    }
    batch = (
        torch.randn(n, EXAMPLES, *shape, generator=rng),
        torch.randint(3, (n, EXAMPLES), generator=rng),
    )
    return params, batch, torch.rand(n, EXAMPLES, generator=rng)


@pytest.mark.parametrize(
    ("network", "shape", "losses"),
    [
        (DENSE, (6,), plain),
        (DENSE, (6,), in_place),
        (DENSE, (6,), with_constant),
        (CONVOLUTIONS, (1, 4, 4), plain),
    ],
    ids=["dense", "in place", "constant", "convolutions"],
)
def test_a_many_sgd_gives_the_same_bits(
    network: Sequential,
    shape: tuple[int, ...],
    losses: Callable[[Tensor, Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many_sgd, "TRACED_AT", 1)
    mean_loss = mean_loss_of(network, losses)
    step = TracedStep(mean_loss)
    step(*inputs(network, CLIENTS, shape, seed=0))
    assert len(step.traced) == 1
    for seed in (1, 2):
        given = inputs(network, CLIENTS, shape, seed)
        before = {name: p.clone() for name, p in given[0].items()}
        grads, loss = step(*given)
        expected_grads, expected_loss = vmap(grad_and_value(mean_loss))(*given)
        assert torch.equal(loss, expected_loss)
        for name, param in before.items():
            assert torch.equal(grads[name], expected_grads[name])
            assert torch.equal(given[0][name], param)


def test_only_shapes_that_come_often_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_sgd, "TRACED_AT", 3)
    step = TracedStep(mean_loss_of(DENSE, plain))
    for n in (2, 3, 2, 4, 2):
        step(*inputs(DENSE, n, (6,), seed=0))
    assert [shapes[0][0][0] for shapes in step.traced] == [2]


def test_what_cannot_be_traced_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_sgd, "TRACED_AT", 1)

    def refuse(step: object) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr("torch.fx.experimental.proxy_tensor.make_fx", refuse)
    mean_loss = mean_loss_of(DENSE, plain)
    step, given = TracedStep(mean_loss), inputs(DENSE, CLIENTS, (6,), seed=0)
    step(*given)
    _, loss = step(*given)
    assert torch.equal(loss, vmap(grad_and_value(mean_loss))(*given)[1])
