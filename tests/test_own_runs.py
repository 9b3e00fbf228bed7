"""Whose code may be imported again: a user's own runs, in their folder, with their code."""

import io
import shutil

import pytest
import torch
from torch import nn

import distseg
from distseg.cli.export import _program
from distseg.training.checkpoint.own_runs import distrusted, remember_run
from distseg.training.run_config import Normalised


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that was trained with a network in the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("def mine(): pass\n")
    folder = tmp_path / "run"
    folder.mkdir()
    remember_run(folder, "nets:mine")
    return folder


def test_a_run_of_ones_own_is_trusted(run):
    assert distrusted(run, "nets:mine") is None
    assert distrusted("run", "nets:mine") is None  # by another path


def test_other_folders_networks_and_code_are_not(run, tmp_path, monkeypatch):
    moved = shutil.copytree(run, tmp_path / "moved")
    assert "not trained by you in this folder" in distrusted(moved, "nets:mine")
    assert "you trained nets:mine in this folder" in distrusted(run, "os:system")
    (tmp_path / "nets.py").write_text("def mine(): evil()\n")
    assert "nets.py has changed since" in distrusted(run, "nets:mine")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert "you trained with the code in" in distrusted(run, "nets:mine")


def test_a_record_that_is_damaged_or_cannot_be_written_is_none(run, tmp_path, monkeypatch):
    next((tmp_path / "state").rglob("*.json")).write_text("[")
    assert distrusted(run, "nets:mine")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember_run(run, "nets:mine")
    assert distrusted(run, "nets:mine")


class Strict(nn.Module):
    """A network that refuses sizes that are no multiple of 8, as smp.Unet does."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 8, stride=8), nn.ConvTranspose2d(4, 2, 8, stride=8)

    def forward(self, x):
        if x.shape[2] % 8 or x.shape[3] % 8:
            raise RuntimeError("wrong size")
        return self.up(self.down(x))


def test_a_padded_network_can_be_pickled_and_exported():
    torch.manual_seed(0)
    model = distseg.padded(Strict(), 8).eval()
    image = torch.rand(1, 1, 21, 34)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    assert torch.equal(again(image), model(image)) and again(image).shape == (1, 2, 21, 34)
    whole = Normalised(model, [100.0], [20.0]).eval()
    program = _program(whole, 1, (1, 1), least=9).module()
    torch.testing.assert_close(program(image * 255), model((image * 255 - 100) / 20).detach())


def test_the_loaded_network_normalises_by_band():
    model = Normalised(nn.Identity(), [10.0, 20.0], [2.0, 4.0])
    found = model(torch.tensor([14.0, 28.0]).view(1, 2, 1, 1).expand(1, 2, 3, 3))
    assert torch.equal(found, torch.full((1, 2, 3, 3), 2.0))
