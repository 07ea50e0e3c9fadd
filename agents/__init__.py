"""Whom to pick: selection of devices that is learnt on traces."""
