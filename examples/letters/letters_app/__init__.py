"""Next-character prediction by a transformer on a dozen sites, as a Flower app."""
