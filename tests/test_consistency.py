"""Ranks that would work on different things are told so before they begin: what differs, both values, both ranks."""

import re

import pytest

from distseg.comm.collective import Alone
from distseg.comm.consistency import assert_consistent, differences, settings, versions
from distseg.comm.launch import JointFailure


def test_differences_name_both_values_and_ranks():
    ranks = [
        {"optim.lr": "0.1", "a": "1"},
        {"optim.lr": "0.1", "a": "1"},
        {"optim.lr": "0.2", "a": "1"},
        {"optim.lr": "0.3"},
    ]
    assert differences(ranks) == [
        "optim.lr is 0.1 on rank 0 and 0.2 on rank 2 (and on 1 more)",
        "a is 1 on rank 0 and missing on rank 3",
    ]
    assert differences(ranks[:2]) == []
    assert settings({"optim": {"lr": 0.1, "name": "sgd"}}) == {
        "optim.lr": "0.1",
        "optim.name": "sgd",
    }


def test_one_rank_agrees_with_itself():
    assert_consistent(Alone(), {"x": 1, **versions()}, "nothing")


@pytest.mark.parallel(3)
def test_what_differs_is_told_on_all_ranks(comm):
    assert_consistent(comm, {"x": 1}, "nothing")
    with pytest.raises(
        JointFailure, match=r"the ranks do not agree: x is 0 on rank 0 and 2 on rank 2. Start anew"
    ):
        assert_consistent(comm, {"x": comm.rank // 2 * 2, "y": 5}, "Start anew")
    with pytest.raises(JointFailure, match="and 3 more. Start anew"):
        assert_consistent(comm, {f"x{k}": comm.rank for k in range(8)}, "Start anew")


APART = """
import os, sys
from distseg.cli.main import main
from distseg.comm.launch import identify
os.chdir(sys.argv[1])
others = {others!r}
if identify().rank == 1:
    {do}
main([*{arguments!r}, *(others if identify().rank == 1 else [])])
"""
SMALL = [
    "verify",
    "--image",
    "29x43",
    "--model.depth",
    "2",
    "--model.base_channels",
    "4",
    "--mesh.tiles",
    "1x2",
]
TRAIN = ["train", "c.yaml", "--mesh.tiles", "1x2", "--train.resume", "true"]


def apart(mpirun, tmp_path, arguments, others=(), do="pass"):
    """Two ranks, of which the second has ``others`` besides, and does something before."""
    script = tmp_path / "apart.py"
    script.write_text(APART.format(others=list(others), arguments=arguments, do=do))
    return mpirun(2, script, tmp_path, cwd=tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "others, said",
    [
        (["--optim.lr", "0.5"], "optim.lr is 0.001 on rank 0 and 0.5 on rank 1"),
        (["--mesh.tiles", "2x1"], "mesh.tiles is 1x2 on rank 0 and 2x1 on rank 1"),
        (["--mesh.reducer", "mpi"], "mesh.reducer is auto on rank 0 and mpi on rank 1"),
        (["--image", "30x43"], "image is 29x43 on rank 0 and 30x43 on rank 1"),
        (["--optim.lr", "fast"], "rank 1: --optim.lr"),
        (["--config", "nowhere.yaml"], "rank 1: .*nowhere.yaml"),
    ],
)
def test_other_flags_on_one_rank(mpirun, tmp_path, others, said):
    done = apart(mpirun, tmp_path, SMALL, others)
    assert done.returncode == 2 and done.stderr.count("distseg: error") == 1, str(done)
    assert re.search(said, done.stderr), str(done)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_another_folder_or_store_on_one_rank(mpirun, tmp_path):
    from made_store import random_store

    random_store(tmp_path / "s.h5", train=[(40, 48)])
    random_store(tmp_path / "t.h5", train=[(40, 48), (40, 48)])
    (tmp_path / "c.yaml").write_text(
        "model: {depth: 2, num_convs: 1, base_channels: 4}\ndata: {store: s.h5, crop: 32x32, epoch_samples: 2}\ntrain: {epochs: 1, output: run, loggers: []}\n"
    )
    assert apart(mpirun, tmp_path, TRAIN).returncode == 0
    elsewhere = "os.makedirs('other', exist_ok=True); os.path.exists('other/s.h5') or os.symlink(os.path.abspath({0!r}), 'other/s.h5'); os.chdir('other'); open('c.yaml', 'w').write(open('../c.yaml').read())"
    log = (tmp_path / "run/log.jsonl").read_bytes()
    done = apart(mpirun, tmp_path, TRAIN, ["--train.epochs", "1"], elsewhere.format("s.h5"))
    assert (
        done.returncode == 2
        and "the checkpoint to go on from is step-00000002" in done.stderr
        and "none on rank 1" in done.stderr
    ), str(done)
    assert (tmp_path / "run/log.jsonl").read_bytes() == log and not (
        tmp_path / "other/run"
    ).exists()
