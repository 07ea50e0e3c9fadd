"""Training a policy: proximal policy optimisation and evolution strategies."""
