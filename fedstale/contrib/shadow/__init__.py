"""ShadowSync: sites that never stop training, and exchange models in the background."""

from fedstale.contrib.shadow.shadow import Background, Shadow

__all__ = ["Background", "Shadow"]
