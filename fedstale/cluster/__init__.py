"""Runs on the machines of a Ray cluster: planned run folders go out, and come back."""
