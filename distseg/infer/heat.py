"""Where a network's answer to a whole image comes from: gradient-weighted class activation maps (Grad-CAM, Selvaraju et al., 2017).

Of the map A before the last pooling over the image, or of the block Z of a network of patches, with y the logit of the likeliest class::

    heat = max(0, sum over channels c of A_c * mean over places of dy/dA_c)

resized to the image, bilinear. The image goes through the network whole, in evaluation mode; of its maps those that are still read are kept.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.capture import as_network
from distseg.models.layers import Max, Mean
from distseg.models.network import IMAGE, Network
from distseg.models.patches import PatchNetwork


def heat_map(model: nn.Module, x: Tensor) -> np.ndarray:
    """(H, W) float32 from 0 to 1 of an image (1, C, H, W); by a plain module, in evaluation mode.

    Raises:
        ValueError: the network has no pooling over the image, or is not followed.
    """
    model.eval()
    if isinstance(model, PatchNetwork):
        heat = _of_patches(model, x)
    else:
        heat = _of_last_pooling(as_network(model), x)
    heat = F.interpolate(heat[None, None], size=x.shape[2:], mode="bilinear", align_corners=False)[0, 0]
    return (heat / heat.max().clamp(min=torch.finfo(heat.dtype).tiny)).float().cpu().numpy()


def _of_patches(model: PatchNetwork, x: Tensor) -> Tensor:
    size = x.shape[2:]
    with torch.no_grad():
        features = torch.stack([model.backbone(x[(..., *box.slices)]).flatten(1) for box in model.patches(size)], 1)
    return _weighted(model.block(features, size), model.head)


def _of_last_pooling(network: nn.Module, x: Tensor) -> Tensor:
    layers = {name: network.get_submodule(name) for name in network.reads} if isinstance(network, Network) else {}
    pool = next((name for name, layer in reversed(layers.items()) if isinstance(layer, (Mean, Max))), None)
    if pool is None:
        raise ValueError("predict.heat draws the map before the last pooling over the image, and this network has none that is known: leave it out")
    names = list(layers)
    last = {source: n for n, name in enumerate(names) for source in network.reads[name]}
    maps = {IMAGE: x}
    with torch.no_grad():
        for n, name in enumerate(names[: names.index(pool)]):
            maps[name] = layers[name](*(maps[source] for source in network.reads[name]))
            for source in network.reads[name]:
                if last[source] == n:
                    del maps[source]

    def rest(a: Tensor) -> Tensor:
        there = {**maps, network.reads[pool][0]: a}
        for name in names[names.index(pool) :]:
            y = there[name] = layers[name](*(there[source] for source in network.reads[name]))
        return y

    return _weighted(maps[network.reads[pool][0]], rest)


@torch.enable_grad()
def _weighted(a: Tensor, rest) -> Tensor:
    """(*size) of a map (1, C, *size), of which the ``rest`` of the network makes logits."""
    a = a.detach().requires_grad_()
    logits = rest(a).flatten()
    likeliest = logits.max() if len(logits) > 1 else logits[0] * logits[0].detach().sign()
    (gradient,) = torch.autograd.grad(likeliest, a)
    weights = gradient.mean(tuple(range(2, a.dim())), keepdim=True)
    return (weights * a.detach()).sum(1)[0].relu()


def drawn_over(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3) uint8: the image, fainter where nothing comes from, and red to yellow where the answer does."""
    warm = np.stack((np.ones_like(heat), heat, 0.2 * heat), -1)
    share = (0.75 * heat)[..., None]
    return np.rint(255 * (share * warm + (1 - share) * (0.2 + 0.8 * image / 255.0 * 0.9))).clip(0, 255).astype(np.uint8)
