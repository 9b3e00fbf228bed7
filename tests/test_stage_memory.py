"""The memory of a rank of a pipeline: by hand, and the feature maps that travel."""

import pytest
from torch import nn

from distseg.config.settings import LossConfig
from distseg.layers.loss import Loss
from distseg.models.layers import Pop, Stash
from distseg.models.network import calls_of
from distseg.models.unet import unet
from distseg.planning.balance import even_split
from distseg.planning.held import Policy
from distseg.planning.live_tensors import TileSizes, tensors_of
from distseg.planning.stage_memory import TileMemory, maps_of_stage
from distseg.runtime.partition import Partition

PLANE = 4 * 8 * 32 * 32  # bytes of 8 channels of 32x32 cells


def conv(a: int, b: int) -> nn.Module:
    return nn.Conv2d(a, b, 1, bias=False)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_maps_of_a_stage_are_those_of_the_partition(stages):
    calls = calls_of(unet(2, 1, 4, 3, 2))
    partition = Partition.from_balance(calls, even_split(len(calls), stages))
    for stage, layers in enumerate(partition.ranges):
        incoming, outgoing = maps_of_stage(tuple(call.reads for call in calls), layers)
        assert incoming == {edge.map for edge in partition.incoming(stage)}
        assert outgoing == {edge.map for edge in partition.outgoing(stage)}


def test_memory_of_a_stage_by_hand():
    """Cut layers with a skip into  conv0 act0 stash | pool conv1 up | pop conv2."""
    model = nn.Sequential(
        conv(3, 8),
        nn.LeakyReLU(),
        Stash("a"),
        nn.MaxPool2d(2),
        conv(8, 8),
        nn.Upsample(scale_factor=2),
        Pop("a"),
        conv(16, 2),
    )
    tensors = tensors_of(model, (32, 32), 1, "fp32", False, Loss(LossConfig(), 2))
    memory = TileMemory(tensors, TileSizes.whole(8), step_images=4)
    policy = Policy(4, "1f1b", "always", optimizer_copies=1)
    first, middle, last = (
        memory.of_stage(layers, stage, 3, policy)
        for stage, layers in enumerate((range(3), range(3, 6), range(6, 8)))
    )
    assert middle[:3] == (4 * 64,) * 3 and middle.total == sum(middle)
    assert first.images == 4 * 4 * 3 * 32 * 32 and middle.images == 0
    assert last.images == 4 * 8 * 32 * 32  # labels
    # The middle stage in a backward pass. It holds all of one micro-batch (pool's input, the indices
    # of its maxima, its result, the stage's output), the input of another one, buffers of an input,
    # of a gradient and of an output that leaves, and gradients of the output and of pool's input.
    # The optimizer counts its steps in 4 bytes.
    planes = 1 + 0.5 + 0.25 + 1 + 1 + 3 + 2
    assert middle.activations == pytest.approx(1.01 * (planes * PLANE + 4))
