"""The letters app: its transformer, its adapters, and what a site does in a job."""

import importlib

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from safetensors.torch import save_file

from fedstale.flower import stamp
from fedstale.strategies.stages import WORK

SMALL = {"width": 32, "layers": 1, "local-steps": 4}


@pytest.fixture
def letters(load):
    return load("letters")


@pytest.fixture
def task(letters):
    letters.load_client()
    return importlib.import_module("letters_app.task")


@pytest.fixture
def base(task, tmp_path):
    """Return the path of a small model that adapters stand on."""
    save_file(task.Network(3, width=32, layers=1).state_dict(), tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def site(letters, small_play, run_identity):
    """Return a function that makes a site of three, which answers models one after another."""
    client = letters.load_client()

    def site(partition=0, **settings):
        config = letters.run_config({"text": small_play, **SMALL, **settings})
        node = {"partition-id": partition, "num-partitions": 3}
        context = Context(7, 5, node, RecordDict(), config)

        def answer(arrays, kind="train", **told):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord(told)})
            message = Message(content, 5, kind)
            answer.n_messages += 1
            stamp(message, f"message-{answer.n_messages}", 0.0, 3600.0)
            reply = client(message, context)
            assert not reply.has_error(), reply.error
            return reply.content

        answer.n_messages, answer.config, answer.state = 0, config, context.state
        return answer

    return site


def arrays_of(network):
    return ArrayRecord(network.state_dict())


def same(one, other):
    return all(torch.equal(x, other.to_torch_state_dict()[k]) for k, x in one.items())


def test_no_character_sees_a_later_one(task):
    network = task.Network(1, width=32, layers=2)
    codes = torch.randint(90, (2, task.LENGTH), generator=torch.Generator().manual_seed(0))
    changed = codes.clone()
    changed[:, 50:] = (codes[:, 50:] + 1) % 90
    seen, other = network(codes), network(changed)
    assert torch.equal(seen[:, :50], other[:, :50])
    assert not torch.equal(seen[:, 50:], other[:, 50:])


def test_a_width_that_heads_do_not_fill_is_refused(task):
    with pytest.raises(ValueError, match="width = 40: expected a multiple of 32"):
        task.Network(width=40)


def test_moments_stay_at_the_site_and_go_on(site, task):
    first, network = site(), task.Network(1, width=32, layers=1)
    reply = first(arrays_of(network))
    assert first.state["moments"]["0.step"].numpy() == 4
    again = first(reply["arrays"])
    assert first.state["moments"]["0.step"].numpy() == 8
    # Another site of the same text, to which only the second message is the same.
    fresh = site()
    fresh.n_messages = 1
    assert fresh.config == first.config
    assert not same(again["arrays"].to_torch_state_dict(), fresh(reply["arrays"])["arrays"]), (
        "moments change the steps"
    )


def test_a_site_takes_exactly_the_steps_that_it_is_asked_for(site, task):
    whole, half = site(), site()
    network = arrays_of(task.Network(1, width=32, layers=1))
    assert whole(network)["metrics"]["num-examples"] == 4 * 8
    assert half(network, **{WORK: 0.5})["metrics"]["num-examples"] == 4 * 8
    assert half.state["moments"]["0.step"].numpy() == 2


def test_a_site_evaluates_on_text_that_it_does_not_train_on(site, task):
    network = arrays_of(task.Network(1, width=32, layers=1))
    metrics = site()(network, "evaluate")["metrics"]
    assert 4.0 < metrics["eval_loss"] < 5.0
    assert metrics["num-examples"] >= 1


def test_adapters_start_as_their_base_and_are_all_that_is_sent(site, task, base):
    mine = site(base=base, ranks="4")
    network = task.model(mine.config)
    codes = torch.arange(90)[None]
    assert torch.equal(network(codes), task.Network(3, width=32, layers=1)(codes))
    start = network.state_dict()
    assert {name.split(".")[2] for name in start} == {"lora_A", "lora_B"}
    after = mine(arrays_of(network))["arrays"].to_torch_state_dict()
    assert {name: x.shape for name, x in after.items()} == {n: x.shape for n, x in start.items()}
    assert not any(torch.equal(after[name], start[name]) for name in start)


def test_sites_have_their_ranks_in_turn_and_train_the_first_of_what_they_are_sent(site, task, base):
    settings = {"base": base, "ranks": "2,4"}
    sent = task.model(site(**settings).config)
    shapes = []
    for partition in range(3):
        after = site(partition, **settings)(arrays_of(sent))["arrays"].to_torch_state_dict()
        shapes.append({x.shape[0] for name, x in after.items() if "lora_A" in name})
    assert shapes == [{2}, {4}, {2}]
    idle = site(**settings, **{"learning-rate": 0.0})(arrays_of(sent))["arrays"]
    for name, x in idle.to_torch_state_dict().items():
        whole = sent.state_dict()[name]
        assert torch.equal(x, whole[:2] if "lora_A" in name else whole[:, :2])


@pytest.mark.parametrize("what", ["absent", "other", "of another width"])
def test_a_base_that_is_none_is_refused_in_one_sentence(task, letters, tmp_path, what):
    path = tmp_path / "base"
    if what == "other":
        path.write_bytes(b"no model")
    elif what == "of another width":
        save_file(task.Network(width=64, layers=1).state_dict(), path)
    config = letters.run_config({**SMALL, "base": str(path)})
    with pytest.raises(ValueError, match=r"base = .*base': expected the model.safetensors"):
        task.model(config)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranks": "2,many"}, "ranks = '2,many': expected whole numbers >= 1"),
        ({"ranks": "0"}, "ranks = '0': expected whole numbers >= 1"),
        ({"ranks": "4", "base": ""}, "ranks = '4' without base: expected the model.safetensors"),
    ],
)
def test_ranks_that_mean_nothing_are_refused_in_one_sentence(task, letters, settings, says):
    with pytest.raises(ValueError, match=says):
        task.model(letters.run_config({"base": "a", **settings}))
