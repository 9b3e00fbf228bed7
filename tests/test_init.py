"""``distseg init``: the settings that it chooses, the file that it writes, and that the file trains."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_store import made_store, random_image, random_store

from distseg.cli import init as cli_init
from distseg.cli.first_config import Choice, Computer, TrainingData, first_config
from distseg.cli.init import as_yaml, this_computer
from distseg.cli.main import main
from distseg.cli.parsing import command_parser, config_from, parse
from distseg.comm.threads import CpuLimits
from distseg.config.settings import Config, DataConfig
from distseg.config.sizes import Size
from distseg.data.sampler import epoch_samples
from distseg.data.store.store import Store, StoreWriter
from distseg.planning.machine import load_machine
from distseg.tiling.tile import Box

CORES = Computer("2 CPU cores", 2, 16e9, cli_init._core())
SMALL = TrainingData("s.h5", ((40, 56),) * 8, 2, ("ocean", "land", "lake"), (900, 800, 100))


def read(path) -> Config:
    return config_from(parse(command_parser("train"), [str(path)]))


def ran(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code or 0, *capsys.readouterr()


def labelled_store(path, classes, labels, size=(16, 24)):
    """Images of noise with one label each."""
    with StoreWriter(path, classes, 1, numbers=len(classes) == 1) as writer:
        for k, label in enumerate(labels):
            image = writer.add_image(f"i{k}", size, np.uint8, "train", False, label=label)
            image.write(Box.whole(size), random_image(size, 1, k)[0], None)


def of_masks(path):
    random_store(path, train=[(40, 56)] * 4, val=[(40, 56)])


def of_volumes(path):
    random_store(path, train=[(9, 17, 20)] * 4)


def of_classes(path):
    labelled_store(path, ["cat", "dog"], [0, 1] * 4)


def of_numbers(path):
    labelled_store(path, ["age"], [3.5, 7.25] * 4)


@pytest.mark.parametrize(
    "made", [of_masks, of_volumes, pytest.param(of_classes, marks=pytest.mark.slow), of_numbers]
)
def test_the_config_trains(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made("s.h5")
    code, out, _ = ran(capsys, "init", "s.h5", "--minutes", "0.01")
    *_, estimate, last = out.splitlines()
    assert estimate.endswith("B of memory a rank")
    assert code == 0 and last.startswith("next: ") and last.endswith("distseg train config.yaml")
    config = read("config.yaml")
    text = open("config.yaml").read()
    assert all("  # " in line for line in text.splitlines() if line.startswith("  "))
    limits = ["--mesh.samples", "1", "--train.epochs", "1", "--data.prefetch", "0"]
    code, out, err = ran(capsys, "train", "config.yaml", *limits)
    assert code == 0, err
    assert "without effect" not in out and "note" not in out
    assert (tmp_path / config.train.output / "checkpoints").is_dir()
    # Written again, the file is the same; and it is never replaced.
    assert ran(capsys, "init", "s.h5", "--minutes", "0.01", "--output", "b.yaml")[0] == 0
    assert open("b.yaml").read() == text
    code, _, err = ran(capsys, "init", "s.h5")
    assert code == 2 and "config.yaml, which exists" in err
    assert open("config.yaml").read() == text


def test_weights_of_classes_follow_from_their_pixels_in_crops():
    """A class near which half of the crops are placed weighs as its share of their pixels says."""
    rare = replace(SMALL, sizes=((300, 300),) * 2, counts=(9000, 890, 110))
    asked = []

    def weights(*near):
        def counted(crop, focus):
            asked.append((crop, focus))
            return near

        return first_config(rare, CORES, count_near=counted).config.loss.class_weights

    for near in ((850, 50, 100), (500, 0, 500)):
        shares = [(n / 1000 + count / 10000) / 2 for n, count in zip(near, rare.counts)]
        mean = sum(shares) / 3
        assert weights(*near) == pytest.approx([math.sqrt(mean / n) for n in shares], abs=0.01)
    assert asked == [(Size((256, 256)), "lake")] * 2
    assert weights(0, 600, 400) is None  # 45, 34 and 21 % of the pixels are even enough


def test_pixels_are_counted_in_crops_of_the_training(tmp_path):
    """One small lake in a large image is in all crops near it, so its share there is larger."""
    labels = np.zeros((400, 400), np.uint8)
    labels[200:204, 200:204] = 1
    labels[206, 200:205] = 255  # not a class
    with StoreWriter(tmp_path / "s.h5", ["land", "lake"], 1) as writer:
        image = writer.add_image("a", (400, 400), np.uint8, "train", True)
        image.write(Box.whole((400, 400)), random_image((400, 400), 1, 0)[0], labels)
    store = Store(str(tmp_path / "s.h5"))
    land, lake = cli_init.counts_near(store, Size((32, 32)), "lake")
    assert lake == 64 * 16 and 64 * (32 * 32 - 16 - 5) <= land < 64 * (32 * 32 - 16)
    assert cli_init.counts_near(store, Size((32, 32)), "lake") == (land, lake)


def test_any_class_name_can_be_read_back(tmp_path):
    """A name such as ``no`` or ``1e3`` stays text, and a line break in it ends no comment."""
    for name in ("no", "1", "a: b #c", "[x", "it's", "zwei\nZeilen: 1", "1e3"):
        choices = [
            Choice("data.crop", Size((8, 8)), f"about {name}"),
            Choice("data.focus_class", name, f"about {name}"),
        ]
        path = tmp_path / "c.yaml"
        path.write_text(as_yaml(choices, f"about {name}"))
        assert read(path).data == DataConfig(crop=Size((8, 8)), focus_class=name)


def test_settings_follow_the_data():
    config = first_config(SMALL, CORES).config
    assert (config.model.name, config.data.crop, config.data.focus_class) == ("unet", None, None)
    assert config.data.images * config.mesh.samples == 4  # half of an epoch
    large = first_config(replace(SMALL, sizes=((3000, 200),) * 2), CORES).config
    assert large.data.crop == Size((256, 200)) and large.model.depth == 4
    rare = replace(SMALL, sizes=((300, 300),) * 2, counts=(9900, 0, 100))
    assert first_config(rare, CORES).config.data.focus_class == "lake"  # land has no pixel
    unnamed = replace(rare, classes=("ocean", "land", "null"))
    assert first_config(unnamed, CORES).config.data.focus_class is None
    volumes = first_config(replace(SMALL, sizes=((20, 90, 90),) * 4), CORES).config
    assert volumes.data.crop == Size((20, 64, 64)) and volumes.model.depth == 1
    uneven = TrainingData("s.h5", ((64, 64),) * 100, 1, ("a", "b", "c"), (90, 10, 0), True)
    weights = first_config(uneven, CORES).config.loss.class_weights
    assert weights == pytest.approx([math.sqrt(50 / 90), math.sqrt(50 / 10), 1], abs=0.01)
    one = first_config(replace(SMALL, sizes=((40, 56),)), CORES).config
    assert one.step_images == 1 and one.spatial.norm_scope == "group"


def test_one_large_image_gives_work_to_all_ranks():
    """An epoch has crops at random places, more than fit side by side."""
    found = first_config(replace(SMALL, sizes=((320, 512),)), CORES, minutes=3)
    config = found.config
    assert (config.data.epoch_samples, config.step_images, config.mesh.samples) == (64, 8, 2)
    steps = 8 * config.train.epochs
    assert 150 < steps * found.estimate.seconds <= 180


def test_settings_follow_the_machine():
    gpu = Computer("4 GPUs", 4, 80e9, load_machine("a100"), gpu=True)
    large = replace(SMALL, sizes=((3000, 3000),) * 20)
    config = first_config(large, gpu).config
    assert config.mesh.samples == 4 and config.step_images == 16
    assert config.data.crop == Size((512, 512)) and config.model.base_channels == 32
    three = first_config(large, replace(CORES, ranks=3)).config
    assert three.mesh.samples == 2


def test_the_machine_is_described(monkeypatch):
    """GPUs count by their profile, cores without the threads that the environment sets for a rank."""
    monkeypatch.setattr(cli_init.torch.cuda, "device_count", lambda: 2)
    shown = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=80 * 2**30)
    monkeypatch.setattr(cli_init.torch.cuda, "get_device_properties", lambda number: shown)
    found = this_computer()
    assert (found.name, found.ranks, found.gpu) == ("2 NVIDIA A100-SXM4-80GB", 2, True)
    assert found.device == load_machine("a100") and found.memory_of(2) == 80 * 2**30
    monkeypatch.setattr(cli_init.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(cli_init, "own_limits", lambda: CpuLimits(frozenset(range(6)), {"": 4.5}))
    monkeypatch.setattr(cli_init.shutil, "which", lambda name: None if name == "mpirun" else name)
    found = this_computer()
    assert (found.name, found.ranks, found.gpu) == ("4 CPU cores", 4, False)
    assert found.memory_of(4) == found.memory / 4
    assert cli_init._launcher(4) == "torchrun --nproc-per-node 4 -m "
    monkeypatch.setattr(cli_init.shutil, "which", lambda name: None)
    assert this_computer().ranks == 1  # nothing starts several


def test_a_step_fits_half_of_the_memory():
    large, found = replace(SMALL, sizes=((3000, 3000),) * 20), []
    for gigabytes in (64, 1.3):
        one = first_config(large, replace(CORES, memory=gigabytes * 1e9))
        config, ranks = one.config, one.config.mesh.samples
        assert one.estimate.memory <= gigabytes * 1e9 / ranks / 2
        found.append((ranks, config.data.images, str(config.data.crop)))
    assert found == [(2, 4, "256x256"), (1, 1, "128x128")]


def test_what_no_memory_holds_is_refused():
    large = replace(SMALL, sizes=((3000, 3000),) * 20)
    with pytest.raises(ValueError, match="even with one small image, .* smaller network by --net"):
        first_config(large, replace(CORES, memory=1.3e9), "demo")
    with pytest.raises(ValueError, match="DS403"):  # one cell at the bottom
        first_config(replace(SMALL, sizes=((20, 20),)), CORES, "summit-small")


def test_large_images_with_one_label_are_streamed():
    data = TrainingData("s.h5", ((9000, 9000),) * 9, 3, ("a", "b"), (5, 4), True)
    found = first_config(data, replace(CORES, memory=8e9))
    assert found.config.streaming.memory == found.estimate.memory == 2e9
    assert (found.config.data.images, found.config.mesh.samples) == (1, 2)


def test_a_long_epoch_is_shortened():
    """A first result comes in about the minutes that are asked for, however much data there is."""
    many = replace(SMALL, sizes=((2000, 2000),) * 50)
    whole = replace(SMALL, sizes=((100, 120), (120, 100)) * 20000)
    for data in (many, whole):
        found = first_config(data, CORES, minutes=2)
        config = found.config
        steps = config.train.epochs * config.data.epoch_samples / config.step_images
        assert config.train.epochs == 5
        assert 90 < steps * found.estimate.seconds <= 120
    assert config.data.crop == Size((120, 120))  # images are whole
    small = first_config(SMALL, CORES, minutes=2)
    assert small.config.data.epoch_samples is None and small.config.train.epochs == 100


def test_the_same_samples_are_counted_as_the_sampler_counts(tmp_path):
    sizes = [(97, 131), (64, 70), (20, 300)]
    store = random_store(tmp_path / "s.h5", train=sizes)
    data = replace(SMALL, sizes=tuple(sizes))
    for crop in (None, Size((50, 60))):
        steps = epoch_samples(store, "train", DataConfig(crop=crop), 0, 0, 1)
        assert data.samples(crop) == len(steps)


def own(in_channels, out_channels):
    from torch import nn

    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def test_networks_by_name():
    named = first_config(SMALL, CORES, "demo")
    assert named.config.model == replace(Config().model, name="demo")
    mine = first_config(SMALL, CORES, f"{__name__}:own")
    assert mine.estimate is not None and mine.config.model.name == f"{__name__}:own"
    with pytest.raises(ValueError, match="unknown model 'resnet'"):
        first_config(SMALL, CORES, "resnet")


def test_what_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    code, _, err = ran(capsys, "init", "images", "--masks", "my masks")
    assert code == 2
    assert "first pack the images into one by 'distseg prepare images images.h5" in err
    assert "--masks 'my masks' --classes background,NAME', then run 'distseg init images.h5'" in err
    pixels, _ = random_image((8, 8))
    made_store("s.h5", {"a": ("train", pixels, None)})
    assert "no training image of s.h5 has labels" in ran(capsys, "init", "s.h5")[2]
    labelled_store("l.h5", ["cat", "dog"], [0, 1], (8, 8, 8))
    assert "one label for each volume" in ran(capsys, "init", "l.h5")[2]
    for words in (["--minutes", "0"], ["--output", "images"], ["--minutes", "nan"]):
        assert ran(capsys, "init", "s.h5", *words)[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "l.h5", "s.h5"]
