"""Learn a selection task with a policy gradient and a critic in plain torch."""

import sys

import gymnasium
import torch
from torch import nn

from fedstale.agents import tasks

TASK, ENVS, STEPS, GAMMA, LAMBDA = "fedstale/Selection-phones-v1", 128, 32, 0.95, 0.95


class Agent(nn.Module):
    """One network scores each candidate, another values the choice."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        inner = [nn.Linear(features + 1 + context, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.actor = nn.Sequential(*inner, nn.Linear(64, 1))
        self.critic = nn.Sequential(nn.Linear(features + context, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores of the places, shape (b, n), and values of the choices, shape (b,)."""
        here = seen["mask"] > 0
        about = seen["context"][:, None].expand(-1, here.shape[1], -1)
        each = torch.cat([seen["features"], seen["heuristic"][..., None], about], 2)[here]
        scores = torch.full(here.shape, -1e9).masked_scatter(here, self.actor(each).squeeze(-1))
        mean = seen["features"].sum(1) / here.sum(1, keepdim=True).clamp(min=1)
        return scores, self.critic(torch.cat([seen["context"], mean], 1)).squeeze(-1)


def drawn(scores: torch.Tensor) -> torch.Tensor:
    """Return scores with Gumbel noise: the k highest are drawn one after another."""
    return scores - torch.empty_like(scores).exponential_().log()


def log_prob(scores: torch.Tensor, order: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return that of drawing the first k of an order one after another (Plackett-Luce)."""
    ranked = scores.gather(1, order)
    rest = ranked.flip(1).logcumsumexp(1).flip(1)
    return ((ranked - rest) * (torch.arange(ranked.shape[1]) < k)).sum(1)


def main(choices: int) -> None:
    """Learn from so many choices, and print the score beside the balanced rule's."""
    torch.manual_seed(0)
    envs = gymnasium.make_vec(TASK, num_envs=ENVS, baseline=True)
    (_, f), (g,) = (envs.single_observation_space[name].shape for name in ("features", "context"))
    agent = Agent(f, g)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)

    def tensors(seen: dict) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(values) for name, values in seen.items()}

    seen = tensors(envs.reset(seed=0)[0])
    for _ in range(choices // (ENVS * STEPS)):
        kept = []
        for _ in range(STEPS):
            with torch.no_grad():
                scores, value = agent(seen)
            action = drawn(scores)
            after, reward, over, _, _ = envs.step(action.numpy())
            order = action.argsort(1, descending=True)
            kept.append((seen, order, value, torch.tensor(reward), torch.tensor(1.0 - over)))
            seen = tensors(after)
        with torch.no_grad():
            _, following = agent(seen)
        advantages, later = [], torch.zeros(ENVS)
        for _, _, value, reward, goes_on in reversed(kept):
            delta = reward + GAMMA * goes_on * following - value
            later, following = delta + GAMMA * LAMBDA * goes_on * later, value
            advantages.insert(0, later.float())
        observations = {name: torch.cat([step[0][name] for step in kept]) for name in seen}
        order, values = torch.cat([step[1] for step in kept]), torch.cat([step[2] for step in kept])
        advantage = torch.cat(advantages)
        returns, advantage = advantage + values, advantage / advantage.std()
        for part in torch.randperm(len(order)).chunk(4):
            some = {name: x[part] for name, x in observations.items()}
            scores, value = agent(some)
            gain = log_prob(scores, order[part], some["slots"]) * advantage[part]
            loss = 0.5 * (value - returns[part]).square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        found = tasks.score(TASK, lambda seen: drawn(agent(tensors(seen))[0]).numpy())
    rule = tasks.score(TASK, lambda seen: seen["heuristic"])
    print(f"the policy gradient earns {found.mean():.2f}, the balanced rule {rule.mean():.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 160_000)
