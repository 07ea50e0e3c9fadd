"""A Flower that lacks some of its names."""

from missing_names import without

from fedstale.flower.features import REAL_DEVICES, release

__all__ = ["without"]

# What runs on real devices is for a later Flower than simulations are.
collect_ignore = (
    [
        "test_command_line.py",
        "test_superlink.py",
        "test_superlink_grid.py",
        "test_whole_messages.py",
    ]
    if release() < REAL_DEVICES
    else []
)
