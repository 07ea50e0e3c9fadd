"""Records of runs: what is changed in one is found, and picks are made again."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_record import chained, changed, lines_of, run, written
from shared_fleets import synthetic

import fedstale
from fedstale.agents import AgentPace, AgentSelector
from fedstale.contrib.audit import AuditRecord, Credits, Probing, verify
from fedstale.contrib.audit.record import FORMAT, RECORD
from fedstale.contrib.selectors import Filtered, Quota, TiFL
from fedstale.errors import ConfigError
from fedstale.strategies import FedAvg, FedBuff
from fedstale.strategies.pace import AdaSync, Pace, Ramp
from fedstale.strategies.selection import (
    BALANCED,
    Enough,
    ExpectedUtility,
    Exponents,
    Fastest,
    LeastAvailable,
    LeastRecent,
    Likely,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)

pytestmark = pytest.mark.usefixtures("no_pages")

SHIPPED = [
    Random(),
    Fastest(),
    Fastest(200.0),
    PowerOfChoice(12),
    MostReliable(),
    ExpectedUtility(),
    LeastAvailable(),
    Probing(ExpectedUtility(), 0.3),
    Probing(Probing(Oort(), 0.1), 0.2),
    Credits(5.0, 1.0),
    ExpectedUtility(BALANCED),
    ExpectedUtility(Exponents(picked=0.5, staleness=1.0)),
    TiFL(3, interval=2),
    Quota("region", 4, Oort()),
    Likely(0.6, LeastRecent()),
    LeastRecent(),
    Enough(Random(), 0.8),
    Oort(),
    AgentSelector(),
    AgentSelector(fairness=0.3),
]


class Sometimes(Selector):
    """A selector of a user."""

    def __init__(self, every):
        self.every = every

    def select(self, candidates, k, now, rng):
        return [int(node) for node in candidates.node_ids[:: self.every][:k]]


class Writes(Selector):
    """A selector that no record may make."""

    made = 0

    def __init__(self):
        Writes.made += 1

    def select(self, candidates, k, now, rng):
        return []


@pytest.fixture(scope="module")
def of_user(tmp_path_factory):
    """Return a run with a selector of a user."""
    return run(tmp_path_factory.mktemp("user") / "run", Sometimes(2))


@pytest.mark.parametrize("selector", SHIPPED, ids=repr)
def test_each_pick_of_each_selector_is_made_again(selector, tmp_path):
    found = run(tmp_path / "run", selector, until="25 rounds")
    checked = verify(found)
    assert (checked.faults, checked.why_not, checked.notes) == ((), "", ())
    assert checked.holds
    assert checked.repeated == checked.picks > 20
    assert found.summary["record"] == {"lines": checked.lines, "head": checked.head}


@pytest.mark.parametrize("pace", [Ramp(5), AdaSync(), AgentPace(4.0)], ids=repr)
def test_each_pick_is_made_again_whatever_pace_says_how_many(pace, tmp_path):
    strategy = FedBuff(8, 2, selector=Oort(), pace=pace, stages=[AuditRecord()], seed=3)
    checked = verify(run(tmp_path / "run", strategy=strategy, until="25 rounds"))
    assert (checked.holds, checked.why_not) == (True, "")
    assert checked.repeated == checked.picks > 20


class InTurn(Selector, Pace):
    """Picks by how often its numbers have been asked for."""

    def __init__(self):
        self.n_asked = 0

    def numbers(self, at):
        self.n_asked += 1
        return at.concurrency, at.buffer_size

    def select(self, candidates, k, now, rng):
        return [int(node) for node in np.roll(candidates.node_ids, self.n_asked)[:k]]


def test_a_selector_that_is_the_pace_too_is_not_accused(tmp_path):
    asked, beside = (
        run(
            tmp_path / name,
            strategy=FedBuff(8, 2, selector=InTurn(), pace=pace, stages=[AuditRecord()], seed=3),
            until="9 rounds",
        )
        for name, pace in (("asked", None), ("beside", Ramp(5)))
    )
    checked = verify(asked, selectors=[InTurn])
    assert (checked.faults, checked.repeated) == ((), 0)
    assert "is the pace too" in checked.why_not
    # Beside a pace nothing but its picks is asked of it.
    checked = verify(beside, selectors=[InTurn])
    assert (checked.holds, checked.why_not) == (True, "")
    assert checked.repeated == checked.picks > 0


def test_every_shipped_selector_is_among_them():
    def below(kind):
        return {kind, *(one for sub in kind.__subclasses__() for one in below(sub))}

    own = {kind for kind in below(Selector) if kind.__module__.startswith("fedstale.")}
    # Devices of these runs are not asked before their first job; see the tests of properties.
    assert own - {Selector, Filtered} == {type(one) for one in SHIPPED}


def test_a_synchronous_run_with_evaluations_is_made_again(tmp_path):
    strategy = FedAvg(stages=[AuditRecord()], fraction_evaluate=0.5, seed=4, selector=Oort())
    found = run(tmp_path / "run", strategy=strategy, until="12 rounds")
    checked = verify(found)
    assert checked.holds, checked.faults
    assert checked.repeated == checked.picks >= 12
    kinds = [json.loads(line)["kind"] for line in lines_of(found.folder / RECORD)]
    assert {"evaluate", "heard", "stated", "pick", "sent", "ended"} < {*kinds}


def test_the_same_settings_write_the_same_bytes(recorded, tmp_path):
    again = run(tmp_path / "run", Probing(ExpectedUtility(), 0.2))
    first = (recorded.folder / RECORD).read_bytes()
    assert (again.folder / RECORD).read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_a_record_changes_nothing_else(recorded, tmp_path):
    selector = Probing(ExpectedUtility(), 0.2)
    without = run(
        tmp_path / "run",
        strategy=FedBuff(8, 2, selector=selector, fraction_evaluate=0.1, seed=3),
    )
    for name in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert (without.folder / name).read_bytes() == (recorded.folder / name).read_bytes()
    assert not (without.folder / RECORD).exists()
    assert "record" not in without.summary


# What is changed without the chain: each is found, and its line named.


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda x: [*x[:9], changed(x[9], before="a" * 64), *x[10:]], "line 10 was altered"),
        (lambda x: x[:5] + x[6:], "line 6 is missing before line 7"),
        (lambda x: x[:5] + x[9:], "lines 6 to 9 are missing before line 10"),
        (lambda x: x[1:], "line 1 is missing before line 2"),
        (
            lambda x: [*x[:5], x[6], x[5], *x[7:]],
            "line 7 stands after line 5: lines were swapped\n"
            "line 6 stands after line 7: lines were swapped",
        ),
        (
            lambda x: [*x[:6], x[5], *x[6:]],
            "line 6 occurs twice: a line was inserted or copied",
        ),
    ],
)
def test_lines_that_were_moved_are_named(edit, fault, recorded, tmp_path):
    lines = edit(lines_of(recorded.folder / RECORD))
    checked = verify(written(tmp_path / "r", lines))
    assert checked.faults[0] == fault.splitlines()[0]
    assert {*fault.splitlines()} <= {*checked.faults}


def test_lines_cut_at_the_end_are_found_by_the_last_line_the_summary_and_the_head(
    recorded, tmp_path
):
    lines = lines_of(recorded.folder / RECORD)
    head = verify(recorded).head
    cut = written(tmp_path / "r", lines[:-5])
    (fault,) = verify(cut).faults
    assert fault.startswith(f"line {len(lines) - 5} is the last one and not the end of a run")
    (fault,) = verify(cut, head=head).faults
    assert fault.startswith(f"no line has the hash {head}")
    # Whoever cuts may write an end: then the head alone tells, and that of the summary.
    ended = chained([*lines[:-5], lines[-1]])
    assert verify(written(cut, ended)).holds
    assert not verify(cut, head=head).holds
    summary = {"record": {"lines": len(lines), "head": head}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (fault,) = verify(written(tmp_path / RECORD, ended)).faults
    assert fault.startswith("summary.json states the head")


def test_a_file_cut_in_the_midst_of_a_line_is_named(recorded, tmp_path):
    (tmp_path / "r").write_bytes((recorded.folder / RECORD).read_bytes()[:-20])
    n = len(lines_of(recorded.folder / RECORD))
    (fault,) = verify(tmp_path / "r").faults
    assert fault.startswith(f"line {n} cannot be read: it has no end")


def test_an_earlier_head_says_nothing_of_what_follows(recorded):
    (first,) = [json.loads(line)["before"] for line in lines_of(recorded.folder / RECORD)[10:11]]
    checked = verify(recorded, head=first)
    assert checked.holds
    assert checked.notes[0].startswith("the head is that of line 10: it says nothing of the ")


# What is changed along with the whole chain: making picks again finds what no hash can.


def place(lines, kind, i=10, **has):
    """Return the place of a line of a kind, among those that have some fields."""
    found = [
        j
        for j, line in enumerate(lines)
        if (facts := json.loads(line))["kind"] == kind and facts.keys() >= {*has.values()}
    ]
    return found[min(i, len(found) - 1)]


NODES = ("picks", "joined", "left", "nodes", "unsent")


def another_pick(facts):
    candidates = {1001 + i for i in range(60)} - {*facts["picks"]}
    return {"picks": [min(candidates), *facts["picks"][1:]]}


REWRITTEN = [
    ("pick", another_pick, "picks "),
    ("pick", lambda f: {"k": f["k"] + 1}, "picks "),
    ("pick", lambda f: {"candidates": f["candidates"] + 1}, "candidates, and"),
    ("pick", lambda f: {"in_flight": f["in_flight"] + 1}, "jobs in flight, and"),
    ("pick", lambda f: {"rng": ["1f", *f["rng"][1:]]}, "the state of the generator"),
    ("sent", lambda f: {"nodes": [7, *f["nodes"][1:]]}, "jobs go to [7"),
    ("sent", lambda f: {"job": 10**6}, "is not in flight"),
    ("ended", lambda f: {"node": f["node"] + 1}, "is not in flight"),
    ("ended", lambda f: {"job": f["job"] + 10**5}, "is not in flight"),
    ("start", lambda f: {"seed": 4}, "the state of the generator"),
    ("start", lambda f: {"selector": {"class": "Random", "settings": {}}}, "picks "),
    ("evaluate", lambda f: {"k": f["k"] + 1}, "the state of the generator"),
]


@pytest.mark.parametrize(("kind", "change", "words"), REWRITTEN)
def test_a_rewritten_chain_is_found_by_its_picks(kind, change, words, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    i = place(lines, kind)
    lines[i] = changed(lines[i], **change(json.loads(lines[i])))
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert not checked.holds
    first = checked.faults[0]
    assert words in first
    assert int(first.split()[1].rstrip(":")) >= i + 1
    if kind == "pick":
        assert first.startswith(f"line {i + 1}: ")


@pytest.mark.parametrize("field", ["loss", "square_loss", "examples", "p_finish"])
def test_what_selectors_use_is_found_where_it_matters_to_a_pick(field, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    for i, line in enumerate(lines):
        facts = json.loads(line)
        if field in facts:
            lines[i] = changed(line, **{field: 1.0 + facts["job"] * 7 % 5})
        elif field in facts.get("forecast", {}):
            lines[i] = changed(line, forecast={"p_finish": (i * 7 % 5) / 5})
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert "when made again" in checked.faults[0]


def test_renumbered_nodes_are_found_by_the_log_of_jobs(tmp_path):
    found = run(tmp_path / "run", Random(), until="10 rounds")
    path = found.folder / RECORD
    summary = json.loads((found.folder / "summary.json").read_text())
    del summary["record"]
    (found.folder / "summary.json").write_text(json.dumps(summary))
    lines = lines_of(path)
    for i, line in enumerate(lines):
        facts = json.loads(line)
        many = {name: [n + 1000 for n in facts[name]] for name in NODES if name in facts}
        one = {"node": facts["node"] + 1000} if "node" in facts else {}
        lines[i] = changed(line, **many, **one)
    written(path, chained(lines))
    (fault,) = verify(found).faults
    assert fault.startswith("training job 1 went to node 20")
    assert "nodes were renumbered, or it is the record of another run" in fault
    # By itself it is a record like any other.
    assert verify(written(tmp_path / "alone", lines_of(path))).holds


# What is no record.


def test_a_run_without_a_record_is_refused_in_a_sentence(tmp_path):
    strategy = FedBuff(8, 2, seed=3)
    found = run(tmp_path / "run", strategy=strategy, until="2 rounds")
    with pytest.raises(ConfigError, match=r"has no record\.jsonl: expected a run of a strategy"):
        verify(found)


def test_a_newer_format_is_named(recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    lines[0] = changed(lines[0], format=FORMAT + 1, more="than this release knows")
    (fault,) = verify(written(tmp_path / "r", chained(lines))).faults
    assert fault == (
        f"line 1: format = {FORMAT + 1}: this release reads {FORMAT}; verify with a later fedstale"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json", "it is no line of JSON"),
        (b"\xff\xfe", "it is no text"),
        (b"[1]", "expected an object of JSON"),
        (b'{"n": true}', "n: expected the number of the line"),
        (b'{"n":2,"before":"00"}', "before: expected the SHA-256"),
        (b'{"n":2,"now":NaN}', "NaN is no number of JSON"),
        (b'{"n":2,"n":2}', "a name occurs twice in it"),
        (b"[" * 100_000, "it is no line of JSON"),
        (b'{"n":' + b"9" * 5000 + b"}", "it is no line of JSON"),
    ],
)
def test_an_unreadable_line_is_named(line, words, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    (fault,) = verify(written(tmp_path / "r", [lines[0], line, *lines[2:]])).faults
    assert fault.startswith("line 2 cannot be read: ")
    assert words in fault


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        ("heard", {"forecast": {"p_finish": "inf"}}, "numbers, or lists of numbers"),
        ("heard", {"forecast": {"p_finish": None}}, "numbers, or lists of numbers"),
        ("heard", {"node": -1}, "the id of a node"),
        ("stated", {"properties": {"region": None}}, "texts and numbers by name"),
        ("stated", {"properties": ["eu"]}, "texts and numbers by name"),
        ("heard", {"now": "noon"}, "a finite instant in s"),
        ("pick", {"now": 10**400}, "a finite instant in s"),
        ("pick", {"k": 0}, "an integer >= 1"),
        ("pick", {"picks": [1001, 1001]}, "distinct ids of nodes"),
        ("pick", {"joined": [True]}, "distinct ids of nodes"),
        ("pick", {"left": [5]}, "left has a node that was no candidate"),
        ("pick", {"rng": ["zz", "1", 0, 0]}, "a generator's state"),
        ("pick", {"rng": None}, "rng is missing"),
        ("pick", {"colour": "red"}, "colour: no such field"),
        ("evaluate", {"online": 10**12}, "and <= 10,000,000"),
        ("ended", {"how": "lost"}, "one of accepted, rejected"),
        ("ended", {"staleness": 1.5}, "an integer >= 0"),
        ("ended", {"kind": "exec"}, "expected one of start"),
    ],
)
def test_values_that_cannot_be_are_named(kind, facts, words, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    i = place(lines, kind, 3, **({"has": "staleness"} if "staleness" in facts else {}))
    lines[i] = changed(lines[i], **facts)
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert checked.faults[-1].startswith(f"line {i + 1}: ")
    assert words in checked.faults[-1]


def test_a_chance_outside_0_to_1_is_what_a_device_may_state(recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    i = place(lines, "heard", 10**6)
    lines[i] = changed(lines[i], forecast={"p_finish": 1.7})
    checked = verify(written(tmp_path / "r", chained(lines)))
    node = json.loads(lines[i])["node"]
    note = f"node {node} states p_finish = 1.7, and the server takes it as 1"
    assert f"line {i + 1}: {note}" in checked.notes


# Selectors.


def test_a_selector_of_a_user_needs_its_class(of_user):
    checked = verify(of_user)
    assert checked.holds
    assert (checked.repeated, checked.picks > 10) == (0, True)
    assert "Sometimes', which is not of fedstale: pass its class" in checked.why_not
    checked = verify(of_user, selectors=[Sometimes])
    assert checked.holds
    assert (checked.repeated, checked.why_not) == (checked.picks, "")


def test_a_function_as_a_setting_cannot_be_made_again(tmp_path):
    selector = Credits(lambda nodes: nodes.times_picked + 1.0)
    checked = verify(run(tmp_path / "run", selector, until="5 rounds"))
    assert checked.holds
    assert checked.repeated == 0
    assert "Credits has a setting 'utility' (function) that no other process" in checked.why_not


def test_picks_of_a_selector_that_is_not_made_again_are_still_candidates(of_user, tmp_path):
    lines = lines_of(of_user.folder / RECORD)
    i = place(lines, "pick")
    lines[i] = changed(lines[i], picks=[77])
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert checked.faults[0].startswith(f"line {i + 1}: picks [77], which are not at most")


def test_a_pick_of_a_node_that_has_a_job_is_named(of_user, tmp_path):
    lines = lines_of(of_user.folder / RECORD)
    first, second = [i for i, line in enumerate(lines) if b'"kind":"pick"' in line][:2]
    facts = json.loads(lines[second])
    busy = next(node for node in json.loads(lines[first])["picks"] if node in facts["left"])
    left = [node for node in facts["left"] if node != busy]
    picks = [busy, *facts["picks"][1:]]
    lines[second] = changed(
        lines[second], left=left, picks=picks, candidates=facts["candidates"] + 1
    )
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert f"line {second + 1}: picks [{busy}], which have a job in flight" in checked.faults


def test_another_agent_is_not_taken_for_the_one_of_the_run(tmp_path):
    found = run(tmp_path / "run", AgentSelector(), until="5 rounds")
    lines = lines_of(found.folder / RECORD)
    selector = json.loads(lines[0])["selector"] | {"weights": "ab" * 32}
    lines[0] = changed(lines[0], selector=selector)
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert checked.holds
    assert "pass its folder by --agent" in checked.why_not
    embedded = Path(fedstale.agents.policy.scorer.__file__).parent
    assert verify(found, agent=embedded).repeated > 0
    checked = verify(found, agent=tmp_path)
    assert "the agent cannot be read" in checked.why_not


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ({}, "expected a class and its settings"),
        ({"class": "Random", "settings": {"seed": 1}}, "Random has no setting 'seed'"),
        ({"class": "Fastest", "settings": {"deadline_s": -1}}, "Fastest cannot be made"),
        ({"class": "PowerOfChoice", "settings": {"d": [1]}}, "expected a number"),
        ({"class": "OortSettings", "settings": {}}, "expected a selector"),
        (
            {
                "class": "Oort",
                "settings": {
                    "settings": {"class": "OortSettings", "settings": {"pacer_window": 10**30}}
                },
            },
            "Oort cannot be made",
        ),
        ({"class": "Probing", "settings": {"selector": 3}}, "Probing cannot be made"),
    ],
)
def test_a_selector_that_cannot_be_is_named(selector, words, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    lines[0] = changed(lines[0], selector=selector)
    (fault,) = verify(written(tmp_path / "r", chained(lines))).faults
    assert words in fault


@pytest.mark.parametrize("name", ["os.system", "test_verify.Writes", "builtins.exec", "Selector"])
def test_a_record_imports_and_makes_nothing_that_was_not_passed(name, recorded, tmp_path):
    lines = lines_of(recorded.folder / RECORD)
    lines[0] = changed(lines[0], selector={"class": name, "settings": {}})
    checked = verify(written(tmp_path / "r", chained(lines)))
    assert "which is not of fedstale" in checked.why_not
    assert Writes.made == 0


def test_a_long_chain_of_selectors_is_refused(recorded, tmp_path):
    selector = {"class": "Random", "settings": {}}
    for _ in range(50):
        selector = {"class": "Probing", "settings": {"selector": selector, "share": 0.1}}
    lines = lines_of(recorded.folder / RECORD)
    lines[0] = changed(lines[0], selector=selector)
    (fault,) = verify(written(tmp_path / "r", chained(lines))).faults
    assert "expected a class and its settings" in fault


@pytest.mark.parametrize(
    "strategy",
    [
        "FedBuff(10, 5, selector=AgentSelector(), stages=[Compression('int4'), "
        "LocalWork(within_s=120), ForecastRequest(), AuditRecord()])",
        "FedAvg(fraction_train=0.5, selector=Oort(), stages=[Compression('int4'), LocalWork(0.5), "
        "ForecastRequest(), AuditRecord()])",
        "GapAware(10, 5, selector=ExpectedUtility(), normalise='steps', stages=[ForecastRequest(), "
        "AuditRecord()])",
    ],
)
def test_picks_are_made_again_where_devices_are_asked_for_less(strategy):
    found = fedstale.simulate(
        "digits",
        traces=synthetic(20),
        until="15m",
        seed=0,
        run_config={
            **{"forecasts": True, "num-server-rounds": 999, "strategy": strategy},
            **{"local-epochs": 2, "batch-size": 32},
        },
    )
    verified = verify(found)
    assert verified.holds
    assert verified.repeated == verified.picks > 5
    if "LocalWork" in strategy:
        assert (found.jobs["work_share"] < 1.0).any()
