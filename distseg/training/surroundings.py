"""Find how many pixels around a crop the network sees (``data.context``)."""

from __future__ import annotations

from torch import nn

from distseg.config.refusal import SettingError
from distseg.config.settings import DataBase
from distseg.config.sizes import Size
from distseg.layers.graph import graph_of, reach_for
from distseg.models.network import refusals
from distseg.tiling.tile import ReceptiveField


def context_of(model: nn.Module, data: DataBase) -> ReceptiveField | None:
    """Return how many pixels of context each crop has at least, and the stride of the network.

    The context is the pixels around a crop that the network sees but the loss does not count. Its
    width along each dim is ``halo`` of the result. The result is None if ``data.context`` is 0.

    Args:
        model: the network, plain or captured. The stride of a network that is not captured as a
            list of known layers counts as 1.
        data: the settings of the section ``data``.

    Raises:
        ValueError: ``data.context`` is auto, but the network is not captured. The message names
            the call that prevents the capture.
    """
    if data.context == 0:
        return None
    reach = reach_for(model, False)
    if data.context != "auto":
        return ReceptiveField((data.context,) * len(reach.stride), reach.stride)
    try:
        graph_of(model)
    except ValueError as e:
        raise SettingError(
            "DS408",
            "data.context is auto, which takes the halo of the network, but the halo cannot be "
            f"computed: {refusals.get(model) or e}; or set data.context to a number of pixels",
        ) from None
    return reach


def context_notes(
    data: DataBase, context: ReceptiveField | None, halo: tuple[int, ...], largest: tuple[int, ...]
) -> list[str]:
    """Return sentences for the user on the context of crops; none if crops have no context.

    Args:
        data: the settings of the section ``data``.
        context: the context (:func:`context_of`).
        halo: the halo of the network.
        largest: the size of the largest sample.
    """
    if context is None:
        return []
    lines = [
        f"crops of {data.crop} are computed with a context of {max(context.halo)} pixels or more, "
        f"in samples of up to {Size(largest)} pixels; the loss counts the crops' pixels"
    ]
    if any(a < b for a, b in zip(context.halo, halo)):
        lines.append(
            f"data.context is {data.context}, but the halo of the network is {max(halo)}: crops "
            "do not see all that prediction sees"
        )
    return lines
