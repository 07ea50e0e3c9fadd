"""The model, and the length of its examples."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedstale.apps.characters import N_CODES

LENGTH = 80
"""Characters of one example."""
MAX_NORM = 1.0
"""Of the gradient of one step."""


class Network(nn.Module):
    """One GRU layer that predicts the next character at each place."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(N_CODES, 16)
            self.recur = nn.GRU(16, 64, batch_first=True)
            self.guess = nn.Linear(64, N_CODES)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        states, _ = self.recur(self.embed(codes))
        return self.guess(states)  # type: ignore[no-any-return]


class UnrolledNetwork(Network):
    """The same network out of plain operations, which torch.func can put on top of one another."""

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        cell = self.recur
        received = linear(self.embed(codes), cell.weight_ih_l0, cell.bias_ih_l0)
        state = received.new_zeros(len(codes), cell.hidden_size)
        states = []
        for each in received.unbind(1):
            remembered = linear(state, cell.weight_hh_l0, cell.bias_hh_l0)
            reset_x, update_x, new_x = each.chunk(3, 1)
            reset_h, update_h, new_h = remembered.chunk(3, 1)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            state = new + torch.sigmoid(update_x + update_h) * (state - new)
            states.append(state)
        return self.guess(torch.stack(states, 1))  # type: ignore[no-any-return]
