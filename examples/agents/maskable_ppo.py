"""Learn a selection task with the MaskablePPO of sb3-contrib, whose actions are rankings."""

import sys

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy

from fedstale.agents import SB3VecEnv, tasks
from fedstale.contrib.selectors import set_policy

TASK = "fedstale/Selection-phones-v1"


def main(choices: int) -> None:
    """Learn from so many choices, and print the score beside the balanced rule's."""
    envs = gymnasium.make_vec(TASK, num_envs=32, baseline=True, action="ranking")
    model = MaskablePPO(
        set_policy(MaskableMultiInputActorCriticPolicy),
        SB3VecEnv(envs),
        learning_rate=1e-3,
        n_steps=32,
        batch_size=512,
        n_epochs=4,
        gamma=0.95,
        device="cpu",
        seed=0,
    )
    model.learn(choices)

    def ranked(seen: dict[str, np.ndarray]) -> np.ndarray:
        """Return the scores that the rankings are drawn by."""
        features = model.policy.extract_features(model.policy.obs_to_tensor(seen)[0])
        return features[:, : seen["mask"].shape[1]].detach().numpy()

    found = tasks.score(TASK, ranked)
    rule = tasks.score(TASK, lambda seen: seen["heuristic"])
    print(f"MaskablePPO earns {found.mean():.2f}, the balanced rule {rule.mean():.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 20_480)
