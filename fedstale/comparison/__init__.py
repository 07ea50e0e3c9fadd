"""Variants of a simulation compared over seeds: planned, run, measured and judged."""
