"""The environment that agents are trained in: scenarios, episodes, and the Gymnasium interface."""
