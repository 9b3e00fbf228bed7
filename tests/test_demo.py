"""The demo's two layouts train on the same images in the same steps."""

import pytest

from distseg.cli.demo import CONFIG, RANKS, layout
from distseg.cli.parsing import command_parser, config_from, parse
from distseg.training.conflicts import check_settings


@pytest.mark.parametrize("cores", [1, 2, 4, 7, 8, 64])
def test_ranks_fit_the_mesh_and_a_step_has_four_images(cores, pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    ranks, flags = layout(cores)
    config = config_from(parse(command_parser("train"), [str(CONFIG), *flags]))
    mesh = config.mesh
    assert ranks == mesh.samples * mesh.tiles[0] * mesh.tiles[1] * mesh.stages
    assert ranks == (RANKS if cores >= RANKS else 4)
    assert mesh.samples * config.data.images * config.train.accumulate == 4
    check_settings(config)
