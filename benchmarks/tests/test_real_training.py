"""Models that are really trained learn as plain loops do, and in each episode as if alone."""

import numpy as np
import pytest
from small_episodes import episodes, fleet, send, simulator_of

from agent import real_training
from agent.real_training import BATCH, LARGEST, RATE, TrainedScenario, digits, examples_of, train
from fedstale.agents.env.episodes import AGES, GROUPS, INFLATION
from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv

ALWAYS = [(0.0, 10_000.0)]


def split(model):
    w1, b1, w2, b2 = np.split(model.astype(np.float64), np.cumsum([64 * 32, 32, 32 * 10]))
    return w1.reshape(64, 32), b1, w2.reshape(32, 10), b2


def trained_alone(model, chosen):
    """Return a model after an epoch of SGD, example by example, and the losses on the way."""
    (w1, b1, w2, b2), data, losses = split(model), digits()[0], []
    for batch in np.split(chosen, range(BATCH, len(chosen), BATCH)):
        steps = [np.zeros_like(part) for part in (w1, b1, w2, b2)]
        for i in batch:
            x, inner = data.images[i], data.images[i] @ w1 + b1
            out = np.exp(np.maximum(inner, 0) @ w2 + b2)
            out /= out.sum()
            losses.append(-np.log(out[data.labels[i]]))
            error = out - np.eye(10)[data.labels[i]]
            back = (w2 @ error) * (inner > 0)
            changes = np.outer(x, back), back, np.outer(np.maximum(inner, 0), error), error
            steps = [step + change for step, change in zip(steps, changes, strict=True)]
        w1, b1, w2, b2 = (
            part - RATE / len(batch) * step
            for part, step in zip((w1, b1, w2, b2), steps, strict=True)
        )
    return np.concatenate([part.ravel() for part in (w1, b1, w2, b2)]), np.array(losses)


def digits_of(made, column):
    """Return the training digits of a device of the first episode."""
    count = int(min(made.examples[0, column], LARGEST))
    return examples_of(made.noise[0, [column], 0], made.mixtures[0, [column]], count)[0]


def test_devices_that_train_together_end_as_each_does_in_a_plain_loop():
    rng = np.random.default_rng(0)
    models = 0.3 * rng.standard_normal((3, real_training.SIZE)).astype(np.float32)
    chosen, counts = rng.integers(1000, size=(3, 60)), np.array([3, 57, 30])
    updates, means, squares = train(models, chosen, counts)
    for model, some, count, update, mean, square in zip(
        models, chosen, counts, updates, means, squares, strict=True
    ):
        after, losses = trained_alone(model, some[:count])
        np.testing.assert_allclose(model + update, after, atol=1e-5)
        assert mean == pytest.approx(losses.mean(), rel=1e-5)
        assert square == pytest.approx((losses**2).mean(), rel=1e-5)


def test_devices_have_digits_by_their_mixtures_and_their_own():
    rng = np.random.default_rng(1)
    mixtures = rng.dirichlet(np.full(GROUPS, 0.5), size=200)
    found = examples_of(rng.standard_normal(200), mixtures, 300)
    shares = (digits()[0].labels[found][..., None] == np.arange(GROUPS)).mean(axis=1)
    assert np.abs(shares - mixtures).max() < 0.15
    np.testing.assert_allclose(shares.mean(axis=0), mixtures.mean(axis=0), atol=0.01)
    # Within a label every digit is as likely as any other, and no two devices have the same ones.
    times = np.bincount(found[digits()[0].labels[found] == 3], minlength=1)
    times = times[digits()[0].labels[: times.size] == 3]
    assert times.var() < 2 * times.mean()
    assert len({tuple(one) for one in found}) == 200


def test_models_are_merged_as_by_a_server_that_trains_one_device_after_the_other():
    """Devices of many speeds, so that updates are stale; each trains the version it was sent."""
    n, rng = 12, np.random.default_rng(2)
    made = episodes(
        np.arange(n),
        examples=rng.integers(5, 40, size=n),
        mixtures=rng.dirichlet(np.full(GROUPS, 0.5), size=(1, n)),
        noise=rng.standard_normal((1, n, 4)),
        keeps_stragglers=True,
        age_weights=0.8 ** np.arange(AGES),
        concurrency=5,
        buffer_size=2,
    )
    traces = fleet([ALWAYS] * n, compute=rng.uniform(0.3, 3.0, n))
    simulator = simulator_of(traces, made, place=TrainedScenario)
    sent, oldest = {}, 0
    for _ in range(25):
        picked = rng.permutation(np.flatnonzero(simulator.mask[0]))[: simulator.slots[0]]
        sent |= {column: simulator.models[0].copy() for column in picked}
        before, version = simulator.models[0].copy(), simulator.version[0]
        finished = simulator.known["times_finished"][0].copy()
        send(simulator, *picked)
        merged = np.flatnonzero(simulator.known["times_finished"][0] > finished)
        assert simulator.version[0] - version == (merged.size > 0)
        expected, total = before.astype(np.float64), made.examples[0, merged].sum()
        for column in merged:
            after, losses = trained_alone(sent[column], digits_of(made, column))
            age = simulator.known["staleness"][0, column]
            oldest = max(oldest, age)
            weight = 0.8**age * made.examples[0, column] / total
            expected += weight * (after - sent[column])
            assert simulator.known["loss"][0, column] == pytest.approx(losses.mean(), rel=1e-4)
        np.testing.assert_allclose(simulator.models[0], expected, atol=1e-5)
    assert oldest >= 3


def test_random_devices_teach_all_labels_and_labels_that_are_never_trained_stay_unknown():
    """Half of the devices have half of the labels; gains add up to the fall of the log loss."""
    n, low = 20, np.arange(10)
    mixtures = np.zeros((n, GROUPS))
    mixtures[:10, :5] = mixtures[10:, 5:] = 0.2
    noise = np.random.default_rng(4).standard_normal((n, 4))
    made = episodes(
        np.arange(n),
        b=2,
        mixtures=mixtures,
        noise=noise,
        examples=100.0,
        concurrency=5,
        buffer_size=5,
    )
    simulator = simulator_of(fleet([ALWAYS] * n), made, place=TrainedScenario)
    first, rng, gained = simulator.losses.copy(), np.random.default_rng(3), np.zeros(2)
    for _ in range(40):
        for row, devices in enumerate((np.arange(n), low)):
            outcome = send(simulator, *rng.choice(devices, 5, replace=False), row=row)
            gained[row] += outcome.gain[0]
    fair, unfair = simulator.losses
    assert (fair < 0.6 * first[0]).all()
    assert unfair[:5].mean() < 0.5 * first[1, :5].mean()
    assert (unfair[5:] > first[1, 5:]).all()
    falls = np.log(first.mean(axis=1) / simulator.losses.mean(axis=1))
    np.testing.assert_allclose(gained, falls / real_training.STEP)


def test_inflating_clients_state_more():
    inflates = np.array([[False, True]])
    made = episodes(np.arange(2), inflates=inflates, mixtures=np.eye(GROUPS)[[0, 0]])
    stated = simulator_of(fleet([ALWAYS] * 2), made, place=TrainedScenario)
    first = stated.models[0].copy()
    send(stated, 0, 1)
    _, losses = trained_alone(first, digits_of(made, 0))
    means = losses.mean() * np.array([1.0, INFLATION])
    squares = (losses**2).mean() * np.array([1.0, INFLATION**2])
    np.testing.assert_allclose(stated.known["loss"][0], means, rtol=1e-4)
    np.testing.assert_allclose(stated.known["square_loss"][0], squares, rtol=1e-4)


def test_a_window_is_worth_the_same_alone_and_among_others(busy):
    place = TrainedScenario.like(busy)
    many = VectorSelectionEnv(place, 5, n_max=16, rollouts=1, baseline=False)
    one = SelectionEnv(place, n_max=16, baseline=False)
    many.reset(seed=3)
    rewards, over = [], np.zeros(5, dtype=bool)
    while not over.all():
        _, earned, ended, _, _ = many.step(np.tile(np.arange(16.0), (5, 1)))
        rewards.append(earned)
        over |= ended
    assert np.ptp(np.sum(rewards, axis=0)) > 0.1
    for window in range(5):
        one.reset(seed=3, options={"window": window})
        for earned in rewards:
            _, reward, done, _, _ = one.step(np.arange(16.0))
            assert reward == pytest.approx(earned[window], rel=1e-5, abs=1e-5)
            if done:
                break
