"""Apps with the habits of real ones, and the edit by which their author takes another strategy."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An app of tests/fixtures/apps, and what is special about it."""

    says: str
    app: str
    constants: Mapping[str, object] = field(default_factory=dict)
    """Of its file, set to other values."""
    needs: str = ""
    """Package that constraints.txt does not have."""

    @property
    def key(self) -> str:
        """What tells rows of one app apart."""
        return " ".join([self.app, *(str(value) for value in self.constants.values())])


SHAPES = [
    Shape(says="message API, FedAvg", app="message_api"),
    Shape(says="`client_fn` and `server_fn`", app="older_api"),
    Shape(says="strategy with a `start` of its own", app="own_start"),
    Shape(says="several starts of strategies", app="two_starts"),
    Shape(says="mods, around all handlers and one", app="mods"),
    Shape(says="Context state over rounds", app="state"),
    Shape(says="error replies", app="error_replies"),
    Shape(says="Keras, `model.fit`", app="keras_fit", needs="keras"),
    Shape(says="JAX, jitted gradients", app="jax_grad", needs="jax"),
    Shape(says="Weights & Biases, offline", app="wandb_offline", needs="wandb"),
    Shape(says="DataLoader with workers, torch", app="loader_workers"),
    Shape(says="package beside a sibling package", app="sibling_package"),
    Shape(says="numpy generator without a seed", app="unseeded"),
    Shape(says="loop with named actions", app="own_loop"),
    Shape(says="ServerApp with asyncio", app="server_asyncio"),
    Shape(says="analytics without a strategy", app="analytics"),
    Shape(says="training pushed without asking for replies", app="pushed"),
    Shape(says="SecAgg+ workflow", app="secure_aggregation"),
    Shape(says="DP: fixed clipping by the server, no noise", app="privacy"),
    Shape(
        says="DP: adaptive clipping by a mod, no noise",
        app="privacy",
        constants={"KIND": "client-adaptive"},
    ),
    Shape(says="DP: local noise by a mod", app="privacy", constants={"KIND": "local"}),
]


def with_fedstale(source: str) -> tuple[str, str]:
    """Return an app with a strategy of fedstale in the place of Flower's FedAvg, and its name.

    A FedAvg that is made becomes a FedBuff, one that is inherited from becomes fedstale's FedAvg.
    The name is empty where there is none.
    """
    tree = ast.parse(source)
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "FedAvg"
    ]
    bases = [
        ast.unparse(base)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    if not made and "FedAvg" not in bases:
        return source, ""
    lines = source.splitlines(keepends=True)
    for call in sorted(made, key=lambda node: -node.lineno):
        assert call.end_lineno is not None
        before = lines[call.lineno - 1][: call.col_offset]
        after = lines[call.end_lineno - 1][call.end_col_offset :]
        text = f"{before}FedBuff(concurrency=10, buffer_size=5, seed=1){after}"
        lines[call.lineno - 1 : call.end_lineno] = [text]
    name = "FedBuff" if made else "FedAvg"
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines.insert(imports[-1].end_lineno or 0, f"from fedstale.strategies import {name}\n")
    return "".join(lines), name
