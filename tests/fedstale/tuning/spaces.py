"""A small space to search, and what differs in a test."""

from fedstale.tuning.space import Space

TABLE = {
    "app": "digits",
    "traces": "synthetic:20",
    "until": "12m",
    "seeds": [1, 2],
    "objective": "accuracy",
    "trials": 4,
    "rungs": ["3m", "6m"],
    "held-out": {"seeds": [11, 12]},
    "run-config": {"num-server-rounds": 1000, "buffer-size": 2, "strategy": "fedbuff"},
    "search": {
        "concurrency": {"from": 5, "to": 15, "step": 5},
        "learning-rate": {"from": 0.01, "to": 1.0, "log": True},
    },
}


def table(**changes):
    """Return the table with some keys replaced, an underscore for a hyphen; None leaves one out."""
    named = {key.replace("_", "-"): value for key, value in changes.items()}
    return {key: value for key, value in {**TABLE, **named}.items() if value is not None}


def space(**changes):
    return Space.read(table(**changes))
