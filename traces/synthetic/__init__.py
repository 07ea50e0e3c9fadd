"""Devices made to resemble recorded ones: the population, what is drawn from it, and its fit."""
