"""The zoo against the paper's table, and the U-Net as plain PyTorch."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distseg.cli.models import describe_model
from distseg.config.settings import ModelConfig
from distseg.models.bands import channels_of
from distseg.models.network import channels_of_maps
from distseg.models.unet import unet
from distseg.models.zoo import ZOO, build_model

PAPER = {  # parameters and layers of the paper's table; stride, halo measured; the slides' formula
    "summit-small": (72_301_856, 109, 32, 190, 92),
    "summit-medium-1": (232_687_904, 241, 32, 475, 230),
    "summit-medium-2": (289_357_088, 129, 64, 382, 188),
    "summit-large": (1_157_578_016, 149, 128, 766, 380),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_table(name):
    found = describe_model(name)
    assert (
        tuple(found[k] for k in ("parameters", "layers", "stride", "halo", "paper_halo"))
        == PAPER[name]
    )


def test_the_other_networks_have_no_halo_of_the_papers():
    for name in ZOO.keys() - PAPER.keys():
        found = describe_model(name)
        assert (found["name"], found["paper_halo"]) == (name, None)


def plain_unet(model: nn.Sequential, x: torch.Tensor, depth: int, num_convs: int) -> torch.Tensor:
    """The same network as functions on its weights: instance norm, nearest up-sampling, no dropout."""
    w = dict(model.named_parameters())

    def crop(t, like):
        return t[..., : like.shape[2], : like.shape[3]]

    def block(name, x):
        for k in range(num_convs):
            x = F.leaky_relu(
                F.instance_norm(F.conv2d(x, w[f"{name}_conv{k}.weight"], padding=1)), 0.01
            )
        return x

    skips = []
    for level in range(depth):
        x = block(f"enc{level}", x)
        skips.append(x)
        x = F.max_pool2d(x, 2, ceil_mode=True)
    x = block("mid", x)
    for level in reversed(range(depth)):
        x = crop(F.interpolate(x, scale_factor=2.0), skips[level])
        x = block(f"dec{level}", torch.cat((skips[level], x), 1))
    return F.conv2d(x, w["head.weight"])


def test_the_network_is_what_its_docstring_says():
    torch.manual_seed(0)
    model = unet(
        depth=3, num_convs=2, base_channels=4, in_channels=3, out_channels=2, dropout=0
    ).double()
    x = torch.randn(2, 3, 29, 43, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain_unet(model, x, 3, 2), rtol=1e-10, atol=1e-12)


def test_layers_have_these_names_in_this_order():
    names = [name for name, _ in unet(depth=1, num_convs=1, base_channels=2).named_children()]
    assert (
        names
        == (
            "enc0_conv0 enc0_drop0 enc0_norm0 enc0_act0 enc0_stash enc0_pool "
            "mid_conv0 mid_drop0 mid_norm0 mid_act0 "
            "dec0_up dec0_pop dec0_conv0 dec0_drop0 dec0_norm0 dec0_act0 head"
        ).split()
    )


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (16, 16), (29, 43)])
@pytest.mark.parametrize("up", ["nearest", "bilinear", "transposed"])
@pytest.mark.parametrize("norm", ["instance", "batch", "group", "none"])
def test_plain_sequential_on_any_size(norm, up, size):
    model = unet(
        depth=2, num_convs=1, base_channels=4, in_channels=2, out_channels=3, norm=norm, up=up
    )
    model.train(norm != "instance" and min(size) > 4)
    if norm == "instance" and min(size) < 5:
        size = (9, 11)  # PyTorch refuses instance norm of one pixel
    assert type(model) is nn.Sequential
    assert model(torch.zeros(2, 2, *size)).shape == (2, 3, *size)


def test_volumes():
    model = unet(
        depth=2, num_convs=1, base_channels=2, in_channels=1, dims=3, norm="group", up="bilinear"
    )
    assert model(torch.zeros(1, 1, 5, 6, 7)).shape == (1, 1, 5, 6, 7)


def test_deep_copies_are_apart():
    model = unet(depth=2, num_convs=1, base_channels=4, dropout=0)
    x = torch.randn(1, 4, 9, 9)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not torch.equal(twin(x), model(x))


def test_groups_follow_the_channels():
    model = unet(depth=1, num_convs=2, base_channels=6, norm="group", groups=4)
    assert [(m.num_channels, m.num_groups) for m in model if isinstance(m, nn.GroupNorm)] == [
        (6, 2),
        (6, 2),
        (12, 4),
        (6, 2),
        (3, 1),
        (3, 1),
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(depth=0), "model.depth must be a whole number of at least 1, got 0"),
        (dict(depth=2.0), "model.depth must be a whole number of at least 1, got 2.0"),
        (dict(num_convs=0), "model.num_convs"),
        (dict(in_channels=0), "model.in_channels"),
        (dict(out_channels=-1), "model.out_channels"),
        (dict(groups=0), "model.groups"),
        (dict(base_channels=5), "model.base_channels must be even .*, got 5"),
        (dict(dropout=1.0), r"model.dropout must be a probability in \[0, 1\), got 1.0"),
        (dict(dropout=float("nan")), "model.dropout must be a probability"),
        (dict(norm="layer"), "model.norm must be one of instance, batch, group, none, got 'layer'"),
        (dict(up="cubic"), "model.up must be one of nearest, bilinear, transposed, got 'cubic'"),
        (dict(dims=1), "2 and 3 spatial dims, got dims=1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        unet(**arguments)


def test_weights_come_from_the_configs_seed_alone():
    def tiny(seed):
        return build_model(ModelConfig("tiny", seed=seed)).head.weight

    state = torch.get_rng_state()
    first = tiny(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(first, tiny(3)) and not torch.equal(first, tiny(4))


def test_channels_follow_the_data_unless_they_disagree():
    assert channels_of(build_model(ModelConfig("tiny", in_channels=None), 5, 7)) == (5, 7)
    assert channels_of(build_model(ModelConfig("summit-small", depth=1, base_channels=2))) == (4, 1)
    with pytest.raises(ValueError, match="model.in_channels is 4, but the data has 3"):
        build_model(ModelConfig("tiny", in_channels=4), 3)


def my_model(in_channels=1, out_channels=1):
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def test_a_users_own_function():
    found = build_model(ModelConfig(f"{__name__}:my_model"), 4, 2)
    assert (type(found), channels_of(found)) == (nn.Conv2d, (4, 2))


@pytest.mark.parametrize(
    "name, message",
    [
        ("resnet", "unknown model 'resnet': choose unet, summit-small.*package.module:function"),
        ("nowhere:model", "'nowhere:model' cannot be imported.*PYTHONPATH"),
        (f"{__name__}:nothing", "cannot be imported"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig(name))


def test_a_model_without_convolutions_has_no_channels_to_tell():
    with pytest.raises(ValueError, match="no convolution layer"):
        channels_of(nn.Linear(2, 2))


def test_gigapixel_has_its_parameters_and_is_the_only_table_of_its_kind():
    """Three convolutions down, one, three up; odd kernels no larger, channels no fewer towards the middle."""
    model = build_model(ModelConfig(name="gigapixel-4492"))
    convs = [layer for layer in model if isinstance(layer, nn.modules.conv._ConvNd)]
    assert len(convs) == 7 and sum(p.numel() for p in model.parameters()) == 4492
    odd, tables = range(3, 12, 2), []
    for a, b, c in itertools.product(range(2, 17), repeat=3):
        for k, l, m, n in itertools.product(odd, repeat=4):
            if a <= b <= c and k >= l >= m:
                down = a * (k * k + 1) + b * (a * l * l + 1) + c * (b * m * m + 1)
                up = b * (c * m * m + 1) + a * (b * l * l + 1) + a * k * k + 1
                if down + c * (c * n * n + 1) + up == 4492:
                    tables.append((a, b, c, k, l, m, n))
    assert len(tables) == 4 and [t for t in tables if t[0] > 2] == [(4, 4, 5, 9, 9, 5, 3)]


@pytest.mark.parametrize("size", [(64, 96), (97, 131), (1, 33)])
def test_gigapixel_takes_any_size(size):
    model = build_model(ModelConfig(name="gigapixel-4492"))
    assert model(torch.randn(2, 1, *size)).shape == (2, 1, *size)


def test_gigapixel_refuses_what_it_can_not_be():
    with pytest.raises(
        ValueError, match="equal numbers of bands and outputs, got 3 bands and 2 outputs"
    ):
        build_model(ModelConfig(name="gigapixel-4492"), 3, 2)
    with pytest.raises(
        ValueError, match="gigapixel-4492 cannot take every setting of the section model .*depth"
    ):
        build_model(ModelConfig(name="gigapixel-4492", depth=3))


def test_layers_whose_channels_do_not_fit_are_named():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(9, 2, 1))
    with pytest.raises(ValueError, match=r"layer 1, Conv2d\(9, .* input of 8 channels \("):
        channels_of_maps(model)
