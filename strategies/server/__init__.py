"""The event loop of a strategy and what it keeps: jobs, clients, versions, the buffer."""
