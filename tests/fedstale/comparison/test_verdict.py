"""What is said of a variant against the reference, of statistics that are made by hand."""

import pytest

from fedstale.comparison.statistics import Reached, difference, estimate, pairs_needed, speed_up
from fedstale.comparison.verdict import verdict

EVEN = [1.0, 1.1, 0.9, 1.05, 0.95]


def took(times, *, never=()):
    """Return when runs reached the target, with ten devices at work all the time."""
    return {
        seed: Reached(at_s=at_s, ever=seed not in never, device_s=10 * at_s)
        for seed, at_s in enumerate(times)
    }


def said(own=None, reference=None, *, target="accuracy 0.5", n=None, **ends):
    """Return the verdict on B against A, of times to the target and of pairs of last values."""
    ratios = [own and speed_up(own, reference, what) for what in ("at_s", "device_s")]
    pairs = {
        name: difference(dict(enumerate(pair[0])), dict(enumerate(pair[1])))
        for name, pair in ends.items()
    }
    time, device_time = ratios
    most = max([len(own or ()), *(found.n for found in pairs.values())])
    return verdict(
        *("B", "A"),
        n=most if n is None else n,
        target=target,
        is_reached=own is not None,
        time=time,
        device_time=device_time,
        ends=pairs,
    )


def test_what_is_shown_comes_with_its_part_of_time_and_device_hours():
    found = said(took([50 * x for x in EVEN]), took([100, 100, 100, 100, 100]))
    assert found.startswith("B against A, in 5 pairs: it takes 0.50 (0.45 to 0.55) times the time")
    assert "0.50 (0.45 to 0.55) times the device-hours to reach accuracy 0.5" in found
    assert "not shown" not in found


@pytest.mark.parametrize(
    ("metric", "own", "kind"),
    [
        ("accuracy", 0.9, "better"),
        ("accuracy", 0.3, "worse"),
        ("loss", 0.3, "better"),
        ("loss", 0.9, "worse"),
        ("perplexity", 0.9, "worse"),
    ],
)
def test_a_variant_that_ends_better_or_worse_is_said_to(metric, own, kind):
    found = said(target=None, **{metric: ([own * x for x in EVEN], [0.6] * 5)})
    assert f"ends with the {kind} {metric}: " in found


@pytest.mark.parametrize(
    ("own_never", "reference_never", "says"),
    [
        ((), (0, 1), "takes at most 0.50"),
        ((0,), (), "not shown to differ"),
        ((0,), (1,), "not shown to differ"),
    ],
)
def test_a_bound_shows_only_what_it_bounds(own_never, reference_never, says):
    own = took([50 * x for x in EVEN], never=own_never)
    found = said(own, took([100] * 5, never=reference_never))
    assert says in found


def test_of_what_is_not_shown_the_least_number_of_pairs_is_told():
    noisy, base = [0.3, 0.9, 0.4, 0.8, 0.5], [0.4, 0.6, 0.5, 0.5, 0.4]
    worse = [0.51, 0.49, 0.5, 0.52, 0.48]
    found = said(target=None, accuracy=(noisy, base), loss=(worse, [0.5] * 5))
    needed = pairs_needed(estimate([a - b for a, b in zip(noisy, base, strict=True)]))
    assert found.startswith("B is not shown to differ from A in 5 pairs: accuracy +0.100 (")
    assert f"If the accuracy differs by as much, {needed} pairs show it" in found
    assert f"run {needed} seeds" in found
    assert needed > 5


def test_pairs_that_are_all_equal_are_said_to_be():
    for found in (said(target=None, accuracy=([0.5] * 3, [0.5] * 3)), said(took(EVEN), took(EVEN))):
        assert "Both are equal in every pair" in found


def test_two_pairs_show_nothing_and_are_told_by_their_values():
    found = said(target=None, accuracy=([0.9, 0.8], [0.2, 0.3]))
    assert "not shown" in found
    assert "+0.700, +0.500" in found
    assert "Run 5 seeds or more" in found


def test_a_target_that_no_run_reached_is_said():
    assert "No run of either reached accuracy 0.5" in said(accuracy=(EVEN, EVEN))


def test_a_target_that_all_begin_with_was_reached():
    found = said(took([0.0] * 3), took([0.0] * 3), accuracy=([0.9] * 3, [0.8] * 3))
    assert (
        found
        == "B against A, in 3 pairs: it ends with the better accuracy: +0.100 (+0.100 to +0.100)."
    )


def test_what_has_no_pair_or_no_metric_is_said():
    assert said(accuracy=([], [])) == "B and A have no seed in common that both finished."
    assert "measured nothing" in said(target=None, n=4)


def test_a_metric_that_is_not_a_number_asks_for_no_number_of_pairs():
    found = said(target=None, loss=([0.5, float("nan"), 0.4], [0.5] * 3))
    assert found.endswith("Run 5 seeds or more.")
