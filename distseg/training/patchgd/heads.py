"""Heads of PatchGD's network, which compute the output for an image from Z.

Z are the features of all patches. A head maps (N, s, *grid) to (N, K). ``cnn``, ``cnn-max`` and
``transformer`` take a grid of any size. ``conv3``, ``conv4`` and ``attention`` are the heads of
Gupta et al. (2023). The last layer of ``conv3`` and ``conv4`` has weights for each position of the
grid, so these heads are made for one grid. The setting for a user's own head is the name of a
function, ``package.module:function``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.config.sizes import Size
from distseg.models.own import own_builder
from distseg.models.user_errors import user_error, user_errors

WIDTHS = {"cnn": 64, "cnn-max": 64, "transformer": 64, "conv3": 256, "conv4": 256, "attention": 192}
"""Default value of ``patchgd.head_channels`` for each head, by name."""
OF_ONE_GRID = ("conv3", "conv4")
_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_KEYED = (nn.Dropout, *_DROPOUT)  # dropouts whose masks all ranks share


def is_own(head: str) -> bool:
    """Return True if ``head``, the value of ``patchgd.head``, names a function of the user."""
    return ":" in head


def of_one_grid(head: str) -> bool:
    """Return True if a head works only for images with one grid of patches, such as 8 x 8.

    This is assumed of a user's head if the user's function has the parameter ``grid``.

    Args:
        head: the value of ``patchgd.head``.
    """
    return "grid" in _parameters(head) if is_own(head) else head in OF_ONE_GRID


def make_head(
    name: str, features: int, channels: int | None, outputs: int, grid: Sequence[int]
) -> nn.Module:
    """Return a new head, the module that computes an image's output from all patches' features.

    Args:
        name: the value of ``patchgd.head``.
        features: s, the number of features of a patch.
        channels: the width of the head; None for the default in :data:`WIDTHS`.
        outputs: K, the number of outputs for an image.
        grid: the number of patches along each dim. A head that takes any grid uses only its length.

    Raises:
        ValueError: the head cannot have this width, or a user's function fails.
    """
    if is_own(name):
        return _own_head(name, features, outputs, grid)
    width = channels or WIDTHS[name]
    if name in OF_ONE_GRID:
        return GridHead(features, width, outputs, grid, keeping=int(name == "conv4"))
    if name == "attention":
        return AttentionHead(features, width, outputs)
    if name == "transformer":
        return TransformerHead(features, width, outputs)
    return ConvHead(features, width, outputs, len(grid), name == "cnn-max")


def check_head(head: nn.Module, name: str, shape: Sequence[int], outputs: int) -> None:
    """Refuse a head that does not take the features of all patches in this shape, (N, s, *grid).

    A head is also refused if it draws random numbers itself, because they would differ between
    ranks.

    Args:
        head: the head.
        name: the value of ``patchgd.head``, for messages.
        shape: the shape (N, s, *grid) of the features of all patches of N images.
        outputs: K, the number of outputs that the head must return for each image.

    Raises:
        ValueError: the head is refused. The message names the head, the grid and how to fix it.
    """
    like = next(head.parameters(), torch.zeros(0))
    rates = {m: m.p for m in head.modules() if isinstance(m, _KEYED)}
    training = head.training
    kept = {key: t.clone() for key, t in head.state_dict().items()}
    try:
        for layer in rates:
            layer.p = 0.0
        _check_call(head.train(), name, torch.zeros(*shape, dtype=like.dtype), outputs)
    finally:
        for layer, p in rates.items():
            layer.p = p
        head.load_state_dict(kept)
        head.train(training)


def _check_call(head: nn.Module, name: str, z: Tensor, outputs: int) -> None:
    """Refuse a head that fails on ``z``, draws random numbers, or returns a wrong shape.

    Args:
        head: the head.
        name: the value of ``patchgd.head``, for messages.
        z: the features of all patches, (N, s, *grid).
        outputs: K; the head must return (N, K).
    """
    what = f"patchgd.head {name} does not take a grid of {Size(z.shape[2:])} patches"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        try:
            y = head(z)
        except Exception as e:  # a user's function can raise anything
            raise ValueError(
                f"{what} of {z.shape[1]} features: {user_error(e)}. "
                "Choose a head that takes any grid, such as cnn, or another patchgd.patch"
            ) from e
        if not torch.equal(before, torch.get_rng_state()):
            raise ValueError(
                f"patchgd.head {name} draws random numbers, which differ between ranks: "
                "use nn.Dropout or nn.Dropout2d layers"
            )
    wanted = (len(z), outputs)
    if not isinstance(y, Tensor) or y.dim() < 2 or y.flatten(1).shape != wanted:
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"patchgd.head {name} returns {shape} for Z of shape {tuple(z.shape)}, but must return "
            f"{wanted}, for each image as many numbers as the network has outputs: make the head's "
            f"last layer return {outputs} numbers, the value of its argument outputs"
        )


_CALLED = {
    "features": ("features", "in_channels", "in_features", "dim"),
    "outputs": ("outputs", "out_channels", "classes", "num_classes"),
    "grid": ("grid",),
}


def _parameters(name: str) -> list[str]:
    """Return the names of the parameters of the user's function that ``patchgd.head`` names."""
    with user_errors(f"patchgd.head {name!r} cannot be built"):
        return list(inspect.signature(own_builder(name, "patchgd.head")).parameters)


def _own_head(name: str, features: int, outputs: int, grid: Sequence[int]) -> nn.Module:
    """Call a user's function that builds a head, and return the head.

    The function is called with the number of features and the number of outputs. If it has the
    parameter ``grid``, it also gets the grid of patches.
    """
    builder, takes = own_builder(name, "patchgd.head"), _parameters(name)
    given = {"features": features, "outputs": outputs, "grid": tuple(grid)}
    arguments = {
        called: given[field]
        for field, names in _CALLED.items()
        for called in names
        if called in takes
    }
    for field in ("features", "outputs"):
        if not any(called in takes for called in _CALLED[field]):
            raise ValueError(
                f"patchgd.head {name!r} takes ({', '.join(takes)}), but is called "
                f"with the number of {field}: add the parameter {field}"
            )
    with user_errors(f"patchgd.head {name!r} cannot be built"):
        head = builder(**arguments)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"patchgd.head {name!r} returns a value of type {type(head).__name__}, "
            "but it must return a torch.nn.Module"
        )
    return head


class GridHead(nn.Module):
    """Convolutional head of Gupta et al. (2023): (N, s, *grid) -> (N, K).

    It has ``keeping`` 3-wide convolutions, then three 3-wide convolutions that halve the grid. Each
    convolution is followed by a ReLU, batch norm and a dropout of channels. A linear layer takes
    the flattened result.

    Args:
        features, channels, outputs: s features per patch, the width of the head, K outputs.
        grid: the number of patches along each dim.
        keeping: the number of convolutions that keep the grid's size.
        dropout: the probability that a channel is dropped.
    """

    def __init__(
        self,
        features: int,
        channels: int,
        outputs: int,
        grid: Sequence[int],
        keeping: int = 1,
        dropout: float = 0.2,
    ):
        super().__init__()
        dims, self.grid = len(grid), tuple(grid)
        layers: list[nn.Module] = []
        for number in range(keeping + _HALVINGS):
            conv = _CONV[dims - 1](
                channels if number else features,
                channels,
                3,
                stride=1 if number < keeping else 2,
                padding=1,
            )
            layers += [conv, nn.ReLU(), _NORM[dims - 1](channels), _DROPOUT[dims - 1](dropout)]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(channels * math.prod(-(-n // 2**_HALVINGS) for n in grid), outputs)

    def forward(self, z: Tensor) -> Tensor:
        return self.last(self.layers(z).flatten(1))


_HALVINGS = 3


class AttentionHead(nn.Module):
    """Attention head of Gupta et al. (2023): (N, s, *grid) -> (N, K).

    Each patch has a token, and the image has one more token. A sinusoidal encoding of their order
    is added to the tokens. One transformer layer follows, with a layer norm before each of its two
    parts (attention and MLP). A linear layer takes the image's token, after a third layer norm. If
    s is not the width, a linear layer first projects the features to the width.

    Args:
        features, channels, outputs: s features per patch, the width of the head, K outputs.
        heads: the number of attention heads, among which the width is divided.
        dropout: the probability that an element is dropped. Dropout is applied to tokens, attention
            weights and the results of the two parts.

    Raises:
        ValueError: the width is not a multiple of twice the number of heads.
    """

    def __init__(
        self, features: int, channels: int, outputs: int, heads: int = 2, dropout: float = 0.1
    ):
        super().__init__()
        if channels % (2 * heads):
            raise ValueError(
                f"patchgd.head_channels is {channels}, but attention of {heads} heads needs a "
                f"multiple of {2 * heads}: choose such a number"
            )
        self.heads, self.embed = (
            heads,
            nn.Identity() if features == channels else nn.Linear(features, channels),
        )
        self.image = nn.Parameter(torch.randn(1, 1, channels))
        self.before, self.between, self.behind = (nn.LayerNorm(channels) for _ in range(3))
        self.project, self.joined = (
            nn.Linear(channels, 3 * channels, bias=False),
            nn.Linear(channels, channels),
        )
        self.wider, self.narrower = (
            nn.Linear(channels, 3 * channels),
            nn.Linear(3 * channels, channels),
        )
        (
            self.drop_tokens,
            self.drop_weights,
            self.drop_joined,
            self.drop_wider,
            self.drop_narrower,
        ) = (nn.Dropout(dropout) for _ in range(5))
        self.last = nn.Linear(channels, outputs)

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.embed(z.flatten(2).transpose(1, 2))
        tokens = torch.cat((self.image.expand(len(z), -1, -1), tokens), 1)
        tokens = self.drop_tokens(tokens + places_of(tokens.shape[1:2], tokens))
        tokens = tokens + self.drop_joined(self.joined(self._attended(self.before(tokens))))
        wide = self.drop_wider(F.gelu(self.wider(self.between(tokens))))
        return self.last(self.behind(tokens + self.drop_narrower(self.narrower(wide)))[:, 0])

    def _attended(self, tokens: Tensor) -> Tensor:
        """Apply multi-head self-attention to tokens, and return the result of the same shape.

        The shape is (N, tokens, channels). The projection after the attention is not applied.
        """
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in self.project(tokens).chunk(3, -1)
        )
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
        return (self.drop_weights(weights) @ value).transpose(1, 2).flatten(2)


class ConvHead(nn.Module):
    """Convolutional head for grids of any size: (N, s, *grid) -> (N, K).

    It has two 3-wide convolutions with batch norm, a mean or maximum over all positions of the
    grid, and a linear layer.

    Args:
        features, channels, outputs: s features per patch, the width of the head, K outputs.
        dims: the number of dims of the grid.
        largest: True for the maximum over all positions, False for the mean.
    """

    def __init__(
        self, features: int, channels: int, outputs: int, dims: int = 2, largest: bool = False
    ):
        super().__init__()
        self.largest = largest
        conv, norm = _CONV[dims - 1], _NORM[dims - 1]
        self.first, self.second = (
            conv(features, channels, 3, padding=1, bias=False),
            conv(channels, channels, 3, padding=1, bias=False),
        )
        # Without these norms the network does not learn from a few thousand images.
        self.norm_first, self.norm_second = norm(channels), norm(channels)
        self.last = nn.Linear(channels, outputs)

    def forward(self, z: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm_first(self.first(z)), 0.1)
        y = F.leaky_relu(self.norm_second(self.second(y)), 0.1)
        return self.last(y.flatten(2).amax(2) if self.largest else y.flatten(2).mean(2))


class TransformerHead(nn.Module):
    """Transformer head for grids of any size: (N, s, *grid) -> (N, K).

    The patches are the tokens. A sinusoidal encoding of the patch's position is added to each
    token. A transformer encoder reads the tokens (:class:`torch.nn.TransformerEncoder`). A linear
    layer takes the mean of the encoder's output over the tokens.

    Args:
        features, channels, outputs: s features per patch, the width of the head, K outputs.
        layers: the number of layers of the transformer encoder.
        heads: the number of attention heads, among which the width is divided.

    Raises:
        ValueError: the width is not a multiple of twice the number of heads.
    """

    def __init__(self, features: int, channels: int, outputs: int, layers: int = 2, heads: int = 4):
        super().__init__()
        if channels % (2 * heads):
            raise ValueError(
                f"patchgd.head_channels is {channels}, but a transformer of {heads} heads needs a "
                f"multiple of {2 * heads}: choose such a number"
            )
        self.embed, self.last = nn.Linear(features, channels), nn.Linear(channels, outputs)
        layer = nn.TransformerEncoderLayer(
            channels, heads, 2 * channels, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.embed(z.flatten(2).transpose(1, 2))
        return self.last(self.encoder(tokens + places_of(z.shape[2:], tokens)).mean(1))


def places_of(grid: Sequence[int], like: Tensor) -> Tensor:
    """Return the sinusoidal encoding of each position of a grid, (positions, channels).

    It consists of sines and cosines of the position along each dim, with wavelengths from 2 pi to
    10,000 x 2 pi (Vaswani et al., 2017). Each dim has an equal number of channels; channels that
    remain are 0.

    Args:
        grid: the size of the grid.
        like: a tensor (..., channels) with the number of channels, the dtype and the device of the
            encoding.
    """
    channels = like.shape[-1]
    each = channels // (2 * len(grid))
    exact = dict(device=like.device, dtype=torch.float64)
    rates = torch.exp(-math.log(10000.0) * torch.arange(each, **exact) / max(each, 1))
    at = torch.stack(
        torch.meshgrid(*(torch.arange(n, **exact) for n in grid), indexing="ij"), -1
    ).flatten(0, -2)
    angles = (at.unsqueeze(-1) * rates).flatten(1)
    found = torch.cat((angles.sin(), angles.cos()), 1)
    return F.pad(found, (0, channels - found.shape[1])).to(like.dtype)
