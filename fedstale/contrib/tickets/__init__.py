"""Random tickets: a study of weak devices that train and send a random part of a model."""

from fedstale.contrib.tickets.tickets import SubNetwork, Tickets, TicketsMod

__all__ = ["SubNetwork", "Tickets", "TicketsMod"]
