"""Files of traces and of fitted models; those of traces are in `parquet`, which needs pandas."""

from fedstale.traces.io.atomic import replacing
from fedstale.traces.io.mapped import Shared, share
from fedstale.traces.io.models import ModelFiles

__all__ = [
    "ModelFiles",
    "Shared",
    "replacing",
    "share",
]
