"""A misspelt name brings the name that was meant: commands, settings, and values of settings."""

import pytest

from distseg.cli.main import main
from distseg.config.file import suggestion
from distseg.config.patchgd import PatchConfig
from distseg.config.spelling import closest, did_you_mean

CASES = {
    "trian": "Did you mean train?",
    "--hlp": "Did you mean --help?",
    "verify --model.dpth 2": "did you mean --model.depth?",
    "train --epochs 3": "did you mean --train.epochs?",
    "train --epoch 3": "did you mean --train.epochs?",
    "train --model.lr 3": "did you mean --optim.lr?",
    "train --learning-rate 3": "did you mean --optim.lr?",
    "train --name 3": "did you mean --model.name, --loss.name or --optim.name?",
    "plot curves a --images b": "unrecognized arguments: --images b (",  # plot has no settings
    "verify --image 29x43 --optim.name Adm": "got 'Adm'. Did you mean adam?",
    "verify --image 29x43 --data.augment [flop]": "got 'flop'. Did you mean flip?",
    "verify --image 29x43 --loss.name crossentropy": "Did you mean cross_entropy?",
    "verify --image 29x43 --model.name Unet": "Did you mean unet?",
    "patchgd --patchgd.head cnn-mxa": "Did you mean cnn-max?",
    "plan --stages 2 --recompute alwys": "Did you mean always?",
    "plot overly a": "Did you mean overlay?",
}


@pytest.mark.parametrize("words", CASES)
def test_a_command_line_brings_the_name_that_was_meant(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2 and CASES[words] in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("lr: 3", "line 1: 'lr' is not a section: did you mean optim.lr?"),
        ("train: {lr: 3}", "'train.lr' is not a setting: did you mean optim.lr?"),
        ("optim: {name: sdg}", "got 'sdg'. Did you mean sgd?"),
    ],
)
def test_a_config_file_too(text, words, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", str(path)])
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_suggestions_are_settings_of_the_command():
    assert suggestion("--stages", ["--mesh.stages"]) == ": did you mean --mesh.stages?"
    assert suggestion("--stages", ["--tile"]) == ""
    assert suggestion("inner", [], PatchConfig) == ": did you mean patchgd.inner?"
    assert suggestion("nonsense", ["model", "mesh"]) == ""


def test_only_similar_names_are_suggested():
    assert closest("ADAMW", ["sgd", "adam", "adamw"]) == "adamw"
    assert did_you_mean("resnet", ["unet-like", "tiny"]) == did_you_mean("", ["sgd"]) == ""
