"""A text becomes examples, and a model is evaluated on them."""

import numpy as np
import pytest
import torch
from torch import nn

from fedstale.apps import characters

LENGTH = 80


def test_examples_overlap_by_one_character_so_that_every_one_is_guessed():
    text = "".join(characters.ALPHABET[i % 90] for i in range(3 * LENGTH + 5))
    examples = characters.encode(text, LENGTH)
    assert examples.shape == (3, LENGTH + 1)
    assert (examples[1:, 0] == examples[:-1, -1]).all()
    inputs = "".join(characters.ALPHABET[code] for code in examples[:, :-1].flatten())
    assert inputs == text[: 3 * LENGTH]


def test_unknown_characters_have_a_code_of_their_own():
    codes = characters.encode("\u00e9\u4eba" + "x" * LENGTH, LENGTH)
    assert codes[0, 0] == codes[0, 1] == len(characters.ALPHABET)


def test_a_text_shorter_than_one_example_is_refused():
    with pytest.raises(ValueError, match="a text of 80 characters: expected more than 80"):
        characters.encode("x" * LENGTH, LENGTH)


class Bigrams(nn.Module):
    """Guesses a character from the one before."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shape = characters.N_CODES, characters.N_CODES
        self.logits = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, codes):
        return self.logits[codes]


def test_mean_loss_does_not_depend_on_how_examples_are_batched():
    rng = np.random.default_rng(0)
    examples = torch.from_numpy(rng.integers(90, size=(300, LENGTH + 1)))
    network = Bigrams()
    whole = characters.evaluate(network, examples)
    parts = [characters.evaluate(network, part) for part in examples.split(100)]
    assert np.mean(parts, axis=0) == pytest.approx(whole, rel=1e-5)
    assert characters.mean_loss(network, examples).item() == pytest.approx(whole[0], rel=1e-5)
    each = characters.losses(network, examples).detach()
    assert each.mean().item() == pytest.approx(whole[0], rel=1e-5)
