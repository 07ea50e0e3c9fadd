"""Published results that are measured again: problems, choices and figures of three papers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from places import RECORDINGS

from fedstale.errors import ProtocolError
from fedstale.strategies.selection import Candidates


@pytest.fixture(scope="module")
def parts():
    from reproduce import clothes, flash, power_of_choice, ringmaster, run

    return SimpleNamespace(
        clothes=clothes, flash=flash, choice=power_of_choice, ring=ringmaster, run=run
    )


@pytest.fixture
def images(parts):
    if not Path(parts.clothes.IMAGES or "/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    return parts.clothes.images()


def test_the_quadratic_is_the_one_of_the_paper(parts):
    f = parts.ring.Quadratic(9)
    a = (np.diag(np.full(9, 2.0)) - np.diag(np.ones(8), 1) - np.diag(np.ones(8), -1)) / 4
    x = np.random.default_rng(1).normal(size=9)
    np.testing.assert_allclose(f.product(x), a @ x)
    best = np.linalg.solve(a, f.b)
    assert f.gap(best) == pytest.approx(0.0, abs=1e-12)
    assert f.gap(x) == pytest.approx((x - best) @ a @ (x - best) / 2)


@pytest.mark.parametrize(
    "about",
    [
        {"rate": 0.3, "fresh": 4},
        {"rate": 0.5, "fresh": 1, "batch": 3},
        {"rate": 0.2, "adapts_beyond": 5},
        {"rate": 0.2},
    ],
)
def test_strategies_do_on_a_trace_what_the_loop_does(parts, about):
    f, method = parts.ring.Quadratic(9), parts.ring.Method(**about)
    found = [
        run(f, method, parts.ring.Workers(20, 9, seed=3), 60.0)
        for run in (parts.ring.looped, parts.ring.simulated)
    ]
    assert found[0] == found[1]
    assert found[0] < 0.5 * f.gap(f.first())


def test_a_rate_falls_with_a_delay_beyond_the_number_of_workers(parts):
    method = parts.ring.Method(rate=0.1, adapts_beyond=5)
    assert [method.weight(delay) for delay in (0, 4, 5, 10, 50)] == [1.0, 1.0, 1.0, 0.5, 0.1]


def test_what_is_stale_counts_in_the_loop_as_the_paper_says(parts):
    """With two workers of 2 and 3 s each, the second's first update is one version behind."""
    f = parts.ring.Quadratic(4)
    workers = SimpleNamespace(n=2, duration_s=lambda i: 2.0 + i, noise=lambda i: np.zeros(4))
    gaps = {
        fresh: parts.ring.looped(f, parts.ring.Method(rate=0.5, fresh=fresh), workers, 3.5)
        for fresh in (1, 2)
    }
    x = f.first()
    once = x - 0.5 * (f.product(x) - f.b)
    assert gaps[1] == pytest.approx(f.gap(once))
    assert gaps[2] == pytest.approx(f.gap(once - 0.5 * (f.product(x) - f.b)))


def test_a_network_steps_as_autograd_says(parts):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 5)).astype(np.float32), rng.integers(3, size=12)
    model = parts.clothes.initial((5, 4, 6, 3), seed=1)
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in model.items()}
    some, rate, decay = np.array([1, 4, 7, 9]), 0.3, 0.01
    # The mask that the step will draw.
    kept = np.random.default_rng(5).random((4, 6)) >= 0.5
    units = torch.relu(torch.tensor(x[some]) @ weights["w0"] + weights["b0"])
    units = torch.relu(units @ weights["w1"] + weights["b1"]) * torch.tensor(kept) * 2.0
    logits = units @ weights["w2"] + weights["b2"]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y[some]))
    loss.backward()
    about = {"dropped": 0.5, "decay": decay, "rng": np.random.default_rng(5)}
    assert parts.clothes.train(model, x, y, [some], rate, **about) == pytest.approx(loss.item())
    for name, before in weights.items():
        grown = before.grad + (decay * before if name[0] == "w" else 0.0)
        after = (before - rate * grown).detach().numpy()
        np.testing.assert_allclose(model[name], after, atol=1e-6)


def test_choice_takes_the_largest_losses_of_those_drawn(parts):
    sizes, asked = np.array([5.0, 0.0, 5.0, 5.0, 5.0]), []

    def losses(clients):
        asked.append(clients)
        return np.array([float(client) for client in clients])

    nodes = Candidates.of([1000, 1001, 1002, 1003, 1004])
    rng = np.random.default_rng(0)
    for _ in range(20):
        chosen = parts.choice.Choice(3, sizes, losses).select(nodes, 2, 0.0, rng)
        assert [node - 1000 for node in chosen] == sorted(asked[-1])[::-1][:2]
        # One without images is never drawn.
        assert len(set(asked[-1]) - {1}) == 3
    drawn = parts.choice.Choice(2, sizes).select(nodes, 2, 0.0, rng)
    assert len(set(drawn)) == 2


def test_rounds_are_counted_to_the_accuracy_that_random_ends_with(parts):
    random, other = np.linspace(0.0, 0.5, 51), np.linspace(0.0, 1.0, 51)
    faster, lead = parts.choice.compared(random, other)
    window = parts.choice.WINDOW - 1
    assert faster == pytest.approx((50 + window) / (25 + window))
    assert lead == pytest.approx(0.5)
    assert parts.choice.compared(other, random) == (1.0, pytest.approx(-0.5))


@pytest.mark.slow
def test_power_of_choice_learns_and_repeats(parts, images):
    arms = (parts.choice.RANDOM, parts.choice.ASKED, parts.choice.STALE)
    curves = {arm: parts.choice.curve(arm, 2.0, 1, rounds=20) for arm in arms}
    assert all(len(curve) == 2 for curve in curves.values())
    assert len({curve.tobytes() for curve in curves.values()}) == 3
    again = parts.choice.curve(parts.choice.ASKED, 2.0, 1, rounds=20)
    assert again.tobytes() == curves[parts.choice.ASKED].tobytes()


def test_a_round_is_void_if_too_few_phones_make_it(parts):
    stage = parts.flash.Enough(0.8)
    for n_made, is_void in ((7, True), (8, False), (7, True)):
        for _ in range(10):
            stage.outgoing(None, None)
        if is_void:
            with pytest.raises(ProtocolError, match="7 phones made it, of 8 needed"):
                stage.step({}, [None] * n_made)
        else:
            assert stage.step({}, [None] * n_made) == {}


def test_figures_of_phones_are_of_all_their_jobs(parts, monkeypatch):
    monkeypatch.setattr(parts.flash, "N_PHONES", 10)
    jobs = pd.DataFrame(
        [
            *[("a", "reported", 30.0), ("b", "late", 20.0), ("c", "rejected", 10.0)],
            *[("d", "expired", 20.0), ("e", "in-flight", 900.0), ("a", "late", 20.0)],
        ],
        columns=["device_id", "status", "work"],
    )
    at_s = np.arange(20.0)
    aware = parts.flash.Run(at_s=10 * at_s, accuracy=np.linspace(0.0, 0.8, 20), jobs=jobs)
    unaware = parts.flash.Run(at_s=at_s, accuracy=np.linspace(0.0, 1.0, 20), jobs=jobs[:0])
    found = parts.flash.figures(aware, unaware)
    assert found["failed"] == 0.6
    # The three busiest of ten: 50 + 20 + 20 of 100.
    assert found["top"] == pytest.approx(0.9)
    assert found["accuracy"] == pytest.approx(0.2)
    # Their last tenth is the mean of two readings, which the other reaches at its 16th.
    assert found["time"] == pytest.approx(190.0 / 15.0)


def test_phones_pay_for_what_femnist_has_and_train_on_a_quarter(parts, images):
    paid, dealt = parts.flash.examples(1, 50), parts.flash.deal(1, 50)
    assert paid.max() <= parts.flash.MOST
    assert abs(paid.mean() - parts.flash.EXAMPLES) < 3 * parts.flash.SPREAD / 50**0.5
    np.testing.assert_allclose([len(mine) for mine in dealt], parts.flash.SHARE * paid, atol=0.5)


def test_unaware_phones_are_alike_and_always_there(parts):
    if not (RECORDINGS / "flash-days.json").is_file():
        pytest.skip("the recordings are not there")
    alike, real = (parts.flash.phones(RECORDINGS, 1, aware=aware, n=200) for aware in (False, True))
    everyone, noon = np.arange(200), np.full(200, 12 * 3600.0)
    assert alike.availability.is_available(everyone, noon).all()
    assert 0.0 < real.availability.is_available(everyone, noon).mean() < 0.3
    speeds = [traces.channel("compute").integral(everyone, 0.0, 1.0) for traces in (alike, real)]
    assert np.unique(speeds[0]).size == 1
    assert 2 <= np.unique(speeds[1]).size <= 3


def test_a_claim_is_reproduced_between_two_numbers(parts):
    row = parts.run.judged("paper", "claim", [0.1, 0.2, 0.3], (0.2, 0.4))
    assert row["is_reproduced"]
    assert row["ours"] == pytest.approx(0.2)
    assert row["interval"][1] < 0.2 < row["interval"][2]
    for accepted in ((0.21, 0.4), (0.0, 0.19)):
        assert not parts.run.judged("paper", "claim", [0.1, 0.2, 0.3], accepted)["is_reproduced"]
    assert parts.run.judged("paper", "claim", [0.1], (0.0, 1.0))["interval"] is None
