"""SGD on a network of two linear layers, to the same bytes as `fedstale.apps.client.train`.

Autograd finds out in every step what the network is, which takes three times as long as the
arithmetic of a network this small. Here the operations that it would call are called in its order.
What only some jobs have (a share of the steps, FedProx, clipped gradients) stays with autograd.
"""

import torch
from torch import nn

from fedstale.apps import classification
from fedstale.apps.client import Index

_aten = torch.ops.aten
# Overloads that are named need not be looked for: there are four in each step.
_nll, _nll_backward = _aten.nll_loss_forward.default, _aten.nll_loss_backward.default
_log_softmax_backward = _aten._log_softmax_backward_data.default
_relu_backward = _aten.threshold_backward.default
_MEAN, _IGNORED = 1, -100
"""The reduction and the label without a loss of `cross_entropy`, as operators take them."""


@torch.inference_mode()
def train(
    network: nn.Sequential,
    data: classification.Data,
    order: Index,
    *,
    batch_size: int,
    learning_rate: float,
) -> float:
    """Train in place by the mean cross-entropy; return the mean loss of the last epoch.

    Args:
        network: linear, ReLU, linear; changed in place.
        data: images, float32 of shape (n, inputs), and labels, int64 of shape (n,); n >= 1.
        order: of the examples, one row an epoch; shape (epochs, n).
        batch_size: examples of one step, >= 1.
        learning_rate: of plain SGD.

    Raises:
        ValueError: the network is another one, or the batch size is below 1.
    """
    layers = list(network)
    if [type(each) for each in layers] != [nn.Linear, nn.ReLU, nn.Linear]:
        raise ValueError(f"network = {network}: expected linear, ReLU, linear")
    if batch_size < 1:
        raise ValueError(f"batch-size = {batch_size}: expected a number >= 1")
    w1, b1, w2, b2 = (weights.detach() for weights in network.parameters())
    w1_t, w2_t, one = w1.t(), w2.t(), torch.ones(())
    examples, labels = data
    total = 0.0
    for epoch, row in enumerate(torch.from_numpy(order)):
        batches = zip(examples[row].split(batch_size), labels[row].split(batch_size), strict=True)
        for x, y in batches:
            hidden = torch.relu(torch.addmm(b1, x, w1_t))
            log_p = torch.log_softmax(torch.addmm(b2, hidden, w2_t), 1)
            mean, weight = _nll(log_p, y, None, _MEAN, _IGNORED)
            up = _nll_backward(one, log_p, y, None, _MEAN, _IGNORED, weight)
            up = _log_softmax_backward(up, log_p, 1, torch.float32)
            down = _relu_backward(up.mm(w2), hidden, 0)
            w2.add_(up.t().mm(hidden), alpha=-learning_rate)
            b2.add_(up.sum(0), alpha=-learning_rate)
            w1.add_(down.t().mm(x), alpha=-learning_rate)
            b1.add_(down.sum(0), alpha=-learning_rate)
            if epoch == len(order) - 1:
                total += mean.item() * len(y)
    return total / len(labels) if len(order) else 0.0
