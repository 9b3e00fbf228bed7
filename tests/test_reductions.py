"""Statistics of images, numbers made of their sizes, and functions of both (:mod:`made_reductions`): the serial program's gradient, in tiles and streamed ones."""

from dataclasses import replace

import made_reductions
import pytest
import torch
import torch.nn.functional as F
from test_exact import TOLERANCE, config

import distseg
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.models.capture.trace import CanNotCapture
from distseg.training.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(streamed=(3, 2), exchange_every="1")],
    2: [dict(tiles="2x1", exchange_every="2"), dict(stages=2, streamed=(2, 1))],
}


@pytest.mark.parametrize("name", made_reductions.FUNCTIONS)
def test_is_what_it_was(name):
    torch.manual_seed(0)
    model = getattr(made_reductions, f"with_{name}")(2, 3).double()
    network = distseg.capture(model)
    for images, size in ((1, (13, 22)), (3, (33, 18))):
        x = torch.randn(images, 2, *size, dtype=torch.float64)
        both = []
        for each in (model, network):
            y = each(x)
            both.append(
                (
                    y,
                    *torch.autograd.grad(
                        (y * y).sum(), list(model.parameters()), allow_unused=True
                    ),
                )
            )
        for wanted, found in zip(*both):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("name", made_reductions.FUNCTIONS)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        plan = replace(
            config(**way),
            model=ModelConfig(
                f"{made_reductions.__name__}:with_{name}", in_channels=3, out_channels=3
            ),
        )
        report = verify(plan, comm, Size("33x41"))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way


REFUSED = {
    "sort": (
        lambda m, x: x.flatten(2).sort(2)[0].view_as(x),
        "sort .* sorts all positions of the image; .*torch.topk",
    ),
    "median": (
        lambda m, x: x - x.flatten(2).median(-1).values[:, :, None, None],
        "median .* sorts all positions of the image",
    ),
    "quantile": (
        lambda m, x: x - x.flatten(2).quantile(0.9, dim=2)[:, :, None, None],
        "quantile .* sorts all positions of the image",
    ),
    "share of the places": (
        lambda m, x: (
            x * x.flatten(2).topk(x.shape[2] * x.shape[3] // 10)[0].mean(2)[..., None, None]
        ),
        "topk .* number of positions that depends on the image's size",
    ),
    "largest of rows": (
        lambda m, x: x * x.topk(2, dim=2)[0].mean((2, 3), keepdim=True),
        "topk .* sorts within rows or columns of the image",
    ),
    "number of the batch": (
        lambda m, x: x / (len(x) * x.shape[2]),
        "div .* number that depends on the number of images in the batch",
    ),
    "one weight for all": (
        lambda m, x: F.conv2d(x, m.fc(x.mean((0, 2, 3))).view(6, 1, 1, 1), groups=6),
        "mixes the images of a batch",
    ),
    "weights unfolded": (
        lambda m, x: F.conv2d(x, m.fc(x.mean((2, 3)))[:1].view(6, 1, 1, 1), groups=6),
        "selects some images of the batch",
    ),
    "weights transposed": (
        lambda m, x: F.conv_transpose2d(
            x.view(1, -1, *x.shape[2:]), m.fc(x.mean((2, 3))).view(-1, 1, 1, 1), groups=6 * len(x)
        ).view_as(x),
        "conv_transpose2d .* takes a feature map of .* where a feature map .N, C, H, W. is expected",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, why = REFUSED[name]
    with pytest.raises(CanNotCapture, match=why):
        distseg.capture(made_reductions.Made(function, 2, 3))
