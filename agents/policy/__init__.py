"""The policy: what it sees of candidates, how it scores them, and its files."""
