"""The demo's two layouts train on the same images in the same steps."""

import pytest

from distseg.cli.demo import CONFIG, RANKS, layout
from distseg.cli.main import _config, _parse, _parser
from distseg.training.conflicts import check_settings


@pytest.mark.parametrize("cores", [1, 2, 4, 7, 8, 64])
def test_ranks_fit_the_mesh_and_a_step_has_four_images(cores, pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    ranks, flags = layout(cores)
    config = _config(_parse(_parser("train"), [str(CONFIG), *flags]))
    mesh = config.mesh
    assert ranks == mesh.samples * mesh.tiles[0] * mesh.tiles[1] * mesh.stages
    assert ranks == (RANKS if cores >= RANKS else 4)
    assert mesh.samples * config.data.images * config.train.accumulate == 4
    check_settings(config)
