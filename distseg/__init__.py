"""distseg: segmentation networks trained over samples, tiles, stages and data at once, with one exact gradient.

The public names below are loaded at their first use, so that ``import distseg`` stays quick.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "unet": "distseg.models.unet",
    "build_model": "distseg.models.zoo",
    "capture": "distseg.models.capture",
    "Network": "distseg.models.network",
    "load": "distseg.trained",
    "Cat": "distseg.models.layers",
    "Sum": "distseg.models.layers",
    "padded": "distseg.models.layers",
    "receptive_field": "distseg.spatial.graph",
    "Mesh": "distseg.mesh",
    "Config": "distseg.config",
    "Store": "distseg.data.store",
    "parallelize": "distseg.spatial.parallelize",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'distseg' has no name {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
