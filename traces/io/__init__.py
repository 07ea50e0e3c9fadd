"""Files of traces and of fitted models; those of traces are in `parquet`, which needs pandas."""

from fedstale.traces.io.files import Shared, replacing, share
from fedstale.traces.io.models import ModelFiles

__all__ = [
    "ModelFiles",
    "Shared",
    "replacing",
    "share",
]
