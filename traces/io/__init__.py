"""Files of traces and of fitted models."""
