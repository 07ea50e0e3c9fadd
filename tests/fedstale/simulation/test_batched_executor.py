"""Clients trained as one program: the same results as one after the other, but for rounding."""

import numpy as np
import pytest
import torch
from clothes import write_clothes
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from one_thread import one_thread
from places import APPS
from torch import nn
from torch.nn.functional import cross_entropy

from fedstale.errors import ConfigError
from fedstale.flower import identity, own_copy, stamp
from fedstale.simulation.executors import ClientCall, InlineExecutor
from fedstale.simulation.executors.batched import BatchedExecutor
from fedstale.simulation.executors.many_sgd import ManySGD, TrainingTask
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp

__all__ = ["one_thread"]

QUICK = {"local_epochs": 1, "batch_size": 32}
SPEECH = "To be, or not to be, that is the question that I put to all of you today.\n"


@pytest.fixture(autouse=True)
def _identity():
    with identity(1):
        yield


@pytest.fixture
def built_in():
    """Return a function that loads an app and makes calls to its clients."""
    contexts = []

    def load(name, n, *, kind="train", versions=1, **overrides):
        app = FlowerApp.find(APPS[name])
        contexts.append(app.importable())
        contexts[-1].__enter__()
        client, parts = app.load_client(), BatchedFunctions.load(app.batched, app.directory)
        config = app.run_config({k.replace("_", "-"): v for k, v in overrides.items()})
        models = [ArrayRecord(parts.network(seed).state_dict()) for seed in range(versions)]
        calls = []
        for i in range(n):
            config_record = ConfigRecord({"server-round": i % versions})
            content = RecordDict({"arrays": models[i % versions], "config": config_record})
            node = {"partition-id": i, "num-partitions": n}
            context = Context(1, 1000 + i, node, RecordDict(), dict(config))
            calls.append(ClientCall(Message(own_copy(content), 1000 + i, kind), context, seed=i))
        return client, parts, calls

    yield load
    for context in reversed(contexts):
        context.__exit__(None, None, None)


def differences(ours, theirs):
    """Return the largest difference of each reply, relative to the largest number of its array."""
    found = []
    for one, other in zip(ours, theirs, strict=True):
        assert not one.reply.has_error(), one.reply.error
        assert not other.reply.has_error(), other.reply.error
        a, b = one.reply.content, other.reply.content
        assert list(a["arrays"]) == list(b["arrays"])
        assert a["metrics"].keys() == b["metrics"].keys()
        pairs = list(
            zip(a["arrays"].to_numpy_ndarrays(), b["arrays"].to_numpy_ndarrays(), strict=True)
        )
        assert all(x.dtype == y.dtype for x, y in pairs)
        pairs += [(np.array(a["metrics"][k]), np.array(b["metrics"][k])) for k in a["metrics"]]
        found += [np.abs(x - y).max() / np.abs(y).max() for x, y in pairs]
    return np.array(found)


@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize(("n", "batch_size", "epochs"), [(12, 8, 2), (60, 10, 5), (5, 1000, 1)])
def test_digits_are_trained_as_inline_within_a_millionth(built_in, n, batch_size, epochs, versions):
    client, parts, calls = built_in(
        "digits", n, versions=versions, batch_size=batch_size, local_epochs=epochs
    )
    ours = BatchedExecutor(client, parts, batch=25).run(calls)
    theirs = InlineExecutor(client).run(calls)
    assert differences(ours, theirs).max() < 1e-6


# What rounding leaves grows with the steps, and by where arrays lie in memory: after ten epochs it
# was now and then three times the bound, after three it is a fifth of it.
@pytest.mark.parametrize(("batch_size", "epochs"), [(1000, 1), (9, 3)])
def test_fashion_is_trained_as_inline_but_for_rounding(built_in, tmp_path, batch_size, epochs):
    write_clothes(tmp_path / "clothes")
    settings = {"data": str(tmp_path / "clothes"), "batch_size": batch_size}
    before = torch.get_default_dtype()
    # In single precision a rounding may put a unit on the other side of a ReLU.
    torch.set_default_dtype(torch.float64)
    try:
        client, parts, calls = built_in("fashion", 9, versions=2, local_epochs=epochs, **settings)
        ours, theirs = BatchedExecutor(client, parts).run(calls), InlineExecutor(client).run(calls)
    finally:
        torch.set_default_dtype(before)
    # The share of an example in the mean of its batch stays one of single precision.
    assert differences(ours, theirs).max() < 1e-7


def test_replies_are_addressed_as_inline(built_in):
    client, parts, calls = built_in("digits", 2, **QUICK)
    for i, call in enumerate(calls):
        stamp(call.message, f"message-{i}", 1.0, 10.0)
    executors = BatchedExecutor(client, parts), InlineExecutor(client)
    ours, theirs = ([a.reply.metadata for a in e.run(calls)] for e in executors)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        times = {"_created_at", "_ttl"}  # which the grid writes
        said = [{k: v for k, v in vars(m).items() if k not in times} for m in (one, other)]
        assert said[0] == said[1]
    assert all(call.message.metadata.reply_to_message_id == "" for call in calls)


def test_shakespeare_is_trained_as_inline_within_a_millionth(built_in, tmp_path):
    play = tmp_path / "play.txt"
    play.write_text(
        "\n\n".join([f"HAMLET:\n{SPEECH * 12}\nOPHELIA:\n{SPEECH * 7}\nGHOST:\nMark me."] * 3)
    )
    client, parts, calls = built_in("shakespeare", 3, text=str(play), local_epochs=1)
    ours = BatchedExecutor(client, parts).run(calls)
    assert differences(ours, InlineExecutor(client).run(calls)).max() < 1e-6


def test_messages_that_do_not_train_are_answered_as_inline(built_in):
    client, parts, calls = built_in("digits", 4, kind="evaluate")
    ours, theirs = BatchedExecutor(client, parts).run(calls), InlineExecutor(client).run(calls)
    assert [a.reply.content for a in ours] == [a.reply.content for a in theirs]


def test_a_client_that_fails_gets_the_same_error_and_the_others_their_answers(built_in):
    client, parts, calls = built_in("digits", 4, **QUICK)
    calls[2].context.node_config["partition-id"] = 9
    ours, theirs = BatchedExecutor(client, parts).run(calls), InlineExecutor(client).run(calls)
    assert [a.reply.has_error() for a in ours] == [False, False, True, False]
    assert ours[2].reply.error.code == theirs[2].reply.error.code
    assert ours[2].reply.error.reason == theirs[2].reply.error.reason


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("can't allocate memory"),
    ],
)
def test_a_batch_that_does_not_fit_is_halved_until_it_does(built_in, problem):
    client, parts, calls = built_in("digits", 10, **QUICK)
    executor, sizes = BatchedExecutor(client, parts), []
    fit = executor._fit

    def limited(models, jobs):
        sizes.append(len(jobs))
        if len(jobs) > 3:
            raise problem
        return fit(models, jobs)

    executor._fit = limited
    assert differences(executor.run(calls), InlineExecutor(client).run(calls)).max() < 1e-6
    assert sizes == [10, 5, 2, 2, 2, 2, 2]
    assert executor.batch == 2


def test_a_client_that_does_not_fit_alone_is_trained_inline(built_in):
    client, parts, calls = built_in("digits", 2, **QUICK)
    executor = BatchedExecutor(client, parts)

    def never(models, jobs):
        raise MemoryError

    executor._fit = never
    assert differences(executor.run(calls), InlineExecutor(client).run(calls)).max() == 0


class Tiny(nn.Module):
    """A layer of each kind of shape: matrix, vector, scalar."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.line(x)


def losses(network, x, y):
    return cross_entropy(network(x), y, reduction="none")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_each_client_takes_the_steps_it_would_take_alone(data):
    draw, n = data.draw, data.draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    jobs, alone = [], []
    start = Tiny()
    for _ in range(n):
        m, epochs = draw(st.integers(1, 9)), draw(st.integers(0, 3))
        given_ = {
            "data": (torch.randn(m, 3), torch.randint(4, (m,))),
            "order": np.array([rng.permutation(m) for _ in range(epochs)]).reshape(epochs, m),
            "batch_size": draw(st.integers(1, 10)),
            "learning_rate": draw(st.sampled_from([0.01, 0.1])),
            "momentum": draw(st.sampled_from([0.0, 0.9])),
            "weight_decay": draw(st.sampled_from([0.0, 0.01])),
            "max_norm": draw(st.sampled_from([None, 0.1])),
            "proximal_mu": draw(st.sampled_from([0.0, 0.5])),
        }
        jobs.append(TrainingTask.of(given_))
        alone.append(one_by_one(start, given_))
    models = {k: torch.stack([v] * n) for k, v in start.state_dict().items()}
    trained, means = ManySGD(Tiny, losses)(models, jobs)
    for i, (state, mean) in enumerate(alone):
        assert means[i] == pytest.approx(mean, rel=1e-5)
        for name, expected in state.items():
            torch.testing.assert_close(trained[name][i], expected, rtol=1e-5, atol=1e-5)


def one_by_one(start, job):
    network = Tiny()
    network.load_state_dict(start.state_dict())
    names = ("momentum", "weight_decay")
    sgd = torch.optim.SGD(
        network.parameters(), lr=job["learning_rate"], **{name: job[name] for name in names}
    )
    x, y = job["data"]
    total = 0.0
    for epoch in torch.from_numpy(job["order"]):
        total = 0.0
        for batch in epoch.split(job["batch_size"]):
            sgd.zero_grad()
            loss = losses(network, x[batch], y[batch]).mean()
            moved = zip(network.parameters(), start.parameters(), strict=True)
            term = sum(((w - w0.detach()) ** 2).sum() for w, w0 in moved)
            (loss + job["proximal_mu"] / 2 * term).backward()
            if job["max_norm"]:
                nn.utils.clip_grad_norm_(network.parameters(), job["max_norm"])
            sgd.step()
            total += loss.item() * len(batch)
    return network.state_dict(), total / len(y)


def app_with(mods=(), function_mods=None):
    app = ClientApp(mods=list(mods))

    @app.train(mods=function_mods)
    def train(message, context):
        return Message(message.content, reply_to=message)

    return app


def through(message, context, call_next):
    return call_next(message, context)


@pytest.mark.parametrize("options", [{"mods": [through]}, {"function_mods": [through]}])
def test_mods_are_rejected_because_they_run_around_one_client(options):
    parts = BatchedFunctions(job=dict, network=Tiny, losses=losses)
    with pytest.raises(ConfigError, match="the ClientApp has mods"):
        BatchedExecutor(app_with(**options), parts)
    BatchedExecutor(app_with(), parts)


def test_an_app_that_does_not_train_is_rejected():
    with pytest.raises(ConfigError, match=r"holds no function under @app.train\(\)"):
        BatchedExecutor(ClientApp(), BatchedFunctions(job=dict, network=Tiny, losses=losses))


@pytest.mark.parametrize(
    ("network", "loss", "named"),
    [
        (lambda: nn.Sequential(Tiny(), nn.BatchNorm1d(4)), losses, "has buffers"),
        (lambda: nn.Sequential(Tiny(), nn.Dropout(0.5)), losses, "randomness"),
        (lambda: nn.Linear(3, 4), losses, "expected those of the declared network"),
        (Tiny, lambda network, x, y: losses(network, x, y).item(), "cannot be trained as one"),
    ],
)
def test_a_network_that_cannot_be_stacked_is_rejected_with_the_reason(network, loss, named):
    def job(message, context):
        return {
            "data": (torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64)),
            "order": [[0, 1, 2]],
            "batch_size": 2,
            "learning_rate": 0.1,
        }

    state = Tiny().state_dict()
    if "Dropout" in repr(network()):
        state = {f"0.{name}": array for name, array in state.items()}
    message = Message(RecordDict({"arrays": ArrayRecord(state)}), 1000, "train")
    call = ClientCall(message, Context(1, 1000, {}, RecordDict(), {}), 0)
    with pytest.raises(ConfigError, match=named):
        BatchedExecutor(app_with(), BatchedFunctions(job=job, network=network, losses=loss)).run(
            [call]
        )


JOB = {
    "data": (torch.zeros(3, 3),),
    "order": [[0, 1, 2]],
    "batch_size": 2,
    "learning_rate": 0.1,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"momentun": 0.9}, "returned the keys"),
        ({"order": [0, 1, 2]}, r"an order of shape \(3,\)"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"data": ()}, "expected tensors with one common length"),
        ({"data": (torch.zeros(3), torch.zeros(2))}, "one common length"),
    ],
)
def test_a_job_that_means_nothing_is_rejected(changes, named):
    TrainingTask.of(JOB)
    with pytest.raises(ConfigError, match=named):
        TrainingTask.of({**JOB, **changes})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"job": "a:b", "network": "a:c"}, "expected job, network and losses"),
        ({"job": "a:b", "network": "a:c", "losses": "a:d", "fit": "a:e"}, "expected job, netw"),
        ({"job": "a", "network": "a:c", "losses": "a:d"}, "expected module:attribute"),
    ],
)
def test_an_incomplete_declaration_is_rejected(table, named):
    with pytest.raises(ConfigError, match=named):
        BatchedFunctions.check(table)


def test_a_declared_function_that_is_not_there_is_rejected(tmp_path):
    declared = {"job": "math:nothing", "network": "math:pi", "losses": "math:pi"}
    with pytest.raises(ConfigError, match=r"job = 'math:nothing' has no such attribute"):
        BatchedFunctions.load(declared, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA knows")
@pytest.mark.parametrize("name", ["digits", "fashion", "shakespeare"])
def test_a_gpu_trains_as_the_processor_does_and_the_same_each_time(built_in, tmp_path, name):
    write_clothes(tmp_path / "clothes")
    play = f"HAMLET:\n{SPEECH * 12}\nOPHELIA:\n{SPEECH * 7}"
    (tmp_path / "play.txt").write_text(play)
    settings = {
        "digits": {},
        "fashion": {"data": str(tmp_path / "clothes"), "batch_size": 1000, "local_epochs": 1},
        "shakespeare": {"text": str(tmp_path / "play.txt"), "local_epochs": 1},
    }
    client, parts, calls = built_in(name, 2, versions=2, **settings[name])
    ours, again = (BatchedExecutor(client, parts, device="cuda").run(calls) for _ in range(2))
    assert differences(ours, InlineExecutor(client).run(calls)).max() < 1e-5
    assert differences(ours, again).max() == 0.0
