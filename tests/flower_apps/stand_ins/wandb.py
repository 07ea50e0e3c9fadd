"""Weights & Biases, to whom nothing is sent."""


def init(*args, **kwargs):
    pass


def log(*args, **kwargs):
    pass


def define_metric(*args, **kwargs):
    pass


def finish(*args, **kwargs):
    pass
