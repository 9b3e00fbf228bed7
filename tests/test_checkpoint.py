"""Checkpoints come back bit by bit, appear whole or not at all, and are refused when they are not ours."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from distseg.config.settings import OptimConfig
from distseg.runtime.optimizer import make_optimizer
from distseg.training.checkpoint import saving
from distseg.training.checkpoint.files import (
    check_run,
    digest_of,
    find,
    load_optimizer,
    load_weights,
    optimizer_state,
    read_index,
    read_manifest,
    read_run_manifest,
    share,
    write_manifest,
)  # fmt: skip
from distseg.training.checkpoint.saving import Checkpoints, SilentCheckpoints, set_aside
from distseg.training.checkpoint.tensors import write_tensors


def trained(steps: int = 3, optim: str = "adamw", dtype=torch.float32, seed: int = 0):
    """A small model after some steps, its weights in channels_last."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).to(
        dtype, memory_format=torch.channels_last
    )
    optimizer = make_optimizer(OptimConfig(optim, lr=0.1), dict(model.named_parameters()))
    for _step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def save(run, step: int, score=None, keep: int = 2, model=None):
    return Checkpoints(run, keep).save(*(model or trained()), {"step": step}, score)


def names(run) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*"))


def state(optimizer) -> list:
    return [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]


@pytest.mark.parametrize("optim", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_trip_is_exact_and_training_goes_on_alike(tmp_path, optim, dtype):
    model, optimizer = trained(3, optim, dtype)
    folder = save(tmp_path, 3, model=(model, optimizer))
    again, fresh = trained(0, optim, dtype, seed=9)
    load_weights(folder, again)
    load_optimizer(folder, again, fresh)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride(), name
    for a, b in zip(state(optimizer), state(fresh), strict=True):
        assert a.keys() == b.keys()
        assert all(
            torch.equal(a[k], b[k]) and a[k].stride() == b[k].stride() and a[k].dtype == b[k].dtype
            for k in a
        )
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    for m, o in ((model, optimizer), (again, fresh)):
        o.zero_grad()
        m(x).square().mean().backward()
        o.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values())
    )


def test_the_manifest_comes_back(tmp_path):
    folder = Checkpoints(tmp_path).save(
        *trained(), {"step": 7, "epoch": 2, "data": {"classes": ["a", "b"]}}, 0.5
    )
    assert folder.name == "step-00000007"
    manifest = read_manifest(folder)
    assert manifest.pop("digest") == digest_of(manifest) and set(manifest.pop("tensors")) == {
        "weights-1-of-1.safetensors",
        "optimizer-1-of-1.safetensors",
    }
    assert manifest == {
        "format": "distseg checkpoint",
        "version": 2,
        "score": 0.5,
        "parts": 1,
        "step": 7,
        "epoch": 2,
        "data": {"classes": ["a", "b"]},
    }


@pytest.mark.parametrize(
    "scores, kept, best",
    [
        ([0.1, 0.2, 0.3, 0.4], [3, 4], 4),
        ([0.1, 0.9, 0.3, 0.4], [2, 3, 4], 2),
        ([0.9, 0.1, 0.2, 0.3], [1, 3, 4], 1),
        ([0.5, 0.5, 0.1, 0.1], [2, 3, 4], 2),
        ([None, 0.0, None, None], [2, 3, 4], 2),
        ([None, None, None, None], [3, 4], 4),  # never validated: the last one is as good as any
    ],
)
def test_the_last_two_and_the_best_are_kept(tmp_path, scores, kept, best):
    for step, score in enumerate(scores, 1):
        save(tmp_path, step, score)
    assert (names(tmp_path), find(tmp_path).name, find(tmp_path, "last").name) == (
        kept,
        f"step-{best:08d}",
        "step-00000004",
    )


@pytest.mark.parametrize("keep, kept", [(1, [3]), (3, [1, 2, 3]), (0, [3])])
def test_keep(tmp_path, keep, kept):
    for step in (1, 2, 3):
        save(tmp_path, step, step / 10, keep)
    assert names(tmp_path) == kept


def test_what_was_just_saved_is_there_even_in_an_older_runs_folder(tmp_path):
    for step in (600, 700, 800):
        save(tmp_path, step, 0.9)
    save(tmp_path, 5, 0.1)
    assert find(tmp_path, "last").name == "step-00000005"
    assert read_manifest(find(tmp_path, "last"))["step"] == 5


def test_the_same_step_again_replaces(tmp_path):
    save(tmp_path, 1)
    model, optimizer = trained(seed=5)
    folder = save(tmp_path, 1, model=(model, optimizer))
    again, _ = trained(0)
    load_weights(folder, again)
    assert torch.equal(again[0].weight, model[0].weight)


@pytest.mark.parametrize("broken", ["write_tensors", "write_json", "fsync"])
def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch, broken):
    save(tmp_path, 1, 0.5)
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(os if broken == "fsync" else saving, broken, full)
    with pytest.raises(OSError, match="(?i)no space"):
        save(tmp_path, 2, 0.9)
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in before} == before
    assert (names(tmp_path), find(tmp_path, "last").name) == ([1], "step-00000001")
    save(tmp_path, 2, 0.9)
    assert names(tmp_path) == [1, 2] and not list((tmp_path / "checkpoints").glob("*.partial"))


def test_an_index_cut_off_in_the_middle_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1, 0.5)
    write = Path.write_text

    def cut(self, text):
        write(self, text[: len(text) // 2])
        if "last.json" in self.name:
            raise OSError("No space left on device")
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="(?i)no space"):
        save(tmp_path, 2, 0.9)
    assert find(tmp_path, "last").name == "step-00000001"


def test_find_takes_a_run_or_a_checkpoint(tmp_path):
    folder = save(tmp_path, 1)
    assert find(folder) == find(tmp_path) == find(str(tmp_path), "last") == folder
    with pytest.raises(
        FileNotFoundError,
        match="no checkpoint in .*nothing: train first, or name the folder of a run",
    ):
        find(tmp_path / "nothing")
    assert read_index(tmp_path / "nothing") is None


def damage(file, content: bytes | None = None):
    def act(folder):
        path = folder / file
        path.write_bytes(path.read_bytes()[:-7] if content is None else content)

    return act


def remove(file):
    return lambda folder: (folder / file).unlink()


def edit(**fields):
    def act(folder):
        path = folder / "manifest.json"
        manifest = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))

    return act


def load(folder):
    model, optimizer = trained(0)
    read_manifest(folder)
    load_weights(folder, model)
    load_optimizer(folder, model, optimizer)


@pytest.mark.parametrize(
    "harm, error, message",
    [
        (
            damage("weights-1-of-1.safetensors"),
            ValueError,
            "weights-1-of-1.safetensors is damaged or cut off .*: use another checkpoint",
        ),
        (
            damage("weights-1-of-1.safetensors", b""),
            ValueError,
            "weights-1-of-1.safetensors is damaged or cut off",
        ),
        (
            damage("optimizer-1-of-1.safetensors", b"\x80\x04garbage of a pickle"),
            ValueError,
            "optimizer-1-of-1.safetensors is damaged",
        ),
        (
            damage("manifest.json"),
            ValueError,
            "manifest.json is damaged .*: use another checkpoint",
        ),
        (
            damage("manifest.json", b"[]"),
            ValueError,
            "manifest.json is not the manifest of a distseg checkpoint",
        ),
        (
            remove("weights-1-of-1.safetensors"),
            FileNotFoundError,
            "weights-1-of-1.safetensors is missing, so the checkpoint is incomplete",
        ),
        (
            remove("optimizer-1-of-1.safetensors"),
            FileNotFoundError,
            "optimizer-1-of-1.safetensors is missing",
        ),
        (edit(format="other"), ValueError, "is not the manifest of a distseg checkpoint"),
        (
            edit(version=3),
            ValueError,
            "has version 3, but this distseg reads versions up to 2: update distseg",
        ),
    ],
)
def test_what_can_not_be_read_says_why(tmp_path, harm, error, message):
    folder = save(tmp_path, 1)
    load(folder)
    harm(folder)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.mark.parametrize(
    "model, message",
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)),
            "2.weight is 2x4x1x1 in the checkpoint and 3x4x1x1 in the model",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
            "2.bias is 2 in the checkpoint and missing in the model",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.PReLU()),
            "3.weight is missing in the checkpoint and 1 in the model",
        ),
    ],
)
def test_another_model_is_named(tmp_path, model, message):
    folder = save(tmp_path, 1)
    before = model[0].weight.clone()
    with pytest.raises(
        ValueError,
        match=f"is of another model: {message}: use the model section of the checkpoint's manifest",
    ):
        load_weights(folder, model)
    assert torch.equal(model[0].weight, before), "nothing was copied"


def test_a_model_without_values_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with torch.device("meta"):
        model, _ = trained(0)
    with pytest.raises(ValueError, match=r"0.weight of the model is on the meta device.*to_empty"):
        load_weights(folder, model)
    load_weights(folder, model.to_empty(device="cpu"))


def test_another_optimizer_is_not_taken_without_a_word(tmp_path):
    folder = save(tmp_path, 1, model=trained(3, "adam"))
    model, optimizer = trained(0, "sgd")
    with pytest.raises(ValueError, match="optim"):
        load_optimizer(folder, model, optimizer)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    import pickle

    folder = save(tmp_path, 1)

    def forbidden(*_, **__):
        return pytest.fail("pickle was used")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    load(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        "optimizer-1-of-1.safetensors",
        "weights-1-of-1.safetensors",
    ]


def test_other_ranks_write_nothing(tmp_path):
    assert SilentCheckpoints().save(*trained(), {"step": 1}, None) is None
    assert not list(tmp_path.iterdir())


def test_a_layer_at_two_places(tmp_path):
    """One convolution twice: the format has no shared tensors, so each place has its own, of the same numbers."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    save(tmp_path, 1, model=(model, make_optimizer(OptimConfig(), dict(model.named_parameters()))))
    again = nn.Sequential(conv2 := nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), conv2)
    load_weights(find(tmp_path), again)
    assert torch.equal(conv2.weight, conv.weight)


def test_old_checkpoints_go_to_the_first_free_name(tmp_path):
    for _ in range(3):
        save(tmp_path, 1)
        set_aside(tmp_path)
    (tmp_path / "checkpoints.1").rename(tmp_path / "elsewhere")
    save(tmp_path, 1)
    set_aside(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("checkpoints*")) == [
        "checkpoints.1",
        "checkpoints.2",
        "checkpoints.3",
    ]


# damage, and what a run needs


def test_every_flipped_bit_is_told_or_harmless(tmp_path):
    """In any file of a checkpoint: either an error that names the file, or exactly what was saved."""
    folder = save(tmp_path, 1)
    whole, optimizer = trained(0)
    load_weights(folder, whole)
    load_optimizer(folder, whole, optimizer)
    random = np.random.default_rng(0)
    told = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in random.integers(0, len(content), 25):
            path.write_bytes(
                content[:place]
                + bytes([content[place] ^ (1 << random.integers(8))])
                + content[place + 1 :]
            )
            again, fresh = trained(0, seed=3)
            try:
                read_manifest(folder)
                load_weights(folder, again)
                load_optimizer(folder, again, fresh)
            except (ValueError, FileNotFoundError) as e:
                assert str(folder) in str(e), e
                assert "Traceback" not in str(e)
                told += 1
                assert check_run(folder)
            else:
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(whole.state_dict().values(), again.state_dict().values())
                )
                assert all(
                    torch.equal(a[k], b[k])
                    for a, b in zip(state(optimizer), state(fresh), strict=True)
                    for k in a
                )
        path.write_bytes(content)
    assert told > 60 and check_run(folder) == [] and check_run(tmp_path) == []


@pytest.mark.parametrize("name", ["weights-1-of-1.safetensors", "optimizer-1-of-1.safetensors"])
def test_damage_is_told_with_the_tensor_and_another_checkpoint(tmp_path, name):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=rf"{name} is damaged: the tensor \S+ has the checksum \w+, but the checkpoint's manifest says \w+: use another checkpoint of the run \(step-00000001; to train, by --train.resume NAME, else by its folder, \S+step-00000001\)",
    ):
        load(folder)
    assert len(check_run(tmp_path)) == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"last": "step-00000099", "best": "../../etc"}', b"\xff\xfe"]
)
def test_an_index_that_tells_nothing_is_no_obstacle(tmp_path, content, capsys):
    save(tmp_path, 1, 0.9)
    save(tmp_path, 2, 0.1)
    (tmp_path / "checkpoints/last.json").write_bytes(content)
    assert find(tmp_path, "last").name == find(tmp_path, "best").name == "step-00000002"
    assert capsys.readouterr().err.count("distseg: ") == 2 and check_run(tmp_path)
    save(tmp_path, 3, 0.2)
    assert find(tmp_path, "last").name == "step-00000003"


def test_a_checkpoint_that_is_gone_and_an_index_that_was_changed_are_told(tmp_path, capsys):
    best, last = save(tmp_path, 1, 0.9), save(tmp_path, 2, 0.1)
    assert find(tmp_path) == best and not check_run(tmp_path) and not capsys.readouterr().err
    remove("manifest.json")(best)
    assert find(tmp_path) == last and "the best checkpoint of" in capsys.readouterr().err
    gone, part = check_run(tmp_path)
    assert (
        "last.json names step-00000001 as the best, which is gone, or has no manifest.json" in gone
    )
    assert (
        "there is no" in part
        and "step-00000001/manifest.json, so the checkpoint is incomplete" in part
    )
    index = tmp_path / "checkpoints/last.json"
    index.write_text(index.read_text().replace("step-00000001", "step-00000002"))
    assert (
        read_index(index.parent) is None
        and "its checksum does not match its content" in capsys.readouterr().err
    )
    assert "its checksum does not match its content" in check_run(tmp_path)[0]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"parts": "2"}, "'parts' in .* must be of type int, got '2'"),
        ({"step": None}, "'step' in .* must be of type int, got None"),
        ({"epoch": 1.5}, "'epoch' in .* must be of type int, got 1.5"),
        ({"data": {"classes": "ab"}}, "'classes' in .* must be of type list, got 'ab'"),
    ],
)
def test_a_manifest_without_its_keys_is_told(tmp_path, fields, message):
    folder = Checkpoints(tmp_path).save(
        *trained(),
        {
            "step": 7,
            "epoch": 2,
            "channels": [3, 2],
            "config": {},
            "data": {"classes": [], "mean": [], "std": []},
        },
    )
    read_run_manifest(folder)
    edit(**fields)(folder)
    with pytest.raises(ValueError, match=message):
        read_run_manifest(folder)


def test_checkpoints_without_checksums_are_still_read(tmp_path):
    folder = save(tmp_path, 1)
    path = folder / "manifest.json"
    old = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {**{k: v for k, v in old.items() if k not in ("tensors", "digest")}, "version": 1}
        )
    )
    load(folder)
    assert "version 1, which has no checksums" in check_run(folder)[0]


def test_what_is_written_aside_is_the_state_at_that_moment(tmp_path):
    model, optimizer = trained(3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    checkpoints = Checkpoints(tmp_path, aside=True)
    folder = checkpoints.save(model, optimizer, {"step": 3})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoints.flush()
    again, _ = trained(0)
    load_weights(folder, again)
    assert all(torch.equal(t, before[name]) for name, t in again.state_dict().items())
    checkpoints.update(0.7, epoch=4)
    assert (
        read_manifest(folder)["score"],
        read_manifest(folder)["epoch"],
        read_index(tmp_path / "checkpoints")["best_score"],
    ) == (0.7, 4, 0.7)
    load(folder)


def test_what_the_writer_meets_with_is_told_at_the_next_step(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(
            28, "weights-1-of-1.safetensors could not be written: No space left on device"
        )

    monkeypatch.setattr(saving, "write_tensors", full)
    checkpoints = Checkpoints(tmp_path, aside=True)
    checkpoints.save(*trained(), {"step": 3})
    with pytest.raises(
        OSError, match="weights-1-of-1.safetensors could not be written: No space left"
    ):
        for _ in range(1000):
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.check()


def test_a_full_disk_names_the_file_what_it_takes_and_what_is_free(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            OSError,
            match=r"weights-1-of-1.safetensors could not be written, files may not grow so large here .*: it takes up to [\d.]+ kB, [\d.]+ [kMGT]B are free",
        ):
            save(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    with pytest.raises(
        OSError,
        match=r"new has too little space for the next checkpoint: it takes 1e\+03 PB|new has too little space for the next checkpoint",
    ):
        saving.require_space(tmp_path / "new", 10**18)


def test_later_checkpoints_are_set_aside(tmp_path):
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.6)):
        save(tmp_path, step, score, keep=3)
    assert set_aside(tmp_path, after=3) is None
    assert set_aside(tmp_path, after=1).name == "checkpoints.1"
    assert (
        names(tmp_path) == [1]
        and find(tmp_path, "last")
        == find(tmp_path, "best")
        == tmp_path / "checkpoints/step-00000001"
    )
    assert sorted(p.name for p in (tmp_path / "checkpoints.1").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    with pytest.raises(
        FileNotFoundError, match="has no checkpoint step-00000002: it has step-00000001"
    ):
        find(tmp_path, "step-00000002")


def test_the_best_of_the_checkpoints_that_remain_is_the_best(tmp_path):
    """The best one is set aside, and a run that goes on has a lower score than the second best."""
    for step, score in ((1, 0.3), (2, 0.5), (3, 0.4), (4, None), (5, 0.9)):
        save(tmp_path, step, score, keep=5)
    (tmp_path / "checkpoints/step-00000003/manifest.json").write_text("{")
    set_aside(tmp_path, after=4)
    best = {"best": "step-00000002", "best_score": 0.5}
    assert read_index(tmp_path / "checkpoints") == {"last": "step-00000004", **best}
    save(tmp_path, 5, 0.4)
    assert read_index(tmp_path / "checkpoints") == {"last": "step-00000005", **best}


def test_files_have_the_modes_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {p.name: oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {
        p.name: "0o640" for p in folder.iterdir()
    }


@pytest.mark.parallel([2, 3])
def test_what_one_rank_read_all_hold(comm, shared_path):
    if comm.rank == 0:
        save(shared_path, 1)
    comm.Barrier()
    model, optimizer = trained(0, seed=comm.rank)
    if comm.rank == 0:
        load_weights(find(shared_path), model)
        load_optimizer(find(shared_path), model, optimizer)
    share(model, optimizer, comm)
    every = comm.allgather(
        [
            (name, t.tolist())
            for name, t in {**model.state_dict(), **optimizer_state(model, optimizer)}.items()
        ]
    )
    assert all(one == every[0] for one in every) and len(every[0]) > 12


def test_a_checksum_is_of_dtype_and_shape_too(tmp_path):
    """The same bytes of another dtype or shape are another tensor."""
    x = torch.arange(6, dtype=torch.int32)
    forms = {
        "whole": x,
        "float": x.view(torch.float32),
        "table": x.view(2, 3),
        "other": x.view(3, 2),
    }
    sums = write_tensors(tmp_path / "x.safetensors", forms)
    assert len({*sums.values()}) == len(forms)


def test_a_manifest_whose_numbers_changed_is_refused(tmp_path):
    known = {"format": "distseg checkpoint", "version": 2, "parts": 1, "step": 7}
    write_manifest(tmp_path, known)
    assert read_manifest(tmp_path)["step"] == 7
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        read_manifest(tmp_path)
