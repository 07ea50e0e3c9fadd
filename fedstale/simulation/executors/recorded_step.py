"""The gradients of many clients in one step, from operations that are recorded once for each shape.

`torch.func.vmap` goes through every operation of a small model at a cost of some twenty
microseconds of Python, most of what a small client takes. The operations depend on nothing but the
shapes, so those of a shape that comes again and again are written down (`make_fx`), freed of views
that change nothing, and from then on run as they stand, to the same bits.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import grad_and_value, vmap

logger = logging.getLogger(__name__)

Params = dict[str, Tensor]
MeanLoss = Callable[[Params, tuple[Tensor, ...], Tensor], Tensor]
Step = Callable[[Params, tuple[Tensor, ...], Tensor], tuple[Params, Tensor]]

RECORDED_AT = 100
"""Use of a shape at which it is recorded. To record takes as long as some hundred steps, so no run
takes much more than twice the time of one that had known from the first step what is worth it."""


class RecordedStep:
    """Gradients and losses of a step for every client."""

    def __init__(self, mean_loss: MeanLoss) -> None:
        """Prepare.

        Args:
            mean_loss: of one client's params, batch and weights; a function of these alone.
        """
        self._each: Step = vmap(grad_and_value(mean_loss), in_dims=(0, 0, 0))
        self._uses: Counter[Any] = Counter()
        self.recorded: dict[Any, Step] = {}

    def __call__(
        self, params: Params, batch: tuple[Tensor, ...], weights: Tensor
    ) -> tuple[Params, Tensor]:
        """Return the gradients, shaped as the params, and the losses, shape (clients,).

        Args:
            params: each with a first axis of clients; they require no gradient.
            batch: each of shape (clients, examples, ...).
            weights: of the examples in the mean, shape (clients, examples).
        """
        shapes = tuple((x.shape, x.dtype) for x in (*params.values(), *batch, weights))
        step = self.recorded.get(shapes)
        if step is not None:
            return step(params, batch, weights)
        self._uses[shapes] += 1
        if self._uses[shapes] == RECORDED_AT:
            self.recorded[shapes] = self._record(params, batch, weights)
        return self._each(params, batch, weights)

    def _record(self, params: Params, batch: tuple[Tensor, ...], weights: Tensor) -> Step:
        # Importing this takes a second, which short runs need not pay.
        from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

        def step(params: Params, batch: tuple[Tensor, ...], weights: Tensor) -> Any:  # noqa: ANN401
            return self._each(params, batch, weights)

        try:
            recorded = make_fx(step)(params, batch, weights)
            _shorten(recorded)
        except Exception as problem:
            logger.debug("a step of this shape stays as it is: %s", problem)
            return self._each
        return torch.no_grad()(recorded.forward)


def _shorten(module: fx.GraphModule) -> None:
    """Take out operations that change nothing: views of the same shape, there and back, times one.

    Where anything is changed in place, a copy is not the same as its original: nothing is taken
    out then.
    """
    graph = module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(node.is_impure() for node in calls):
        return
    for node in calls:
        twin = _twin(node)
        if twin is not None:
            node.replace_all_uses_with(twin)
    graph.eliminate_dead_code()
    module.recompile()


def _twin(node: fx.Node) -> fx.Node | None:
    """Return an earlier node of the same values, shape and type, or None."""
    aten, source = torch.ops.aten, node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in (aten.expand.default, aten.view.default, aten._unsafe_view.default):
        return source if node.meta["val"].shape == source.meta["val"].shape else None
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return source if node.meta["val"].dtype == source.meta["val"].dtype else None
    if node.target is source.target is aten.transpose.int:
        origin = source.args[0]
        is_back = set(source.args[1:]) == set(node.args[1:])
        return origin if is_back and isinstance(origin, fx.Node) else None
    return None
