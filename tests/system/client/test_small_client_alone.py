"""A device has neither torch, scikit-learn, pandas, plotly nor Ray, and trains and forecasts."""

import json
import subprocess
import sys

from missing_packages import BLOCKED

JOB = """
import sys

# What a device has not got cannot be imported.
sys.modules.update(dict.fromkeys({blocked!r}))

import json

import numpy as np
from flwr.app import (
    Array, ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
)
from flwr.supercore.task_identity import TaskIdentity

from fedstale.client import ForecastMod

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 7, 1
app = ForecastMod().client_app()


@app.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy()
    content = RecordDict(
        {{
            "arrays": ArrayRecord({{"w": Array(w + 1)}}),
            "metrics": MetricRecord({{"num-examples": 3}}),
        }}
    )
    return Message(content, reply_to=message)


context = Context(run_id=1, node_id=7, node_config={{}}, state=RecordDict(), run_config={{}})
for i in range(2):
    record = ArrayRecord({{"w": Array(np.zeros(4, np.float32))}})
    message = Message(RecordDict({{"arrays": record}}), 7, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = f"m{{i}}"
    reply = app(message, context)
print(json.dumps([float(reply.content["arrays"]["w"].numpy().sum()),
                  sorted(reply.content["fedstale.forecast"])]))
"""


def blocked(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_device_trains_and_forecasts_without_the_packages_of_servers():
    ran = blocked(JOB.format(blocked=BLOCKED))
    assert ran.returncode == 0, ran.stderr
    total, forecast = json.loads(ran.stdout.splitlines()[-1])
    assert total == 4.0
    assert {"p_available", "p_finish", "total_s"} <= set(forecast), forecast
