"""Rules that combine updates although some clients are adversarial."""
