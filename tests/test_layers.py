"""Skips as a pair of layers."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from distseg.layers.skip import DensePop
from distseg.models.layers import Add, Pop, Stash, cut_to, outline, skip_store


class AddOne(nn.Module):
    def forward(self, x):
        return x + 1


def test_a_skip_comes_first_in_the_channels():
    x = torch.zeros(1, 2, 3, 3)
    y = nn.Sequential(Stash("a"), AddOne(), Pop("a"))(x)
    assert y[0, :, 0, 0].tolist() == [0, 0, 1, 1]


def test_nested_skips_meet_their_own():
    x = torch.zeros(1, 1, 1, 1)
    y = nn.Sequential(Stash("a"), AddOne(), Stash("b"), AddOne(), Pop("b"), AddOne(), Pop("a"))(x)
    assert y.flatten().tolist() == [0, 2, 3]


def test_pop_cuts_what_rounding_up_added():
    with skip_store({"a": torch.ones(1, 1, 3, 5)}):
        y = Pop("a")(torch.arange(24.0).view(1, 1, 4, 6))
    assert y[0, 1].tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10], [12, 13, 14, 15, 16]]
    volume = torch.zeros(2, 1, 4, 4, 4)
    assert cut_to(volume, torch.zeros(2, 3, 4, 3, 2)).shape == (2, 1, 4, 3, 2)


def test_gradients_flow_through_both_ways():
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    nn.Sequential(Stash("a"), AddOne(), Pop("a"))(x).sum().backward()
    assert x.grad.flatten().tolist() == [2, 2, 2, 2]


def test_pop_before_stash_is_named():
    with (
        skip_store({}),
        pytest.raises(ValueError, match=r"pop\('a'\) comes before any stash\('a'\)"),
    ):
        Pop("a")(torch.zeros(1, 1, 1, 1))


def test_every_store_is_its_own():
    outer, inner = {}, {}
    with skip_store(outer):
        with pytest.raises(RuntimeError), skip_store(inner):
            Stash("a")(torch.ones(1))
            raise RuntimeError
        Stash("b")(torch.zeros(1))
    assert (list(outer), list(inner)) == (["b"], ["a"])


def test_threads_do_not_see_each_others_skips():
    seen = []

    def other():
        try:
            Pop("a")(torch.zeros(1, 1, 1, 1))
        except ValueError:
            seen.append("nothing")

    with skip_store({}):
        Stash("a")(torch.ones(1, 1, 1, 1))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == ["nothing"]
        assert Pop("a")(torch.zeros(1, 1, 1, 1)).flatten().tolist() == [1, 0]


def test_layers_show_their_skip():
    assert (repr(Stash("a")), repr(Pop("b"))) == ("Stash('a')", "Pop('b')")


def test_an_added_skip():
    model = nn.Sequential(Stash("a"), nn.Conv2d(2, 2, 3, padding=2, bias=False), Add("a"))
    x = torch.randn(1, 2, 5, 7)
    assert torch.allclose(model(x), x + model[1](x)[..., :5, :7])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_twin_of_a_pop_has_its_gradients_and_they_are_dense(layout):
    seen = []
    results = []
    for pop in (Pop("a"), DensePop("a")):
        skip, x = (
            torch.arange(96.0).view(1, 6, 4, 4).contiguous(memory_format=layout).requires_grad_()
            for _ in range(2)
        )
        up = x * 1
        up.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=layout)))
        with skip_store({"a": skip}):
            y = pop(up)
        (
            y * torch.arange(y.numel()).view(y.shape).contiguous(memory_format=layout)
        ).sum().backward()
        results.append((y, skip.grad, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert seen[1]


MODELS = [
    nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2, ceil_mode=True), nn.Dropout(0.5), nn.ConvTranspose2d(4, 2, 2, 2)),
    nn.Sequential(Stash("a"), nn.MaxPool2d(2, ceil_mode=True), nn.Upsample(scale_factor=2), Pop("a"), Stash("b"), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), Add("b")),
    nn.Sequential(nn.Upsample(scale_factor=(1.5, 2), mode="bilinear"), nn.Upsample((31, 9)), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Upsample(7)),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=["norms", "skips", "resized"])
@pytest.mark.parametrize("size", [13, 22])
def test_an_outline_has_the_sizes_of_its_model(model, size):
    with skip_store({}):
        found = outline(model)(torch.empty(2, 3, size, size, device="meta"))
        wanted = model.eval()(torch.zeros(2, 3, size, size))
    assert (found.shape, found.dtype, found.is_meta) == (wanted.shape, wanted.dtype, True)


@pytest.mark.slow
def test_a_step_keeps_compilers_out_of_the_process():
    program = """
import sys
from mpi4py import MPI
from distseg.config.settings import Config, ModelConfig
from distseg.config.sizes import Size
from distseg.training.verify import verify
config = Config(model=ModelConfig(depth=1, num_convs=1, base_channels=2, norm="batch", out_channels=2))
print(verify(config, MPI.COMM_WORLD, Size("16x16"))["max_error"] < 1e-12, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done
