"""Convolutions whose weights' gradients wait: the gradients of plain autograd, whatever the convolution, and no others' business."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from distseg.comm.memory_format import channels_last, lies_alike
from distseg.comm.waits import Waits
from distseg.layers.conv import weights_apart


class Checkpointed(nn.Conv2d):
    """Computed again in the backward pass, where nothing is put off."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


LAYERS = {
    "3x3": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "no bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=(2, 1)),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 5, groups=4, padding=2),
    "same": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "even same": lambda: nn.Conv2d(4, 6, 4, padding="same"),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "reflect": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed groups": lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False),
    "transposed dilation": lambda: nn.ConvTranspose2d(4, 6, 3, dilation=2),
    "checkpointed": lambda: Checkpointed(4, 6, 3),
    "block": lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 1)),
}


def gradients(layer: nn.Module, x, apart: bool, autocast: bool = False) -> dict:
    """Of the inputs and of the parameters; what is put off is checked to be all of what there is, and done at its action."""
    layer, x = copy.deepcopy(layer), x.clone(memory_format=torch.preserve_format).requires_grad_()
    waits = Waits()
    with (
        weights_apart(waits)({}) if apart else torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        y = layer(x) + layer(0.5 * x)  # its weights are shared by two places
    with waits.putting_off():
        with waits.until("W0,0"):
            y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
        before = [name for name, p in layer.named_parameters() if p.grad is not None]
        waits.finish("W0,0")
        after = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"x": x.grad, **after, "at once": before, "y": y.detach()}


def same(found: dict, wanted: dict, tolerance: float) -> None:
    for name in wanted.keys() - {"at once"}:
        assert found[name].dtype == wanted[name].dtype
        assert (found[name].double() - wanted[name].double()).norm() <= tolerance * wanted[
            name
        ].double().norm(), name
        assert name in ("x", "y") or lies_alike(found[name], wanted[name]), f"{name} lies otherwise"


@pytest.mark.parametrize("last", ["", "layer", "map", "layer, map"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_autograds(name, last):
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), torch.randn(2, 4, 11, 9, dtype=torch.float64)
    layer = layer.to(memory_format=torch.channels_last) if "layer" in last else layer
    x = x.to(memory_format=torch.channels_last) if "map" in last else x
    found, wanted = gradients(layer, x, True), gradients(layer, x, False)
    same(found, wanted, 1e-14)
    assert found["at once"] == (["weight", "bias"] if name == "even same" else [])
    assert found["y"].is_contiguous(memory_format=torch.channels_last) == wanted["y"].is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("dims", [1, 3])
def test_lines_and_volumes(dims):
    torch.manual_seed(0)
    conv, transposed = ((nn.Conv1d, nn.ConvTranspose1d), None, (nn.Conv3d, nn.ConvTranspose3d))[
        dims - 1
    ]
    layer = nn.Sequential(conv(4, 5, 3, padding=1), transposed(5, 6, 2, stride=2)).double()
    x = torch.randn(1, 4, *[8, 6, 5][:dims], dtype=torch.float64).contiguous(
        memory_format=channels_last(dims + 2)
    )
    found = gradients(layer, x, True)
    same(found, gradients(layer, x, False), 1e-14)
    assert found["at once"] == []


@pytest.mark.parametrize("last", [False, True])
def test_in_bf16_to_the_last_bit(last):
    torch.manual_seed(0)
    layer, x = LAYERS["3x3"](), torch.randn(2, 4, 16, 16)
    if last:
        layer, x = (
            layer.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    found, wanted = (
        gradients(layer, x, True, autocast=True),
        gradients(layer, x, False, autocast=True),
    )
    same(found, wanted, 1e-2)
    assert found["y"].dtype == torch.bfloat16 and torch.equal(found["y"], wanted["y"])


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
def test_frozen_parameters_get_none(frozen):
    layer, x = LAYERS["3x3"]().double(), torch.randn(2, 4, 11, 9, dtype=torch.float64)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    found = gradients(layer, x, True)
    same(found, gradients(layer, x, False), 1e-14)
    assert found["at once"] == [
        name for name in ("bias",) if "weight" in frozen and name not in frozen
    ]


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(
            x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias
        )


def watched() -> nn.Module:
    layer = nn.Conv2d(4, 6, 3)
    layer.weight.register_hook(lambda g: 2 * g)
    return layer


PLAIN = {
    "parametrized": lambda: weight_norm(nn.Conv2d(4, 6, 3)),
    "computed": lambda: Standardised(4, 6, 3),
    "watched": watched,
}


@pytest.mark.parametrize("name", PLAIN)
def test_weights_that_are_computed_or_watched_stay_with_autograd(name):
    torch.manual_seed(0)
    layer, x = PLAIN[name]().double(), torch.randn(2, 4, 11, 9, dtype=torch.float64)
    if name == "watched":  # a copy has no hooks
        layer.weight.__deepcopy__ = lambda memo: layer.weight
    found = gradients(layer, x, True)
    assert len(found["at once"]) == len(list(layer.parameters()))
    for p in layer.parameters():
        p.grad = None
    same(found, gradients(layer, x, False), 1e-14)


def test_without_gradients_and_outside_of_steps_nothing_is_put_off():
    layer, x = LAYERS["3x3"](), torch.randn(1, 4, 8, 8)
    with weights_apart(Waits())({}), torch.no_grad():
        assert layer(x).grad_fn is None
    with weights_apart(Waits())({}):
        y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
