"""Parameters on which each output of a captured network depends."""

from __future__ import annotations

from torch import nn

from distseg.models.layers import Cat
from distseg.models.network import IMAGE, Network


def parameters_of_outputs(network: nn.Module, outputs: int) -> list[set[nn.Parameter]] | None:
    """Return, for each output of a network, the parameters on which the output depends.

    Args:
        network: a network whose outputs are concatenated along the channels of one result.
        outputs: the number of outputs.

    Returns:
        None if the network's last layers do not show which feature map is which output.
    """
    if type(network) is not Network:
        return None
    last = next(reversed(network.reads))
    # A network that pads the image cuts its result back to the size of the image.
    while len(maps := [name for name in network.reads[last] if name != IMAGE]) == 1:
        if next(network.get_submodule(last).parameters(), None) is not None:
            return None
        last = maps[0]
    maps = list(network.reads[last])
    if not isinstance(network.get_submodule(last), Cat) or len(maps) != outputs:
        return None
    return [_parameters_behind(network, name) for name in maps]


def _parameters_behind(network: Network, name: str) -> set[nn.Parameter]:
    """Return the parameters on which the result of the layer ``name`` depends."""
    found: set[nn.Parameter] = set()
    seen, open_ = set(), [name]
    while open_:
        if (layer := open_.pop()) in seen or layer not in network.reads:
            continue
        seen.add(layer)
        found.update(network.get_submodule(layer).parameters())
        open_ += network.cells_read(layer)
    return found
