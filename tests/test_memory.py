"""Weights in memory: copied where they lie with gaps, refused where two lie in one place."""

import pytest
import torch
from torch import nn

from distseg.models.dense_weights import own_memory

FLAT = torch.arange(72.0)


def model_of(**weights) -> nn.Module:
    model = nn.Module()
    for name, weight in weights.items():
        parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        model.register_parameter(name, parameter)
    return model


@pytest.mark.parametrize(
    "weight, strides",
    [
        (FLAT.view(4, 2, 9)[:, :1], (9, 9, 1)),  # with gaps
        (FLAT.view(4, 2, 9)[::2], (18, 9, 1)),
        (FLAT.view(4, 2, 9).transpose(0, 1), (9, 18, 1)),  # dense in another order: left as it is
        (FLAT.view(4, 2, 9).transpose(0, 1)[:, ::2], (9, 18, 1)),
        (FLAT[:1].view(1, 1, 1).expand(1, 1, 1), (1, 1, 1)),
    ],
)
def test_weights_become_dense(weight, strides):
    model = model_of(w=weight)
    before, parameter = weight.clone(), model.w
    own_memory(model)
    assert model.w is parameter and torch.equal(model.w, before) and model.w.stride() == strides


def test_views_of_one_memory_that_share_no_number_stay():
    both = FLAT.view(8, 9)
    model = model_of(left=both[:, :4], right=both[:, 4:])
    own_memory(model)
    assert model.left.is_contiguous() and torch.equal(torch.cat((model.left, model.right), 1), both)
    halves = model_of(first=FLAT[:36], second=FLAT[36:])
    own_memory(halves)
    assert halves.first.data_ptr() == FLAT.data_ptr(), "dense weights are not copied"


def test_one_parameter_in_two_places_is_one():
    weight = nn.Parameter(FLAT.clone())
    own_memory(model_of(a=weight, b=weight))


def test_frozen_weights_may_share_memory():
    own_memory(model_of(a=FLAT, b=FLAT[3:9]).requires_grad_(False))


FROZEN = nn.Parameter(FLAT[70:], requires_grad=False)


@pytest.mark.parametrize("other", [FLAT[30:40], FLAT[3:60:7], FROZEN])
def test_weights_in_one_place_are_refused(other):
    with pytest.raises(ValueError, match="a and b are two tensors of the model in the same memory"):
        own_memory(model_of(a=FLAT, b=other))


def test_a_weight_in_the_memory_of_a_buffer_is_refused():
    model = model_of(a=FLAT[:9])
    model.register_buffer("mean", FLAT[8:10])
    with pytest.raises(ValueError, match="a and mean are two tensors"):
        own_memory(model)


def test_expanded_weights_are_refused():
    with pytest.raises(ValueError, match=r"the weight w \(4x3x9\) share one place"):
        own_memory(model_of(w=FLAT[:36].view(4, 1, 9).expand(4, 3, 9)))


def test_models_without_memory_pass():
    own_memory(nn.Conv2d(3, 4, 3, device="meta"))
