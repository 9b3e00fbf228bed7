"""The start of a job as one rank of thousands: what it calls and receives does not grow with the number of ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.start_up import start  # noqa: E402
from distseg.comm.mesh import MeshShape  # noqa: E402
from distseg.config.sizes import Size  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Counts of a start as one of 8 ranks, the first and another one."""
    folder = tmp_path_factory.mktemp("small")
    return [start(folder, 8, rank) for rank in (0, 4)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_calls_and_opens_as_much_among_thousands_as_among_eight(tmp_path, small, which):
    many = start(tmp_path, 4096, (0, 2048)[which])
    for name in ("communicators", "collectives", "messages", "files", "bytes"):
        assert many[name] == small[which][name], name
    assert many["collectives"] > 5 and many["bytes"] > 500


def test_a_mesh_of_many_ranks_finds_its_members_without_the_others():
    shape = MeshShape(432, Size((8, 8)), 1)
    members = shape.members(27647)
    assert members.tiles == tuple(range(27584, 27648))
    assert len(members.groups) == 432 and len(members.replicas) == 27648
