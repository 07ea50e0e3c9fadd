"""The model: a causal transformer, or adapters on one that stays as it is.

Reference:
    Vaswani et al. Attention Is All You Need. NeurIPS 2017; with the norms before attention and
    layers, as in GPT-2 (Radford et al. Language Models are Unsupervised Multitask Learners. 2019).
    Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fedstale.apps.characters import N_CODES

LENGTH = 128
"""Characters of one example."""
HEAD = 32
"""Width of one head of attention."""

Config = Mapping[str, bool | int | float | str]


class Block(nn.Module):
    """Attention to earlier characters, and two layers on each, both added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return states of shape (n, length, width) for such states."""
        heads = self.query_key_value(self.before_attention(x)).unflatten(2, (3, -1, HEAD))
        attended = scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.before_layers(x))))  # type: ignore[no-any-return]


class Network(nn.Module):
    """A causal transformer that predicts the next character at each place."""

    def __init__(self, seed: int = 0, *, width: int = 128, layers: int = 5) -> None:
        super().__init__()
        if width < HEAD or width % HEAD:
            raise ValueError(f"width = {width}: expected a multiple of {HEAD}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.character = nn.Embedding(N_CODES, width)
            self.place = nn.Embedding(LENGTH, width)
            self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.guess = nn.Linear(width, N_CODES, bias=False)
            for weights in (self.character.weight, self.place.weight, self.guess.weight):
                nn.init.normal_(weights, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        states = self.character(codes) + self.place.weight[: codes.shape[1]]
        return self.guess(self.norm(self.blocks(states)))  # type: ignore[no-any-return]


class Pair(nn.Module):
    """What is added to a linear layer: B A x, of some rank; B starts at 0."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return B A x."""
        return self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Adapters on each linear layer in the blocks of a network; they alone are its weights.

    Without the factor alpha / rank of the paper: B A means the same at every rank.
    """

    def __init__(self, network: Network, rank: int, seed: int = 0) -> None:
        super().__init__()
        # In a tuple, where PyTorch does not look for weights.
        self._frozen = (network.requires_grad_(requires_grad=False),)
        self.pairs = nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, layer in network.blocks.named_modules():
                if isinstance(layer, nn.Linear):
                    pair = self.pairs[name.replace(".", "_")] = Pair(layer, rank)
                    layer.register_forward_hook(
                        lambda _layer, given, made, pair=pair: made + pair(given[0])
                    )

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        return self._frozen[0](codes)  # type: ignore[no-any-return]


def ranks(config: Config) -> list[int]:
    """Parse the ranks that sites' adapters have in turn; empty where the whole model trains.

    Raises:
        ValueError: they are no whole numbers >= 1, or there is no base to adapt.
    """
    text = str(config["ranks"])
    found = [int(rank) if rank.strip().isdecimal() else 0 for rank in text.split(",") if text]
    if not all(found):
        raise ValueError(f"ranks = {text!r}: expected whole numbers >= 1, such as '8' or '2,4,8'")
    if found and not config["base"]:
        raise ValueError(
            f"ranks = {text!r} without base: expected the model.safetensors of a run of letters"
        )
    return found


def model(config: Config, seed: int = 0, rank: int | None = None) -> nn.Module:
    """Return the model of a run config, whole or as adapters.

    Args:
        config: with width, layers, base and ranks.
        seed: of the first weights.
        rank: of the adapters; None for the largest.

    Raises:
        ValueError: the run config is not one of letters.
    """
    all_ranks = ranks(config)
    network = Network(seed, width=int(config["width"]), layers=int(config["layers"]))
    if base := str(config["base"]):
        try:
            network.load_state_dict(_read(base))
        except (OSError, SafetensorError, RuntimeError) as problem:
            raise ValueError(
                f"base = {base!r}: expected the model.safetensors of a run of letters with this "
                f"width and these layers ({problem})"
            ) from None
    return Adapted(network, rank or max(all_ranks), seed) if all_ranks else network


@lru_cache(maxsize=2)
def _read(path: str) -> dict[str, Tensor]:
    return load_file(path)
