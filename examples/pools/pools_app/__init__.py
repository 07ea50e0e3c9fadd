"""Codistillation between pools of sites with different networks, as a Flower app."""
