import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.agents.policy import scorer
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.selector import top

F, G = N_FEATURES, N_CONTEXT


def drawn(seed=0, n=7, batch=()):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(*batch, n, F)).astype(np.float32)
    context = rng.normal(size=(*batch, G)).astype(np.float32)
    heuristic = rng.normal(size=(*batch, n)).astype(np.float32)
    return features, context, heuristic


def trained(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (0.3 * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in scorer.initial(rng).items()
    }


def test_the_score_is_the_formula_worked_out_by_loops():
    features, context, heuristic = drawn()
    w = trained()
    mean = features.mean(axis=0)
    spread = features.std(axis=0)
    about = np.tanh(np.concatenate([context, mean, spread]) @ w["pool"] + w["pool_bias"])
    for i, found in enumerate(scorer.score(w, features, context, heuristic)):
        first = features[i] @ w["candidate"] + about @ w["context"] + w["candidate_bias"]
        second = np.maximum(first, 0) @ w["hidden"] + w["hidden_bias"]
        expected = w["beta"][0] * heuristic[i] + (np.maximum(second, 0) @ w["last"])[0]
        assert found == pytest.approx(expected, abs=1e-5)


def test_many_candidates_score_as_they_would_in_one_piece(monkeypatch):
    features, context, heuristic = drawn(n=50)
    whole = scorer.score(trained(), features, context, heuristic)
    monkeypatch.setattr(scorer, "_CHUNK", 8)
    np.testing.assert_allclose(
        scorer.score(trained(), features, context, heuristic), whole, atol=1e-5
    )


def test_choices_that_are_scored_together_score_as_each_alone():
    features, context, heuristic = drawn(batch=(3, 4))
    together = scorer.score(trained(), features, context, heuristic)
    for p in range(3):
        for e in range(4):
            alone = scorer.score(trained(), features[p, e], context[p, e], heuristic[p, e])
            np.testing.assert_allclose(together[p, e], alone, atol=1e-5)


def test_the_network_in_torch_gives_the_same_scores_and_exports_its_weights():
    torch = pytest.importorskip("torch")
    pytest.importorskip("stable_baselines3")
    from fedstale.agents.policy_gradient import ScorerNetwork

    features, context, heuristic = drawn(batch=(4,))
    mask = np.random.default_rng(3).random(heuristic.shape) < 0.6
    seen = {"features": features, "context": context, "heuristic": heuristic, "mask": mask}
    space = spaces.Dict({k: spaces.Box(-9.0, 9.0, v.shape[1:]) for k, v in seen.items()})
    for weights in (scorer.initial(np.random.default_rng(1)), trained()):
        network = ScorerNetwork(space, weights)
        found = network({k: torch.from_numpy(v.astype(np.float32)) for k, v in seen.items()})
        assert found.shape == (4, network.features_dim)
        scores = found.detach().numpy()
        assert not scores[~mask].any()
        expected = scorer.score(weights, features, context, heuristic, mask)
        np.testing.assert_allclose(scores[mask], expected[mask], atol=1e-4)
        for name, value in network.exported().items():
            np.testing.assert_array_equal(value, weights[name])


@settings(deadline=None, max_examples=50)
@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    k=st.integers(0, 40),
    seed=st.integers(0, 100),
)
def test_the_top_k_are_distinct_in_order_and_none_better_is_left(scores, k, seed):
    values = np.array(scores, dtype=np.float32)
    chosen = top(values, k, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == chosen.size == min(k, values.size)
    assert (np.diff(values[chosen]) <= 0).all()
    left = np.delete(values, chosen)
    assert not chosen.size or not left.size or left.max() <= values[chosen].min()


def test_chance_breaks_ties_evenly():
    rng = np.random.default_rng(0)
    counts = np.bincount([top(np.zeros(4), 1, rng)[0] for _ in range(2000)], minlength=4)
    assert (np.abs(counts - 500) < 100).all()
