"""How much a stale update counts: by its age, by the gap, by what it adds."""
