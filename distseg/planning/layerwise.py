"""Run a network one layer at a time, each layer with its own autograd graph.

The network must be a list of layer calls. A layer's inputs are detached from the layers before it.
So each layer can be timed alone, and only its activations are in memory. Its output and the
tensors that autograd saves for it can be distinguished from those of other layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distseg.models.bands import channels_of
from distseg.models.layers import VectorNorm, skip_store
from distseg.models.network import calls_of
from distseg.tiling.graph import last_readings


class Alone:
    """One layer on detached inputs, which runs forward and backward without the rest of the model.

    Args:
        layer: the layer.
        inputs: the layer's inputs, which the constructor detaches.
        image: the index of the network's image among the inputs, or None if the layer does not read
            the image. The image needs no gradient.
        readers: the number of layers that read the result. Each reader gives a gradient.
    """

    def __init__(self, layer: nn.Module, inputs: Sequence[Tensor], image: int | None, readers: int):
        self.layer, self.image, self.readers = layer, image, readers
        self.inputs = [
            x.detach().requires_grad_(number != image) for number, x in enumerate(inputs)
        ]
        self.output: Tensor  # set by `forward`

    def forward(self) -> Tensor:
        """Return the layer's output, and keep it for :meth:`backward`."""
        with skip_store({}):
            self.output = self.layer(*map(_Alias.apply, self.inputs))
        return self.output

    def backward(self) -> list[Tensor]:
        """Run the backward pass, so that its time and memory can be measured.

        The gradient of the output is arbitrary. The gradients of parameters are computed and
        discarded; those of the inputs that need one are returned.
        """
        inputs = [t for t in (*self.inputs, *self.layer.parameters()) if t.requires_grad]
        if not (inputs and self.output.requires_grad):
            return []
        # The output serves as its own gradient, so none is allocated. There is one gradient per
        # reader, as autograd adds them up. A layer need not use all of its parameters.
        times = max(1, self.readers)
        found = torch.autograd.grad(
            [self.output] * times, inputs, [self.output.detach()] * times, allow_unused=True
        )
        maps = sum(t.requires_grad for t in self.inputs)
        return [gradient for gradient in found[:maps] if gradient is not None]


class _Alias(torch.autograd.Function):
    """Identity function whose result a layer may overwrite, as in-place activations do.

    It is needed because autograd refuses to overwrite a leaf that requires a gradient.
    """

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g


def alone(model: nn.Module, x: Tensor) -> Iterator[tuple[str, Alone]]:
    """Yield the name of each layer, and the layer with its inputs, in the order of a forward pass.

    The caller must run the layer's forward pass before it asks for the next layer.

    Args:
        model: a list of layer calls (an nn.Sequential or a distseg.Network).
        x: the images, (N, C, *size).
    """
    calls = calls_of(model)
    frees = last_readings([call.inputs for call in calls], range(len(calls)))
    readers = Counter(source for call in calls for source in call.reads)
    maps = {0: x}
    for number, call in enumerate(calls):
        found = Alone(
            call.layer,
            [maps[source] for source in call.inputs],
            call.inputs.index(0) if 0 in call.inputs else None,
            readers[number + 1],
        )
        yield call.name, found
        maps[number + 1] = found.output.detach()
        for source in frees[number]:
            del maps[source]


class Numbers:
    """Registry that gives tensor storages numbers, in the order in which it first sees them.

    Args:
        model: the model whose parameters and buffers :meth:`is_weight` recognises.

    Attributes:
        sizes: the bytes of each storage, by its number.
    """

    def __init__(self, model: nn.Module):
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}
        self._weights = {
            t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())
        }
        self._alive: list[Tensor] = []  # keeps all storages, so that no address is used again

    def is_weight(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies in the storage of a parameter or buffer."""
        return tensor.untyped_storage()._cdata in self._weights

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a storage seen first gets the next number."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(tensor.detach())
        return self._known[storage._cdata]


def copied(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a model in training mode with converted parameters and buffers.

    ``convert`` returns the tensor that takes the place of a parameter or buffer.

    Batch norms of vectors are put into evaluation mode. In training mode PyTorch refuses a batch of
    a single vector, and a rank may have only one, although all ranks together have several.
    """
    parameters = {id(p): _as_parameter(convert(p), p) for p in model.parameters()}
    made = copy.deepcopy(model, parameters | {id(b): convert(b) for b in model.buffers()}).train()
    for layer in made.modules():
        if isinstance(layer, VectorNorm):
            layer.eval()
    return made


def _as_parameter(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, like.requires_grad)


def random_input(model: nn.Module, size: Sequence[int], batch: int, device) -> Tensor:
    """Return random images (batch, C, *size) in the dtype of the model's weights."""
    return torch.randn(
        batch, channels_of(model)[0], *size, dtype=next(model.parameters()).dtype, device=device
    )
