"""Whether devices keep what they state of themselves, and a server what it has recorded."""
