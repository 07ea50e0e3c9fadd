"""Strategies as text: what is read, what is refused, and in which words."""

from inspect import isroutine
from pathlib import Path

import pytest
from flwr.serverapp import strategy as flower
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale import agents, strategies
from fedstale.errors import ConfigError
from fedstale.strategies import (
    Checkpoints,
    FedBuff,
    expression,
    parse,
    robust,
    schedule,
    selection,
    server_optimizer,
    stages,
    weighting,
)
from fedstale.strategies.expression import names, with_arguments, with_whole_paths


def offered(module, *bases):
    """Return the names of a module's public classes that are of a kind, without the kind itself."""
    return {
        name
        for name in getattr(module, "__all__", vars(module))
        if isinstance(found := getattr(module, name), type)
        and not name.startswith("_")
        and issubclass(found, bases)
        and found not in bases
    }


def test_every_part_of_every_room_has_a_name():
    parts = (
        offered(strategies, strategies.StaleStrategy)
        | offered(selection, selection.Selector)
        | offered(weighting, weighting.Weighting)
        | offered(robust, robust.Rule)
        | offered(server_optimizer, server_optimizer.ServerOptimizer)
        | offered(stages, stages.Stage)
        | {name for name in weighting.__all__ if isroutine(getattr(weighting, name))}
        | {
            name
            for name, f in vars(schedule).items()
            if isroutine(f) and f.__module__ == schedule.__name__
        }
    )
    assert parts | {"AgentSelector"} <= set(names())
    assert len(offered(strategies, strategies.StaleStrategy)) == 16


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("FedBuff(20, 5)", FedBuff(20, 5)),
        (" FedBuff(20,\n 5)", FedBuff(20, 5)),
        (
            "GapAware(20, 5, of='layer', eta=0.5, min_evaluate_nodes=3)",
            strategies.GapAware(20, 5, of="layer", eta=0.5, min_evaluate_nodes=3),
        ),
        (
            "FedBuff(20, 5, weighting=ByAge(weighting.polynomial(0.3)), selector=Oort(RELEASED))",
            FedBuff(
                20,
                5,
                weighting=weighting.ByAge(weighting.polynomial(0.3)),
                selector=selection.Oort(selection.RELEASED),
            ),
        ),
        (
            "FedAvg(schedule=Schedule(concurrency=3, deadline_s=inf), "
            "stages=[ForecastRequest(job={'work': 1.5})])",
            strategies.FedAvg(
                schedule=schedule.Schedule(concurrency=3),
                stages=[strategies.ForecastRequest(job={"work": 1.5})],
            ),
        ),
        (
            "FedBuff(20, 5, stages=[Compression('int8', down=None), LocalWork(0.5)])",
            FedBuff(20, 5, stages=[strategies.Compression("int8"), strategies.LocalWork(0.5)]),
        ),
        (
            "FedBuff(20, 5, selector=AgentSelector())",
            FedBuff(20, 5, selector=agents.AgentSelector()),
        ),
    ],
)
def test_a_text_describes_what_the_same_call_makes(text, same):
    assert repr(parse(text)) == repr(same)


def test_paths_that_exist_become_whole(tmp_path, monkeypatch):
    (tmp_path / "agents").mkdir()
    monkeypatch.chdir(tmp_path)
    inner = "stages=[AuditRecord('agents')], selector=Enough(AgentSelector('agents'))"
    text = with_whole_paths(f"FedBuff(20, 5, {inner}, resume='nowhere', normalise='weights')")
    whole = str(tmp_path / "agents")
    assert text.count(repr(whole)) == 2
    assert "resume='nowhere', normalise='weights'" in text
    assert with_whole_paths(text) == text


@pytest.mark.parametrize("text", ["FedBuff(20,5)", "FedAvg", "Nonsense('agents')", "a b", ""])
def test_a_text_without_paths_stays_as_it_is(text):
    assert with_whole_paths(text) == text


def test_a_selector_that_is_none_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match=r"selector = 'agents/mine': expected .*AgentSelector"):
        parse("FedBuff(20, 5, selector='agents/mine')")


def test_a_strategy_of_flowers_is_made_and_takes_no_seed():
    made = parse(
        "flower.FedProx(fraction_train=0.5, proximal_mu=0.2)", seed=1, checkpoints=Checkpoints()
    )
    assert type(made) is flower.FedProx
    assert (made.fraction_train, made.proximal_mu) == (0.5, 0.2)


def test_settings_beside_the_text_reach_the_strategy():
    made = parse("FedBuff(20, 5)", seed=7, resume="x", selector=None)
    assert (made.seed, made.resume) == (7, Path("x"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "strategy = '': expected a strategy such as 'FedBuff(20, 5)'"),
        ("FedBuff", "strategy = 'FedBuff': expected a strategy such as"),
        ("fedbuff(20)", "'fedbuff' is unknown: expected 'FedBuff'"),
        ("FedBuff(", "expected a strategy such as"),
        ("FedBuff(20); 1", "expected a strategy such as"),
        ("(" * 500, "expected a strategy such as"),
        ("FedBuff()", "FedBuff: missing a required argument: 'concurrency'"),
        (
            "FedBuff(20, bufer_size=3)",
            "FedBuff has no setting 'bufer_size': expected 'buffer_size'",
        ),
        ("FedBuff(0)", "strategy.FedBuff.concurrency = 0: expected an integer >= 1"),
        ("FedBuff('many')", "strategy.FedBuff.concurrency = 'many': expected an integer >= 1"),
        ("FedBuff(20, 5, seed=2)", "seed is set outside of the text already"),
        ("FedBuff(20, 5, 1, 2)", "FedBuff: too many positional arguments"),
        ("Gap()", "Gap is no strategy: expected a strategy such as"),
        ("FedBuff(20, weighting=Gap)", "Gap: expected Gap(...)"),
        ("FedBuff(20, selector=Oort(PAPER()))", "PAPER() is a value: expected PAPER"),
        ("FedBuff(20, weighting=Gap(off=1))", "Gap has no setting 'off': expected 'of'"),
        ("FedBuff(20, weighting=weighting.Krum())", "'Krum' is unknown"),
        ("FedBuff(20, weighting=seed)", "'seed' is unknown"),
        ("FedBuff(20, **{})", "FedBuff: expected arguments by name, not **"),
        ("FedBuff(*[20])", "'*[20]': expected a literal or a part"),
        ("FedBuff(10 + 10)", "'10 + 10': expected a literal or a part"),
        ("FedBuff(20, until=lambda p: True)", "expected a literal or a part"),
        ("FedBuff(20, stages={**{}})", "expected a literal or a part"),
        ("flower.FedAvgg()", "'FedAvgg' is unknown: expected 'FedAvg'"),
        ("flower.FedAvg(fraction=1)", "flower.FedAvg has no setting 'fraction'"),
        ("__import__('os').system('true')", "expected a name such as FedBuff"),
        ("().__class__()", "expected a name such as FedBuff"),
        ("FedBuff(20, stages=FedBuff.__globals__)", "expected a name such as FedBuff"),
    ],
)
def test_what_describes_no_strategy_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        parse(text, seed=1)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flowers_strategies_have_no_checkpoints():
    with pytest.raises(ConfigError, match=r"flower\.FedAvg has no resume"):
        parse("flower.FedAvg()", seed=1, resume="x")


def test_another_package_adds_names_and_shadows_none(monkeypatch):
    def missing():
        raise ModuleNotFoundError(name="torch")

    added = {"Mine": lambda: Mine, "FedBuff": lambda: Mine, "Learned": missing}
    monkeypatch.setattr(expression, "_added", lambda: added)
    assert type(parse("Mine(20, 5)")) is Mine
    assert type(parse("FedBuff(20, selector=Random())")) is FedBuff
    with pytest.raises(ConfigError, match="'Mines' is unknown: expected 'Mine'"):
        parse("Mines(20)")
    with pytest.raises(ConfigError, match="Learned needs torch, which is not installed: pip inst"):
        parse("FedBuff(20, selector=Learned())")


class Mine(FedBuff):
    """A method of another package."""


def test_a_rule_counts_each_node_once_whatever_the_schedule():
    made = parse("FedBuff(20, 5, robust=Krum(f=1))")
    assert made.schedule.distinct


@pytest.mark.parametrize(
    ("text", "arguments", "found"),
    [
        ("FedBuff(20, 5)", {}, "FedBuff(concurrency=20, buffer_size=5)"),
        ("FedBuff(20)", {"eta": 0.1}, "FedBuff(concurrency=20, eta=0.1)"),
        ("FedBuff(20, eta=1)", {"eta": 0.1}, "FedBuff(concurrency=20, eta=0.1)"),
        (
            "FedBuff(20, weighting=Gap())",
            {"weighting": "ByAge(hinge())", "normalise": "'weights'"},
            "FedBuff(concurrency=20, weighting=ByAge(hinge()), normalise='weights')",
        ),
        ("flower.FedAvg()", {"fraction_train": 0.5}, "flower.FedAvg(fraction_train=0.5)"),
    ],
)
def test_arguments_are_set_by_name_and_all_else_stays(text, arguments, found):
    assert with_arguments(text, arguments) == found
    assert repr(parse(found)) != repr(parse("FedAvg()"))


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        ("FedBuff(20)", {"etas": 1}, "FedBuff has no setting 'etas': expected 'eta'"),
        ("FedBuff(20)", {"weighting": "Gap("}, "expected a strategy such as"),
        ("FedBuf(20)", {"eta": 1}, "'FedBuf' is unknown: expected 'FedBuff'"),
        ("fedbuff", {"eta": 1}, "expected a strategy such as"),
        ("inf(3)", {"eta": 1}, "expected a strategy such as"),
        ("FedBuff(20, 5, 1, 2)", {"eta": 1}, "FedBuff: too many positional arguments"),
        ("FedBuff(20, **{})", {"eta": 1}, "FedBuff: expected arguments by name, not **"),
    ],
)
def test_arguments_that_a_strategy_has_not_are_one_sentence(text, arguments, sentence):
    with pytest.raises(ConfigError) as refused:
        with_arguments(text, arguments)
    assert sentence in str(refused.value)


def test_flower_does_not_warn_of_what_the_text_itself_says(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        parse("flower.FedAvg(fraction_evaluate=0.0)")
        assert not caplog.records
        flower.FedAvg(fraction_evaluate=0.0)
        assert "fraction_evaluate is set to 0.0" in caplog.text


HOSTILE = {
    "brackets": "FedBuff(20, 5, stages=" + "[" * 400 + "]" * 400 + ")",
    "brackets without end": "(" * 9000,
    "calls in calls": "FedBuff(20, 5, selector=" + "Enough(" * 120 + "Oort()" + ")" * 120 + ")",
    "signs": "FedBuff(" + "-" * 9000 + "1, 5)",
    "sums": "FedBuff(" + "1+" * 4000 + "1, 5)",
    "attributes": "FedBuff(20, 5, selector=Oort" + ".a" * 3000 + ")",
    "subscripts": "FedBuff(20, 5, selector=Oort" + "[0]" * 2000 + ")",
    "powers": "FedBuff(9**9**9, 5)",
    "shifts": "FedBuff(1 << 10**9, 5)",
    "repeats": "FedBuff('a' * 10**9, 5)",
    "digits": "FedBuff(" + "9" * 4500 + ", 5)",
    "hexadecimal digits": "FedBuff(0x" + "f" * 9000 + ", 5)",
    "a large number": "FedBuff(20, 5, seed=" + "9" * 4000 + ")",
    "an imaginary number": "FedBuff(20j, 5)",
    "a long text": "FedBuff(20, 5, resume='" + "a" * 10**6 + "')",
    "a long name": "FedBuff(20, 5, selector=" + "a" * 9000 + ")",
    "a long argument": "FedBuff(20, 5, " + "a" * 9000 + "=1)",
    "a comprehension": "FedBuff(20, 5, stages=[x for x in ()])",
    "a format": "FedBuff(20, 5, resume=f'{().__class__}')",
    "an assignment": "FedBuff((x := 20), 5)",
    "a function": "FedBuff(20, 5, eta=lambda step: 1.0)",
    "a condition": "FedBuff(20 if True else 1, 5)",
    "a generator": "FedBuff(*(i for i in range(9)))",
    "a class's inside": "FedBuff.__init__.__globals__",
    "a module's inside": "methods.__builtins__('x')",
    "letters like others": "FedBu\ufb00(2\u0660, 5\uff09",
    "half a letter": "FedBuff(20, '\ud800')",
    "no letter": "FedBuff(20, 5\0)",
    "a million digits": "FedBuff(0x" + "f" * 10**6 + ", 5)",
    "a text for a number": "FedBuff(20, 5, validation=Validation(norm_cap='x'))",
    "no rest": "FedBuff(20, 5, validation=Validation(rest_s=-inf))",
    "another order": "FedBuff(20, 5)\u202e",
    "an abstract class": "flower.Strategy()",
    "what Flower refuses": "flower.FedTrimmedAvg(beta={})",
    "a wrong argument of Flower's": "flower.FedAvg(fraction=1)",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_one_short_sentence(text):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


WHOLE = [
    "FedBuff(20, 5, selector=Oort(), stages=[Compression('int8')])",
    "GapAware(20, 5, of='layer', seed=3)",
    "FedAvg(10, robust=Krum(f=1), validation=Validation(norm_cap=2.0))",
    "flower.FedAvg(fraction_train=0.5)",
]
LETTERS = st.text(
    st.sampled_from("FedBuff(20, 5)[]{}'\"=.*+-:;@_\\\n\t0x1e9jinfGap") | st.characters()
)
PIECES = [
    *names()[::4],
    "FedBuff(20, 5)",
    "flower.",
    "=",
    "(",
    ")",
    "[",
    "]",
    "9" * 40,
    "**",
    "'",
    ",",
]


@st.composite
def mutated(draw):
    """Draw a text that was a strategy's, with some places taken out, repeated or exchanged."""
    text = draw(st.sampled_from([*HOSTILE.values(), *WHOLE]))[:2000]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(start + draw(st.integers(0, 12)), len(text))
        piece = draw(LETTERS | st.sampled_from(PIECES))
        text = text[:start] + piece * draw(st.integers(0, 3)) + text[end:]
    return text


@settings(max_examples=150, deadline=2000)
@given(LETTERS | mutated())
def test_any_text_is_a_strategy_or_one_short_sentence(text):
    for read in (parse, with_whole_paths, lambda text: with_arguments(text, {"eta": text})):
        said = ""
        try:
            read(text)
        except ConfigError as refused:
            said = str(refused)
        assert len(said) < 1000
        assert said.isprintable()
