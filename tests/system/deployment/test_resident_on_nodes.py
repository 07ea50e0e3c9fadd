"""A trainer that stays, on real SuperNodes: of fedstale, and Flower's own."""

import os

import psutil
import pytest
from small_deployment import CLIENT, PYPROJECT, Running, means, write_app

from fedstale.deployment.local import run_app
from lab.deployed import AsFlower

pytestmark = pytest.mark.deployment

# It notes its process, and how many messages that has had, and the node.
TRAINER = (
    CLIENT.replace(
        "app = ClientApp()",
        "import os\n\napp = ClientApp()\ntimes = 0",
    )
    .replace(
        "def train(message, context):",
        "def train(message, context):\n"
        "    global times\n"
        "    times += 1\n"
        "    seen = context.state.config_records.get('seen', {'times': 0})['times'] + 1\n"
        "    context.state['seen'] = ConfigRecord({'times': seen})\n"
        "    with open(FILE, 'a') as file:\n"
        "        print(os.getpid(), times, seen, file=file, flush=True)\n",
    )
    .replace("import Array,", "import Array, ConfigRecord,")
)
CLIENT_APP = """
from fedstale.contrib.sites import resident

app = resident("adder.trainer:app")
"""


@pytest.fixture
def ran(tmp_path):
    """Return a function that reads which process has run the app: pid, times, seen."""

    def ran():
        path = tmp_path / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    return ran


@pytest.fixture
def app(tmp_path):
    """Return an app whose trainer stays, and notes what it does."""
    app = write_app(tmp_path / "adder", PYPROJECT, client=CLIENT_APP)
    trainer = TRAINER.replace("FILE", repr(str(tmp_path / "ran")))
    (app / "adder" / "trainer.py").write_text(trainer)
    return app


def check_one_trainer_each(found, nodes, rounds):
    pids = {pid for pid, *_ in found}
    assert len(pids) == nodes, found
    for pid in pids:
        # Modules stay from message to message, and so does the Context, as ever.
        own = [(times, seen) for p, times, seen in found if p == pid]
        assert own == [(i, i) for i in range(1, rounds + 1)], found
    return pids


def test_each_node_of_fedstale_has_one_trainer_for_all_messages_of_a_run(deployment, app, ran):
    lines = Running(deployment, app, "rounds=3").end()
    assert means(lines)[3] == pytest.approx(6.0), lines
    pids = check_one_trainer_each(ran(), nodes=3, rounds=3)
    first = len(ran())
    # Another run has trainers of its own.
    Running(deployment, app, "rounds=2").end()
    assert not check_one_trainer_each(ran()[first:], nodes=3, rounds=2) & pids
    # Those of the first wait until they are idle.
    assert all(map(psutil.pid_exists, pids))


def test_trainers_that_are_killed_at_work_cost_a_run_no_reply(deployment, app, ran):
    run = Running(deployment, app, "rounds=3 train-s=3.0")
    run.until(lambda: len(ran()) == 3)
    killed = {pid for pid, *_ in ran()}
    for pid in killed:
        os.kill(pid, 9)
    lines = run.end()
    assert means(lines)[3] == pytest.approx(6.0), lines
    # Once more in the message's process, and then in another trainer.
    assert len(ran()) == 3 + 3 + 3 + 3
    assert [seen for *_, seen in ran()] == [1] * 6 + [2] * 3 + [3] * 3
    assert len({pid for pid, *_ in ran()}) == 9
    for number in range(3):
        assert "the trainer gave no answer" in deployment.log(f"node-{number}").read_text()


def test_flowers_own_nodes_wait_for_no_trainer_and_end_without_it(tmp_path, app, ran):
    lines = []
    with AsFlower(tmp_path / "deployment", nodes=1) as flowers:
        run_app(flowers, app, run_config="rounds=3", show=lines.append)
        (pid,) = check_one_trainer_each(ran(), nodes=1, rounds=3)
        assert psutil.Process(pid).is_running()
        assert means(lines)[3] == pytest.approx(3.0), lines
    assert not psutil.pid_exists(pid)
