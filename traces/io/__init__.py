"""Files of traces and of fitted models."""

from fedstale.traces.io.atomic import replacing
from fedstale.traces.io.mapped import Shared, share
from fedstale.traces.io.models import ModelFiles
from fedstale.traces.io.parquet import read, write

__all__ = [
    "ModelFiles",
    "Shared",
    "read",
    "replacing",
    "share",
    "write",
]
