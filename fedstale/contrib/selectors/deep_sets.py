"""A policy of Stable-Baselines3 that scores candidates one by one, whatever their order and number.

A stock policy flattens the observation: what it learns of the third place says nothing about the
fourth, though the order of the places means nothing. Here one network scores every candidate by its
own features and a summary of all, so a task with many candidates is learnt as fast as one with few.

Where an action is scores, they are the network's with Gumbel noise, so that the best k are drawn
one after another by the exponentials of their scores (Plackett-Luce), and the probability of an
action is that of the k in their order: noise that changes no pick is no part of it.

Reference:
    Zaheer et al. Deep Sets. NeurIPS 2017 (one network for each element, and a pooled context).
    Plackett. The Analysis of Permutations. Applied Statistics, 1975.
"""

from typing import Any, TypeVar, cast

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from fedstale.agents.policy_gradient import PlackettLuce

_HEURISTIC = 4.0
"""Scores of the heuristic differ by so much or less."""
P = TypeVar("P", bound=ActorCriticPolicy)


class SetExtractor(BaseFeaturesExtractor):
    """Scores of the candidates with their mask and slots for the actor, a summary for the critic.

    Args:
        observation_space: of a selection environment.
        width: of the layers, and of the summary.
    """

    def __init__(self, observation_space: spaces.Dict, width: int = 64) -> None:
        n, f = cast("tuple[int, int]", observation_space["features"].shape)
        (g,) = cast("tuple[int]", observation_space["context"].shape)
        super().__init__(observation_space, 2 * n + 1 + width)
        self.n_places, self.width = n, width
        # The heuristic's score and the number of slots are features, too.
        self.each = nn.Sequential(nn.Linear(f + 1, width), nn.Tanh())
        self.whole = nn.Sequential(nn.Linear(width + g + 1, width), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Return scores, 0 for what is no candidate, mask, slots and summary; shape (b, ...)."""
        mask, slots = observations["mask"], observations["slots"]
        # Most places are empty: only candidates go through the layers.
        here = mask > 0
        row = here.nonzero()[:, 0]
        heuristic = observations["heuristic"][..., None] / _HEURISTIC
        own = torch.cat([observations["features"], heuristic], dim=2)
        each = self.each(own[here])
        total = torch.zeros(len(mask), self.width, device=mask.device).index_add(0, row, each)
        mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        whole = self.whole(torch.cat([mean, observations["context"], torch.log1p(slots)], dim=1))
        found = self.last(torch.cat([each, whole[row]], dim=1)).squeeze(-1)
        scores = torch.zeros_like(mask).masked_scatter(here, found)
        return torch.cat([scores, mask, slots, whole], dim=1)


class _Split(nn.Module):
    """Gives the summary to the critic and all before it to the actor."""

    def __init__(self, latent_dim_pi: int, latent_dim_vf: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = latent_dim_pi, latent_dim_vf

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : self.latent_dim_pi]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, self.latent_dim_pi :]


class _ForEachPosition(nn.Module):
    """Gives every position of a ranking the same scores; of the places, shape (b, n * n)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, latent: Tensor) -> Tensor:
        return latent[:, : self.n].repeat(1, self.n)


class _Scores(PlackettLuce):
    """Scores with noise, of which only the order of the best k counts."""

    def sample(self) -> Tensor:
        uniform = torch.rand(self._scores.shape, device=self._scores.device)
        return self._scores - torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))

    def mode(self) -> Tensor:
        return self._scores

    def log_prob(self, x: Tensor) -> Tensor:
        # What is no candidate has the lowest of the scores, and keeps it with noise.
        return super().log_prob(x.argsort(dim=1, descending=True))


def set_policy(base: type[P] = MultiInputActorCriticPolicy) -> type[P]:  # type: ignore[assignment]
    """Return an actor-critic policy whose actions are drawn by the scores of `SetExtractor`.

    Args:
        base: its class, such as the `MaskableMultiInputActorCriticPolicy` of sb3-contrib.

    Example:
        PPO(set_policy(), SB3VecEnv(gymnasium.make_vec("fedstale/Selection-phones-v1", 64)))
    """

    class SetPolicy(base):  # type: ignore[valid-type,misc]
        """Scores candidates one by one; `features_extractor_kwargs` are those of the extractor."""

        features_extractor: SetExtractor
        action_net: nn.Module
        action_dist: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "features_extractor_class": SetExtractor})

        def _build_mlp_extractor(self) -> None:
            n = self.features_extractor.n_places
            self.mlp_extractor = _Split(2 * n + 1, self.features_extractor.width)

        def _build(self, lr_schedule: Schedule) -> None:
            super()._build(lr_schedule)
            if isinstance(self.action_space, spaces.Box):
                self.action_net, self.action_dist = nn.Identity(), _Scores()
                # It has no other noise.
                self.log_std.requires_grad_(False)
            else:
                self.action_net = _ForEachPosition(self.features_extractor.n_places)
            self.optimizer = self.optimizer_class(
                self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
            )

        def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Any:
            if not isinstance(self.action_dist, _Scores):
                return super()._get_action_dist_from_latent(latent_pi)
            n = self.features_extractor.n_places
            scores, mask, slots = latent_pi[:, :n], latent_pi[:, n:-1], latent_pi[:, -1]
            return self.action_dist.proba_distribution(scores, mask > 0, slots.long())

    return cast("type[P]", SetPolicy)
