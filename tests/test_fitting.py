"""Parts of feature maps: the gradient of a slice, in the memory format of the whole map."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import distseg
from distseg.comm.memory_format import channels_last, lies_last
from distseg.comm.mesh import Mesh
from distseg.layers.fitting import cropped, cropped_input, taken_from, taken_from_result
from distseg.layers.layer_table import run
from distseg.tiling.layout import LayerView
from distseg.tiling.tile import Box

SIZES = [(9,), (7, 6), (5, 4, 6)]
PARTS = {  # name: (first cell, number of cells to leave out at the end)
    "at the start": (0, 2),
    "at the end": (2, 0),
    "inside": (1, 1),
    "one cell": (2, 1),
}


def made(size, images, last):
    torch.manual_seed(0)
    x = torch.randn(images, 3, *size, dtype=torch.float64)
    return x.contiguous(memory_format=channels_last(x.dim())) if last else x


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", SIZES)
def test_gradient_of_a_part(size, part, last, images):
    before, after = PARTS[part]
    start = (before,) * len(size)
    stop = tuple(n - after if part != "one cell" else before + 1 for n in size)
    wanted = tuple(b - a for a, b in zip(start, stop))
    x = made(size, images, last)
    g = torch.randn(images, 3, *wanted, dtype=torch.float64)
    found = {}
    for function in (
        lambda x: taken_from(x, start, wanted),
        lambda x: taken_from_result(x, start, wanted),
        lambda x: cropped(x, Box.whole(size), Box(start, stop)),
        lambda x: cropped_input(x, Box.whole(size), Box(start, stop)),
    ):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        assert torch.equal(y.detach(), x[(..., *map(slice, start, stop))])
        (found[function],) = torch.autograd.grad(y, leaf, g)
    first, *others = found.values()
    assert all(torch.equal(first, other) for other in others)
    for fast in (others[0], others[2]):
        assert lies_last(fast) == lies_last(x) and fast.is_contiguous() == x.is_contiguous()


class Operations(TorchDispatchMode):
    """Notes the operations that run, and the strides of their tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.found.append((function.__name__.partition(".")[0], [lies_last(x) for x in tensors]))
        return function(*args, **(kwargs or {}))


def test_an_activation_in_place_behind_a_convolution_copies_nothing():
    """The tile at the left border of an image computes one column too many, which is cut off."""
    torch.manual_seed(0)
    conv, size = nn.Conv2d(4, 4, 3, padding=1), (8, 12)
    image = made(size, 1, True).float()
    image = torch.cat((image, image[:, :1]), 1).contiguous(memory_format=torch.channels_last)
    window, tile = Box((0, 0), (8, 7)), Box((0, 0), (8, 6))
    part = LayerView(size, tile, window, window, Box((-1, -1), (9, 7)), tile, size)
    x = cropped(image, Box.whole(size), window).clone(memory_format=torch.channels_last)
    x.requires_grad_()
    y = F.leaky_relu_(run(conv, x, window, part))
    wanted = F.leaky_relu(conv(image))[..., :6]
    assert torch.allclose(y, wanted, atol=1e-6)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(wanted, conv.weight, g)
    with Operations() as mode:
        (found,) = torch.autograd.grad(y, conv.weight, g)
    assert torch.allclose(found, dx, atol=1e-5)
    names = [name for name, _ in mode.found]
    assert names.count("copy_") == 1 and "clone" not in names, names
    (formats,) = [formats for name, formats in mode.found if name == "leaky_relu_backward"]
    assert formats == [True, True]


def test_a_part_that_is_only_read_cannot_be_modified():
    x = made((7, 6), 1, True).requires_grad_()
    part = cropped_input(x, Box.whole((7, 6)), Box((0, 0), (3, 6)))
    with pytest.raises(RuntimeError, match="inplace"):
        part.mul_(2)


@pytest.mark.parallel([1, 3])
@pytest.mark.parametrize("padding", [nn.ZeroPad2d, nn.ReplicationPad2d])
def test_padding_that_adds_nothing_to_a_tile_may_be_overwritten(comm, padding):
    """The middle tile gets no padding; PyTorch's pad would be a new tensor all the same."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 2, (1, 3)),
        nn.LeakyReLU(inplace=True),
        padding((1, 1, 0, 0)),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 3, 1),
    ).double()
    module, image = copy.deepcopy(plain), torch.randn(1, 1, 6, 27).double()
    target = torch.randint(3, (1, 6, 27))
    F.cross_entropy(plain(image), target).backward()
    model = distseg.distribute(module, Mesh(comm, tiles=(1, comm.size)))
    model.backward(image, target, nn.CrossEntropyLoss())
    for p, q in zip(module.parameters(), plain.parameters()):
        assert (p.grad - q.grad).abs().max() <= 1e-14
