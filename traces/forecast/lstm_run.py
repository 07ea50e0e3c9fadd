"""The state of a training of the LSTM: weights, moments, the best so far; on disk after each epoch.

AdamW is written out here, because its moments must be stored without pickle, which torch's own
optimizers use for their state.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from fedstale.errors import ResumeError
from fedstale.traces.forecast.lstm import HIDDEN, SHAPES, STAYS
from fedstale.traces.io.atomic import replacing

DECAY = 0.05
"""Decoupled weight decay."""

Weights = dict[str, Tensor]


@dataclass(kw_only=True)
class TrainingRun:
    """The whole state of a training: weights, Adam's moments, and the best so far."""

    seed: int
    n: int
    weights: Weights
    first: Weights
    second: Weights
    best: Weights
    epoch: int = 0
    steps: int = 0
    best_loss: float = np.inf
    best_epoch: int = 0

    @classmethod
    def start(cls, seed: int, n: int) -> "TrainingRun":
        """Return the state before the first epoch, for n examples."""
        rng = torch.Generator().manual_seed(seed)
        weights = {}
        for name, (rows, columns) in SHAPES.items():
            w = torch.randn(rows, columns, generator=rng) / np.sqrt(rows)
            w[-1] = 0.0
            weights[name] = w
        # A forget gate that starts open remembers; a wide first guess is not far off anywhere.
        weights["gates"][-1, HIDDEN : 2 * HIDDEN] = 1.0
        weights["output"] *= 0.1
        # Of staying, training starts at the chain.
        weights["output"][:, :STAYS] = 0.0
        zeros = {k: torch.zeros_like(w) for k, w in weights.items()}
        return cls(
            seed=seed,
            n=n,
            weights={k: w.requires_grad_() for k, w in weights.items()},
            first=zeros,
            second={k: z.clone() for k, z in zeros.items()},
            best={k: w.detach().clone() for k, w in weights.items()},
        )

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], rate: float) -> None:
        """Make one step of AdamW (Loshchilov, Hutter. ICLR 2019), with gradients of norm <= 1."""
        self.steps += 1
        norm = torch.sqrt(sum((g * g).sum() for g in gradients))  # type: ignore[arg-type]
        scale = min(1.0, 1.0 / (float(norm) + 1e-12))
        for (name, w), g in zip(self.weights.items(), gradients, strict=True):
            m, v = self.first[name], self.second[name]
            m.mul_(0.9).add_(g * scale, alpha=0.1)
            v.mul_(0.999).addcmul_(g * scale, g * scale, value=0.001)
            away = (m / (1 - 0.9**self.steps)) / (torch.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)
            w.mul_(1 - rate * DECAY).sub_(away, alpha=rate)

    def save(self, folder: Path) -> None:
        """Write the state beside its place, then put it there."""
        folder.mkdir(parents=True, exist_ok=True)
        groups = {"w": self.weights, "m": self.first, "v": self.second, "b": self.best}
        arrays = {
            f"{g}.{k}": t.detach().numpy() for g, group in groups.items() for k, t in group.items()
        }
        counts = {
            "seed": self.seed,
            "n": self.n,
            "epoch": self.epoch,
            "steps": self.steps,
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
        }
        with replacing(folder / "training.safetensors") as file:
            file.write(safetensors.numpy.save(arrays, metadata={"counts": json.dumps(counts)}))

    def resume(self, folder: Path) -> None:
        """Take over the state in a folder, if there is one.

        Raises:
            ResumeError: it is damaged, or of another training.
        """
        path = folder / "training.safetensors"
        if not path.exists():
            return
        try:
            arrays = safetensors.numpy.load_file(path)
            with safetensors.safe_open(path, framework="numpy") as file:
                counts = json.loads((file.metadata() or {})["counts"])
        except (safetensors.SafetensorError, KeyError, ValueError, RecursionError) as problem:
            raise ResumeError(
                f"{path}: no state of a training ({problem}); delete it to begin again"
            ) from None
        if (counts["seed"], counts["n"]) != (self.seed, self.n):
            raise ResumeError(
                f"{path}: training with seed {counts['seed']} on {counts['n']} examples, "
                f"expected seed {self.seed} and {self.n}; choose another folder"
            )
        if any(f"w.{name}" not in arrays for name in self.weights):
            raise ResumeError(f"{path}: of another version of fedstale; delete it to begin again")
        for letter, group in (("m", self.first), ("v", self.second), ("b", self.best)):
            group.update({name: torch.from_numpy(arrays[f"{letter}.{name}"]) for name in group})
        for name in self.weights:
            self.weights[name] = torch.from_numpy(arrays[f"w.{name}"]).requires_grad_()
        self.epoch, self.steps = counts["epoch"], counts["steps"]
        self.best_loss, self.best_epoch = counts["best_loss"], counts["best_epoch"]
