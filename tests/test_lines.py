"""Statistics of rows and columns (:mod:`made_lines`): what they were, and the serial program's gradient, in tiles and streamed ones."""

from dataclasses import replace

import made_lines
import pytest
import torch
from made_store import random_store
from safetensors.torch import load_file
from test_exact import TOLERANCE, config

import distseg
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.training.checkpoint.files import find
from distseg.training.loop import train
from distseg.training.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(streamed=(3, 2), exchange_every="1"), dict(tiles_per_rank=(2, 2))],
    2: [dict(tiles="1x2", exchange_every="2", images=2), dict(stages=2, streamed=(2, 1))],
    4: [dict(tiles="2x2"), dict(tiles="2x1", stages=2)],
}
SIZES = {1: "33x41", 2: "41x41", 4: "40x33"}


def assert_same(model, sizes, channels=2):
    network = distseg.capture(model)
    for images, size in sizes:
        x = torch.randn(images, channels, *size, dtype=torch.float64)
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
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("name", made_lines.FUNCTIONS)
def test_is_what_it_was(name):
    torch.manual_seed(0)
    assert_same(
        getattr(made_lines, f"with_{name}")(2, 3).double(),
        ((2, (13, 22)), (3, (33, 18)), (2, (17, 17))),
    )


def test_volumes_are_what_they_were():
    torch.manual_seed(0)
    assert_same(made_lines.with_volumes(2, 3).double(), ((2, (7, 9, 12)), (3, (9, 9, 9))))


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("name", made_lines.FUNCTIONS)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        plan = replace(
            config(**way),
            model=ModelConfig(f"{made_lines.__name__}:with_{name}", in_channels=3, out_channels=3),
        )
        report = verify(plan, comm, Size(SIZES[comm.size]))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way


@pytest.mark.parallel([2])
def test_volumes_are_exact(comm):
    plan = replace(
        config(tiles="1x2x1", tiles_per_rank=(2, 1, 1)),
        model=ModelConfig(f"{made_lines.__name__}:with_volumes", in_channels=2, out_channels=3),
    )
    report = verify(plan, comm, Size("9x11x13"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


@pytest.mark.parallel([1, 2])
def test_images_of_different_sizes_count_by_their_lines(comm, shared_path):
    """Running statistics of a norm of lines: every row counts once, however many pixels its image has."""
    if comm.rank == 0:
        random_store(shared_path / "store.h5", train=[(33, 41), (33, 71)])
    comm.Barrier()
    plan = replace(
        config(
            tiles="1x2" if comm.size == 2 else "1x1",
            images=1,
            accumulate=2,
            store=str(shared_path / "store.h5"),
        ),
        model=ModelConfig(f"{made_lines.__name__}:with_moments", in_channels=2, out_channels=3),
    )
    report = verify(plan, comm)
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize("name", ["coordinates", "moments"])
def test_streamed_images_of_different_sizes_count_by_their_lines(comm, shared_path, name):
    """A norm of lines over two images of a batch: windows of streamed tiles overlap, of one image by another share than of the other."""
    if comm.rank == 0:
        random_store(shared_path / "store.h5", train=[(27, 36), (42, 32)])
    comm.Barrier()
    tiles, found = "2x1" if comm.size == 2 else "1x1", {}
    for way, spatial in dict(
        memory={}, streamed=dict(streamed=Size("2x2"), scratch="memory")
    ).items():
        plan = config(
            tiles=tiles,
            images=2,
            store=str(shared_path / "store.h5"),
            epochs=1,
            validate_every=0,
            precision="fp64",
            loggers=[],
            output=str(shared_path / way),
            **spatial,
        )
        train(replace(plan, model=ModelConfig(f"{made_lines.__name__}:with_{name}")), comm)
        found[way] = {
            tensor: w
            for part in find(shared_path / way, "last").glob("weights-*")
            for tensor, w in load_file(part).items()
        }
    for tensor, w in found["memory"].items():
        torch.testing.assert_close(found["streamed"][tensor], w, rtol=0, atol=1e-12, msg=tensor)


@pytest.mark.parallel(4)
def test_stages_share_a_norm_of_one_vector_a_rank(comm):
    """Costs are modelled with the one image that a rank has, of which PyTorch's norm takes no statistics."""
    plan = replace(
        config(samples=2, stages=2, accumulate=2, norm_scope="step"),
        model=ModelConfig(f"{made_lines.__name__}:Gated", in_channels=3, out_channels=3),
    )
    report = verify(plan, comm, Size("24x20"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE
