"""Real devices: a small deployment on one machine, and what to check before there are many.

SuperLink, SuperNodes and runs are Flower's own processes; see docs/deploy.md for the same by hand.
"""
