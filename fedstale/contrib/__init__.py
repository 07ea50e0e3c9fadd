"""The shelf: parts that few need, each plugged into the core as another package would be."""
