"""Every argument of every public part, given wrongly in Python and in text: one sentence each."""

from inspect import Parameter, signature
from math import inf, nan

import pytest

from fedstale import strategies
from fedstale.errors import ConfigError
from fedstale.strategies import expression, parse, schedule, selection, server_optimizer, weighting
from fedstale.strategies.types import shown

NEEDED = {
    "concurrency": 20,
    "buffer_size": 5,
    "curve": weighting.constant(),
    "optimizer": server_optimizer.SGD(),
    "then": selection.Random(),
    "selector": selection.Random(),
    "where": "gpu",
    "name": "region",
    "least": 0.5,
    "d": 3,
    "f": 1,
    "most": 9,
    "every": 50,
    "topology": "ring",
    "n_sites": 5,
    "rank": 2,
    "ratio": 0.25,
    "damping": 0.1,
    "clip_norm": 1.0,
    "noise_multiplier": 0.0,
    "delta": 1e-5,
    "utility": 1.0,
    "deadline_s": 60.0,
}
"""Values of arguments without a default."""

TEXTS = {"arrayrecord_key", "configrecord_key", "weighted_by_key", "checkpoints", "resume", "path"}
TEXTS |= {"topology", "folder", "loss_key", "square_loss_key", "where", "name"}
"""Arguments that a text is right for."""

PARTS = {
    name: made
    for name in expression.names()
    if callable(made := expression._named(expression._parsed(name)))
    and not isinstance(made, schedule.Schedule)
}


def wrong_values(name, parameter):
    """Return a value of another type, out of range, no number, a text, and a part of elsewhere."""
    accepts = str(parameter.annotation)
    part = weighting.Gap() if "Selector" in accepts else selection.Random()
    return [object(), -inf if name == "cost" else -1, nan, b"x" if name in TEXTS else "x", part]


def arguments(made):
    parameters = signature(made).parameters.values()
    return {p.name: p for p in parameters if p.kind is not Parameter.VAR_KEYWORD}


def needed(made):
    found = arguments(made)
    own = {"up": "int8"} if made is strategies.Compression else {}
    return own | {n: NEEDED[n] for n, p in found.items() if p.default is Parameter.empty}


@pytest.mark.parametrize("owner", PARTS)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_accepted(owner):
    made, rest = PARTS[owner], needed(PARTS[owner])
    made(**rest)
    for name, parameter in arguments(made).items():
        for value in (*wrong_values(name, parameter), weighting.Gap):
            with pytest.raises(ConfigError) as caught:
                made(**rest | {name: value})
            sentence = str(caught.value)
            assert sentence.startswith(f"strategy.{owner}.{name} = {shown(value)}: expected ")
            assert "\n" not in sentence
            assert len(sentence) < 400


@pytest.mark.parametrize("owner", sorted(PARTS))
def test_a_wrong_argument_in_a_text_is_named_likewise(owner):
    rest = {name: repr(value) for name, value in needed(PARTS[owner]).items()}
    is_whole = isinstance(PARTS[owner], type) and issubclass(PARTS[owner], strategies.StaleStrategy)
    for name, parameter in arguments(PARTS[owner]).items():
        _, number, _, text, part = wrong_values(name, parameter)
        for value in (number, text, part):
            written = rest | {name: repr(value).replace("-inf", "-1e999")}
            call = f"{owner}({', '.join(f'{k}={v}' for k, v in written.items())})"
            with pytest.raises(ConfigError) as caught:
                parse(call if is_whole else f"FedAvg(selector={call})")
            assert f"strategy.{owner}.{name} = {shown(value)}: expected " in str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: strategies.FedBuff(10, 5, staleness=3), "FedBuff.staleness = 3: expected a curve"),
        (lambda: strategies.FedAvg(robust="median"), "FedAvg.robust = 'median': expected a rule"),
        (
            lambda: strategies.FedAvg(resume=3),
            "FedAvg.resume = 3: expected a text, a path, or None",
        ),
        (lambda: strategies.FedAvg(seed=True), "FedAvg.seed = True: expected an integer >= 0"),
        (lambda: strategies.FedAvg(seed=1.0), "FedAvg.seed = 1.0: expected an integer >= 0"),
        (lambda: strategies.FedAvg(stages="abc"), "FedAvg.stages = 'abc': expected instances"),
        (lambda: strategies.FedAsync(4, mix=inf), "FedAsync.mix = inf: expected a finite number"),
        (lambda: strategies.FedBuff(4, 2, staleness=lambda tau: 0.5), "exactly 1 at"),
        (lambda: strategies.Privacy(clip_norm=1, noise_multiplier=0, delta=1.0), "Privacy.delta"),
    ],
)
def test_what_is_wrong_in_one_way_of_many(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)


class Mine(selection.Selector):
    def __init__(self, how, much: float = 1.0, *, name: str = "x") -> None:
        self.how, self.much, self.name = how, much, name

    def select(self, candidates, k, now, rng):
        return []


class Own(strategies.FedBuff):
    def __init__(self, mine: int, **options) -> None:
        super().__init__(mine, 5, **options)


def test_classes_of_others_take_what_they_like_and_are_named_where_they_inherit():
    assert Mine(object(), "much", name=3).much == "much"
    assert Own(7).schedule.concurrency == 7
    with pytest.raises(ConfigError, match=r"Own\.concurrency = 'x': expected an integer >= 1"):
        Own("x")
    with pytest.raises(ConfigError, match=r"Own\.seed = 'x'"):
        Own(7, seed="x")
