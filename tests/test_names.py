"""Whatever a user's code calls its modules, parameters and buffers, networks hold them all."""

import pytest
import torch
from torch import nn

import distseg
from distseg.models.layers import Formula
from distseg.models.network import Network

NAMES = [
    "dropouts",
    "names",
    "multiple",
    "check",
    "reads",
    "of_image",
    "unused",
    "told",
    "cells_read",
    "hold_unused",
    "image",
    "result",
    "_put",
    "layers",
    "model",
    "weights",
    "steps",
]


def agrees(model, size=(8, 12)):
    torch.manual_seed(0)
    network, x = distseg.capture(model.double()), torch.randn(2, 2, *size, dtype=torch.float64)
    wanted, found = model(x), network(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    own = {network.names.get(name, name): p for name, p in network.named_parameters()}
    assert own.keys() == {name for name, _ in model.named_parameters()} and all(
        own[name] is p for name, p in model.named_parameters()
    )
    return network


class Named(nn.Module):
    """A convolution, one of the image beside it, a list and a parameter, each with a name that may be another's."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, nn.Conv2d(2, 6, 3, padding=1))
        self.add_module(f"{name}_", nn.Conv2d(2, 6, 1))
        self.list = nn.ModuleDict({name: nn.Conv2d(6, 6, 1)})
        self.inner = Weighted(name)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        first = getattr(self, self.name)(x)
        return self.head(
            self.inner(self.list[self.name](first.relu())) + getattr(self, f"{self.name}_")(x)
        )


class Weighted(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.rand(6, 1, 1)))
        self.register_parameter(f"left_{name}", nn.Parameter(torch.rand(3)))

    def forward(self, x):
        return x * getattr(self, self.name) + getattr(self, self.name).exp()


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_users_are_free(name):
    agrees(Named(name))


@pytest.mark.parametrize("name", ["steps", "reads", "made", "part", "weights", "inner", "filled"])
def test_tensors_of_a_formula_have_names_of_their_own(name):
    network = agrees(nn.Sequential(nn.Conv2d(2, 6, 1), Weighted(name), nn.Conv2d(6, 3, 1)))
    assert any(isinstance(layer, Formula) for layer in network.modules())


class Apart(nn.Module):
    """Parameters whose paths are one when their dots are underscores."""

    def __init__(self):
        super().__init__()

        def weight():
            return nn.Parameter(torch.rand(6, 1, 1))

        self.conv, self.weight, self.a_b_weight, self.a_left, self.a = (
            nn.Conv2d(2, 6, 1),
            weight(),
            weight(),
            weight(),
            nn.Module(),
        )
        self.a.b, self.a.left = nn.Module(), weight()
        self.a.b.weight = weight()

    def forward(self, x):
        return torch.addcmul(self.weight * self.a_b_weight, self.a.b.weight, self.conv(x))


def test_paths_are_told_apart():
    agrees(Apart())


@pytest.mark.parametrize("name", ["dropouts", "image", "block.forward", "check.conv"])
def test_a_network_by_hand_refuses_names_of_its_own(name):
    with pytest.raises(
        ValueError, match=f"the name of layer {name} contains .*, which networks use themselves"
    ):
        Network({name: nn.Conv2d(2, 3, 1)})
