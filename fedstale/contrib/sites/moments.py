"""An optimizer's moments, which stay on the device from one job to the next.

An optimizer that starts anew in each job takes its first steps without them. They are in Flower's
`Context.state`, which is never sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Context

from fedstale.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@contextmanager
def keeping_moments(
    optimizer: "Optimizer", context: Context, name: str = "moments"
) -> Iterator[None]:
    """Go on with the moments of the device's job before, and keep those after the block.

    What the optimizer is set to, such as its learning rate, stays as this job says. If the block
    ends by an exception, the moments stay as they were before it.

    Args:
        optimizer: of torch, new, over the same weights in the same order as before.
        context: of the message, as the ClientApp gets it.
        name: of the record in the context's state; one for each optimizer.

    Raises:
        ConfigError: the moments are of other weights.

    Example:
        A loop of local steps:

            optimizer = torch.optim.AdamW(network.parameters(), lr=0.001)
            with keeping_moments(optimizer, context):
                for batch in islice(batches, steps):
                    ...
    """
    kept = context.state.array_records.get(name)
    if kept is not None:
        _restore(optimizer, kept.to_torch_state_dict(), name)
    yield
    state = optimizer.state_dict()["state"]
    context.state[name] = ArrayRecord(
        {f"{i}.{key}": x for i, of in state.items() for key, x in of.items() if x is not None}
    )


def _restore(optimizer: "Optimizer", kept: dict[str, "Tensor"], name: str) -> None:
    state = optimizer.state_dict()
    shapes = [weight.shape for group in optimizer.param_groups for weight in group["params"]]
    for path, x in kept.items():
        i, key = path.split(".")
        # A number, such as how many steps there were, is of no weight's shape.
        if int(i) >= len(shapes) or x.shape not in (shapes[int(i)], ()):
            raise ConfigError(
                f"context.state[{name!r}] holds {path!r} of shape {tuple(x.shape)}: expected "
                f"moments of this optimizer's {len(shapes)} weights; keep those of other weights "
                "under another name"
            )
        state["state"].setdefault(int(i), {})[key] = x
    optimizer.load_state_dict(state)
