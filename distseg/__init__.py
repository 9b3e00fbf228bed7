"""distseg trains segmentation networks on many ranks and computes the exact gradient.

Training is split over samples, over tiles of an image and over stages of the network, in any
combination. The public names below are imported when they are first used, so that
``import distseg`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers, which do not follow __getattr__
    from distseg.api import DistributedModel, PixelLoss, SumLoss, distribute, init_mesh
    from distseg.comm.mesh import Mesh
    from distseg.config.settings import Config
    from distseg.data.store.store import Store
    from distseg.layers.graph import receptive_field
    from distseg.models.capture.capture import capture
    from distseg.models.layers import Cat, Sum, padded
    from distseg.models.network import Network
    from distseg.models.unet import unet
    from distseg.models.zoo import build_model
    from distseg.runtime.swap_layers import parallelize
    from distseg.training.checkpoint.models import restore, save
    from distseg.training.run_config import load

__version__ = "0.1.0"

_HOME = {
    "init_mesh": "distseg.api",
    "distribute": "distseg.api",
    "DistributedModel": "distseg.api",
    "PixelLoss": "distseg.api",
    "SumLoss": "distseg.api",
    "unet": "distseg.models.unet",
    "build_model": "distseg.models.zoo",
    "capture": "distseg.models.capture.capture",
    "Network": "distseg.models.network",
    "save": "distseg.training.checkpoint.models",
    "restore": "distseg.training.checkpoint.models",
    "load": "distseg.training.run_config",
    "Cat": "distseg.models.layers",
    "Sum": "distseg.models.layers",
    "padded": "distseg.models.layers",
    "receptive_field": "distseg.layers.graph",
    "Mesh": "distseg.comm.mesh",
    "Config": "distseg.config.settings",
    "Store": "distseg.data.store.store",
    "parallelize": "distseg.runtime.swap_layers",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(
            f"module 'distseg' has no name {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(import_module(_HOME[name]), name)
