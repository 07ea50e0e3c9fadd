"""Settings of a federated run searched on device time, and judged on held-out seeds and devices."""
