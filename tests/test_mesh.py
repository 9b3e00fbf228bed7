"""Ranks on the axes of the mesh."""

import pytest
import torch.distributed as dist
from made_transports import over

from distseg.comm.launch import JointFailure, gathered, raise_jointly
from distseg.comm.mesh import Mesh, MeshShape


def test_the_modules_picture():
    """samples=2, tiles=(1, 2), stages=2."""
    shape = MeshShape(2, (1, 2), 2)
    assert (shape.size, shape.axes, str(shape)) == (
        8,
        (2, 1, 2, 2),
        "2 samples x (1x2) tiles x 2 stages",
    )
    assert shape.stage_ranks() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    "shape, size, stage_ranks",
    [
        (MeshShape(), 1, [[0]]),
        (MeshShape(3), 3, [[0, 1, 2]]),
        (MeshShape(1, "2x3"), 6, [[0, 1, 2, 3, 4, 5]]),
        (MeshShape(1, (1, 1), 3), 3, [[0], [1], [2]]),
        (MeshShape(2, (2, 1, 2)), 8, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_sizes_and_replicas(shape, size, stage_ranks):
    assert (shape.size, shape.stage_ranks()) == (size, stage_ranks)
    shape.check(size)


@pytest.mark.parametrize(
    "shape, ranks, message",
    [
        (
            MeshShape(2, "1x2"),
            1,
            r"a mesh of 2 samples x \(1x2\) tiles x 1 stages needs 4 ranks, but 1 is running: launch 4 \(mpirun -n 4 ... or torchrun --nproc-per-node 4 ...\)",
        ),
        (
            MeshShape(2, "1x2"),
            6,
            r"needs 4 ranks, but 6 are running: .*or set mesh.samples, mesh.tiles and mesh.stages to a product of 6",
        ),
    ],
)
def test_a_wrong_number_of_ranks(shape, ranks, message):
    with pytest.raises(ValueError, match=message):
        shape.check(ranks)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "mesh.samples must be at least 1, got 0"),
        ((1, "1x1", -1), "mesh.stages must be at least 1, got -1"),
    ],
)
def test_empty_axes(arguments, message):
    with pytest.raises(ValueError, match=message):
        MeshShape(*arguments)


COORDINATES = {  # (samples, tiles): (sample, tile) of each rank
    (2, (1, 2)): [(0, (0, 0)), (0, (0, 1)), (1, (0, 0)), (1, (0, 1))],
    (1, (2, 2)): [(0, (0, 0)), (0, (0, 1)), (0, (1, 0)), (0, (1, 1))],
    (3, (2, 1)): [(0, (0, 0)), (0, (1, 0)), (1, (0, 0)), (1, (1, 0)), (2, (0, 0)), (2, (1, 0))],
    (1, (2, 1, 3)): [
        (0, (0, 0, 0)),
        (0, (0, 0, 1)),
        (0, (0, 0, 2)),
        (0, (1, 0, 0)),
        (0, (1, 0, 1)),
        (0, (1, 0, 2)),
    ],
}


@pytest.mark.parallel([4, 6])
def test_coordinates_and_communicators(comm):
    for (samples, tiles), table in COORDINATES.items():
        if len(table) != comm.size:
            continue
        mesh = Mesh(comm, samples, tiles)
        assert (mesh.sample, mesh.tile, mesh.stage) == (*table[comm.rank], 0)
        assert (mesh.rank, mesh.size) == (comm.rank, comm.size)
        everyone = range(comm.size)
        members = {
            "pipeline": [comm.rank],
            "tiles": [r for r in everyone if table[r][0] == mesh.sample],
            "groups": [r for r in everyone if table[r][1] == mesh.tile],
            "replicas": list(everyone),
            "world": list(everyone),
        }
        for axis, ranks in members.items():
            assert getattr(mesh, axis).allgather(comm.rank) == ranks, axis


@pytest.mark.parallel(8)
def test_the_modules_picture_on_ranks(comm):
    mesh = Mesh(comm, 2, (1, 2), 2)
    sample, tile, stage = comm.rank // 4, comm.rank // 2 % 2, comm.rank % 2
    assert (mesh.sample, mesh.tile, mesh.stage) == (sample, (0, tile), stage)
    first = 4 * sample + 2 * tile
    assert mesh.pipeline.allgather(comm.rank) == [first, first + 1]
    assert mesh.tiles.allgather(comm.rank) == [4 * sample + stage, 4 * sample + 2 + stage]
    assert mesh.groups.allgather(comm.rank) == [2 * tile + stage, 4 + 2 * tile + stage]
    assert (
        mesh.replicas.allgather(comm.rank)
        == [stage, 2 + stage, 4 + stage, 6 + stage]
        == mesh.shape.stage_ranks()[stage]
    )


@pytest.mark.parallel(2)
def test_what_a_mesh_refuses_on_every_rank(comm):
    with pytest.raises(ValueError, match="needs 4 ranks, but 2 are running"):
        Mesh(comm, 2, (1, 2))


@pytest.mark.parallel(2)
def test_after_an_error_of_one_rank_no_call_is_made(comm):
    """Messages of the failed call could be taken for those of the next one."""
    mesh = Mesh(comm, samples=2)
    with pytest.raises(JointFailure), mesh.joint_call(), raise_jointly(mesh.world):
        raise OSError("on all ranks")
    with pytest.raises(KeyError), mesh.joint_call():
        raise KeyError("on one rank")
    with pytest.raises(RuntimeError, match=f"failed on rank {comm.rank} of 2 with KeyError: .*one"):
        with mesh.joint_call():
            comm.barrier()


PROCESS_GROUPS = {  # (samples, tiles, stages): ranks of each group of gloo that a rank opens besides the world
    (4, (1, 1), 1): [4],  # replicas, which are also the groups
    (1, (2, 2), 1): [4, 4],  # replicas, tiles: a norm's messages may be under way beside the sums
    (1, (1, 1), 4): [4],  # pipeline
    (2, (1, 2), 1): [4, 2, 2],  # replicas, tiles, groups
    (2, (1, 1), 2): [2, 2],  # pipeline, replicas, which are also the groups
    (1, (1, 2), 2): [2, 2, 2],  # pipeline, tiles, replicas
}


@pytest.mark.parallel(4)
def test_process_groups_of_a_mesh(comm, monkeypatch):
    """Groups of one rank open none; where groups and replicas have the same ranks, they share one."""
    world, opened, made = over("torch", comm), [], dist.ProcessGroupGloo
    monkeypatch.setattr(
        dist, "ProcessGroupGloo", lambda store, *args: opened.append(args[1]) or made(store, *args)
    )
    meshes = []
    for shape, sizes in PROCESS_GROUPS.items():
        opened.clear()
        meshes.append(Mesh(world, *shape))
        assert sorted(opened, reverse=True) == sizes, shape
    gathered(comm)  # no rank closes its connections before the others are done
