"""Whom to send to: selectors, and asking devices for their forecasts before they are chosen."""
