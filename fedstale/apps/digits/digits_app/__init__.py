"""Handwritten digits with label skew, as a Flower app."""
