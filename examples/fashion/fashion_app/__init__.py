"""Fashion-MNIST with label skew, as a Flower app."""
