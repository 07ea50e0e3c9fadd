"""Next-character prediction on the roles of a play, as a Flower app."""
