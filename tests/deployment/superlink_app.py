"""Flower's SuperLink as an app in this process, as tests of what stands before it need it."""

import asyncio
import dataclasses

import httpx
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app
from hostile import Device

PUSH, PULL = "/v1/fleet/push-messages", "/v1/fleet/pull-messages"
OBJECT = "/v1/fleet/push-object"
EMPTY = {field.name: None for field in dataclasses.fields(SuperLinkLifespanConfig)}


class SuperLink:
    """Flower's app with two registered nodes and a run, without a network."""

    def __init__(self, wrap, database=":flwr-in-memory:"):
        config = SuperLinkLifespanConfig(
            **EMPTY
            | {
                "authn_plugin": load_control_authn_plugin(),
                "enable_supernode_auth": True,
                "simulation": False,
                "database": database,
                "isolation": "process",
            }
        )
        app = wrap(create_app(config, SuperLinkLifespan))
        self.app = app
        self.state = app.state.linkstate_factory.state()
        self.mallory, self.victim = Device(), Device()
        for device in (self.mallory, self.victim):
            device.node_id = self.state.create_node(
                NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, device.public, 0
            )
            assert self.post("/v1/fleet/activate-node", device, device.joining()).is_success
        self.run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (self.task,) = self.state.get_tasks(run_ids=[self.run_id])
        self.token = self.state.claim_task(self.task.task_id)
        assert self.token
        assert self.state.activate_task(self.task.task_id)

    def post(self, path, device, request, headers=None):
        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://link") as client:
                content = request.SerializeToString()
                return await client.post(path, content=content, headers=headers or device.headers())

        return asyncio.run(send())

    def pulled(self, device):
        answer = self.post(PULL, device, device.asking())
        assert answer.status_code == 200
        return list(PullMessagesResponse.FromString(answer.content).messages_list)
