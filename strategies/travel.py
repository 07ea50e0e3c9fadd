"""How far the server typically moves in one update: the C of Gap-Aware.

C is a bias-corrected root mean square of the server's own steps,

    r <- g r + (1 - g) step^2,    C = eta_max sqrt(r / (1 - g^n)),

where step is the movement divided by the rate that made it, eta_max is the largest rate so far and
n counts the steps really seen. When a schedule lowers the rate, C keeps the size that a step had at
the largest rate, so that the penalty on late updates fades with the rate.

Reference:
    Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
"""

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Literal

import numpy as np

from fedstale.strategies.arrays import Array, Model, inner, over_chunks, zeros_like
from fedstale.strategies.settings import require

Grain = Literal["parameter", "layer", "model"]
Steps = Literal["maximal", "actual"]
MODEL = ""


class Travel:
    """Running size of the server's steps, per parameter, per layer or for the whole model."""

    def __init__(self, of: Grain, *, decay: float, steps: Steps = "maximal") -> None:
        """Start with no step seen.

        Args:
            of: one size for each parameter, for each array, or for the model. The last two are
                Euclidean norms.
            decay: g, in [0, 1).
            steps: "maximal" scales steps to the largest rate so far; "actual" takes them as they
                were made, which adaptive server optimizers need.
        """
        require(0 <= decay < 1, "weighting.decay", decay, "a number in [0, 1), such as 0.97")
        require(of in {"parameter", "layer", "model"}, "weighting.of", of, "parameter|layer|model")
        require(steps in {"maximal", "actual"}, "weighting.steps", steps, "maximal|actual")
        self.of, self.decay, self.steps = of, decay, steps
        self.n = 0
        self.rate = 0.0
        self.squares: Model = {}
        """r: arrays in the shapes of the model, or one number for each layer or for the model."""
        self._sizes: Model = {}

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """Take in one step of the server; a step at rate 0 tells nothing and is left out."""
        rate = 1.0 if self.steps == "actual" else abs(rate)
        if rate == 0.0:
            return
        if not self.squares:
            self.squares = self._empty(after)
        self.n += 1
        self._sizes = {}
        self.rate = max(self.rate, rate)
        if self.of == "parameter":
            self._observe_parameters(before, after, rate)
        else:
            self._observe_norms(before, after, rate)

    def scale(self) -> float:
        """Return what turns sqrt(r) into C; 0 before the first step."""
        return self.rate / sqrt(1.0 - self.decay**self.n) if self.n else 0.0

    def sizes(self, like: Model) -> Model:
        """Return C of every parameter, with the smallest normal number in place of 0.

        All updates of a merge share it, so it is worked out once for each step of the server.

        Args:
            like: a model, for the shapes before the first step.
        """
        if not self._sizes:
            self._sizes = zeros_like(like)
            squares = self.squares if self.n else self._sizes
            over_chunks(partial(_size, scale=self.scale()), self._sizes, squares)
        return self._sizes

    def size(self, name: str) -> float:
        """Return C of a layer, or of the model under the name `MODEL`; 0 before the first step."""
        return sqrt(float(self.squares[name])) * self.scale() if self.n else 0.0

    def _empty(self, model: Model) -> Model:
        if self.of == "parameter":
            return zeros_like(model)
        return {name: np.zeros(()) for name in (model if self.of == "layer" else (MODEL,))}

    def _observe_parameters(self, before: Model, after: Model, rate: float) -> None:
        follow = partial(_follow, rate=rate, decay=self.decay)
        over_chunks(follow, self.squares, before, after)

    def _observe_norms(self, before: Model, after: Model, rate: float) -> None:
        sums = dict.fromkeys(self.squares, 0.0)
        groups = (
            {name: {name: x} for name, x in before.items()}
            if self.of == "layer"
            else {MODEL: before}
        )
        for key, group in groups.items():
            sums[key] = sum(over_chunks(_square_step, group, after))
        for key, total in sums.items():
            r = float(self.squares[key])
            g = self.decay
            self.squares[key] = np.asarray(g * r + (1 - g) * total / rate**2)

    def state_dict(self) -> dict[str, Array | float]:
        """Return n, the largest rate and r."""
        return {"n": self.n, "rate": self.rate} | {f"r.{k}": v for k, v in self.squares.items()}

    def load_state_dict(self, state: Mapping[str, Array | float]) -> None:
        """Continue from a checkpoint."""
        self.n, self.rate = int(state["n"]), float(state["rate"])
        self._sizes = {}
        self.squares = {
            key[2:]: np.array(value) for key, value in state.items() if key.startswith("r.")
        }


def _size(c: Array, r: Array, *, scale: float) -> None:
    """Write C of one chunk."""
    np.sqrt(r, out=c)
    np.multiply(c, c.dtype.type(scale), out=c)
    np.maximum(c, np.finfo(c.dtype).tiny, out=c)


def _follow(r: Array, before: Array, after: Array, *, rate: float, decay: float) -> None:
    """Take a step into r of one chunk."""
    g = r.dtype.type(decay)
    step = after - before
    if rate != 1.0:
        step /= step.dtype.type(rate)
    step *= step
    step *= 1 - g
    np.multiply(r, g, out=r)
    np.add(r, step, out=r)


def _square_step(before: Array, after: Array) -> float:
    step = after - before
    return inner(step, step)
