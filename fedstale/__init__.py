"""Federated learning on Flower for devices that go offline, slow down and report late."""

# Nothing else may be imported here: importing fedstale.traces runs this file, and a device that
# only records and forecasts has neither flwr nor stable-baselines3.
__version__ = "0.1.0"
