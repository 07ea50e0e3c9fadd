"""Learn a selection task with the PPO of Stable-Baselines3."""

import sys

import gymnasium
from stable_baselines3 import PPO

from fedstale.agents import SB3VecEnv, tasks
from fedstale.contrib.selectors import set_policy

TASK = "fedstale/Selection-phones-v1"


def main(choices: int) -> None:
    """Learn from so many choices, and print the score beside the balanced rule's."""
    envs = SB3VecEnv(gymnasium.make_vec(TASK, num_envs=128, baseline=True))
    model = PPO(
        set_policy(),
        envs,
        learning_rate=1e-3,
        n_steps=32,
        batch_size=1024,
        n_epochs=4,
        gamma=0.95,
        device="cpu",
        seed=0,
    )
    model.learn(choices)
    found = tasks.score(TASK, lambda seen: model.predict(seen)[0])
    rule = tasks.score(TASK, lambda seen: seen["heuristic"])
    print(f"PPO earns {found.mean():.2f}, the balanced rule {rule.mean():.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 160_000)
