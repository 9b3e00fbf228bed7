"""`distseg submit`: what it refuses before anything is written, and what its scripts say."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from distseg.cli.main import main
from distseg.cli.submit.job import node_of, warning_of
from distseg.cli.submit.render import fill
from distseg.cli.submit.sites import SITES, Site, site_of
from distseg.cli.submit.studies import grown, sweep
from distseg.cli.submit.systems import SYSTEMS, seconds_of
from distseg.comm.mesh import MeshShape
from distseg.config.sizes import Size

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "mesh: {samples: 2, tiles: 2x2}\ndata: {store: c.yaml}\noptim: {lr: 0.01}\ntrain: {output: runs/c}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``distseg submit c.yaml ARGUMENTS``."""
    with pytest.raises(SystemExit) as end:
        main(["submit", "c.yaml", *arguments])
    return end.value.code or 0, *capsys.readouterr()


def script(capsys, *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert subprocess.run(["bash", "-n"], input=out, text=True, capture_output=True).stderr == ""
    return out


def command(text: str) -> str:
    """The script's command that starts the training, in one line."""
    return (
        re.search(r"^(\S+ [^\n]*\\\n +python -m distseg(?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)[
            1
        ]
        .replace("\\\n", " ")
        .partition("     #")[0]
    )


PERLMUTTER = ["--site", "perlmutter"]
CPU = ["--system", "slurm", "--gpus", "0", "--cores", "16", "--processes", "8"]


def test_a_script_for_slurm(capsys, folder):
    text = script(
        capsys,
        *PERLMUTTER,
        "--time",
        "12:30:00",
        "--account",
        "m1",
        "--qos",
        "regular",
        "--queue",
        "gpu",
        "--modules",
        "python",
        "cuda/12",
        "--venv",
        "my env",
    )
    lines = [
        " ".join(line.split("   #")[0].split())
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert lines == [
        f"#SBATCH --{words}"
        for words in "job-name=c account=m1 partition=gpu qos=regular constraint=gpu nodes=2 ntasks-per-node=4 gpus-per-node=4 cpus-per-task=32 time=12:30:00 "
        "signal=TERM@300 requeue open-mode=append output=c.%j.log".split()
    ]
    assert (
        "\nmodule load python cuda/12\n" in text
        and "\nsource 'my env/bin/activate'\n" in text
        and "\nexport OMP_NUM_THREADS=16\n" in text
    )
    assert command(text).split() == shlex.split(
        "srun --cpu-bind=cores --kill-on-bad-exit=0 --wait=60 python -m distseg train c.yaml --train.resume true"
    )
    assert (
        "# 2 samples x (2x2) tiles x 1 stages: 8 processes, on 2 nodes of 4\n" in text
        and "not run here" in text
    )


@pytest.mark.parametrize("config", [["--config", "c.yaml"], ["--config=c.yaml"]])
def test_the_config_may_be_named_with_its_flag(capsys, folder, config):
    with pytest.raises(SystemExit) as end:
        main(["submit", *PERLMUTTER, *config])
    assert end.value.code == 0 and command(capsys.readouterr().out).endswith(
        "train c.yaml      --train.resume true"
    )


def test_a_script_for_cpus_has_no_line_about_gpus(capsys, folder):
    text = script(capsys, *CPU)
    assert (
        "gpus" not in text.replace("--gpus 0", "")
        and "#SBATCH --cpus-per-task=2\n" in text
        and "#SBATCH --ntasks-per-node=8\n" in text
    )
    assert command(text).startswith("srun --mpi=pmix --kill-on-bad-exit=0 --wait=60 ")
    without_mpi = command(script(capsys, *CPU, "--run.transport", "torch"))
    assert without_mpi.startswith("srun --mpi=none --kill-on-bad-exit=0 --wait=60 ")
    assert "--run.transport torch" in without_mpi


def test_scripts_for_the_other_systems(capsys, folder):
    text = script(
        capsys, "--site", "summit", "--mesh.samples", "3", "--account", "abc", "--time", "01:30:01"
    )
    assert all(
        f"#BSUB {line}\n" in text
        for line in ("-J c", "-P abc", "-nnodes 2", "-W 1:31", "-o c.%J.log", '-Q "75"')
    )
    assert command(text).startswith(
        "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 6 --gpu_per_rs 6 --cpu_per_rs 42 --launch_distribution packed --bind packed:7 "
    )
    assert (
        "--mesh.samples 3" in command(text)
        and "--train.job_minutes 89" in command(text)
        and text.endswith("in its next turn\n")
    )

    assert (
        script(capsys, "--site", "polaris", "--queue", "prod", "--output", "x/job.pbs")
        == "x/job.pbs\n"
    )
    text = Path("x/job.pbs").read_text()
    assert all(
        f"#PBS {line}\n" in text
        for line in (
            "-q prod",
            "-l filesystems=home:eagle",
            "-l select=2:ncpus=64:mpiprocs=4:ngpus=4",
            "-l walltime=02:00:00",
            "-r y",
        )
    )
    assert (
        command(text).startswith("mpiexec -n 8 --ppn 4 --cpu-bind list:24-31:16-23:8-15:0-7 ")
        and "qsub x/job.pbs &&" in text
    )

    text = script(capsys, "--system", "flux", "--gpus", "4", "--cores", "64")
    assert all(
        f"# flux: --{line}\n" in text
        for line in ("nodes=2", "exclusive", "time-limit=7200s", "output=c.{{id}}.log")
    )
    assert (
        command(text).startswith("flux run --nodes=2 --ntasks=8 --exclusive ")
        and "flux --parent batch c.flux &&" in text
    )


@pytest.mark.parametrize("name", [name for name in SITES if name != "generic"])
def test_each_site_gives_a_script_that_its_node_can_hold(capsys, folder, name):
    site = SITES[name]
    assert "not run here" in site.about and site.cores % site.gpus == 0
    text = script(capsys, "--site", name, "--mesh.samples", str(site.gpus), "--mesh.tiles", "1x1")
    assert (
        "not run here" in text and f"on 1 node of {site.gpus}" in text and "{" not in command(text)
    )


def test_processes_of_frontier_are_near_their_gpus():
    """Its guide: the cores 8 i to 8 i + 7 are near GPU 4, 5, 2, 3, 6, 7, 0, 1 for i = 0 to 7; each first one is the system's."""
    near = [4, 5, 2, 3, 6, 7, 0, 1]
    masks = [int(mask, 16) for mask in SITES["frontier"].binding.partition(":")[2].split(",")]
    for gpu, mask in enumerate(masks):
        cores = [core for core in range(64) if mask >> core & 1]
        region = near.index(gpu)
        assert cores == list(range(8 * region + 1, 8 * region + 8))


def test_a_binding_is_left_out_where_there_is_not_a_process_a_gpu(capsys, folder):
    assert "--cpu-bind" not in command(script(capsys, *PERLMUTTER, "--processes", "2"))


def test_a_site_of_your_own(capsys, folder):
    Path("here.yaml").write_text(
        "system: slurm\ngpus: 2\ncores: 24\nlauncher: 'mpirun -n {tasks} {binding}'\nbinding: --bind-to core\n"
        "modules: [openmpi]\noptions: [--exclusive, --mem=0]\nenvironment: {NCCL_DEBUG: INFO, A: b c}\nabout: Ours.\n"
    )
    text = script(capsys, "--site", "here.yaml", "--option=--hint=nomultithread")
    assert (
        command(text).startswith("mpirun -n 8 --bind-to core  ") and "#SBATCH --nodes=4\n" in text
    )
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n#SBATCH --hint=nomultithread\n" in text
    assert (
        "\nexport NCCL_DEBUG=INFO\nexport A='b c'\n" in text
        and "\nmodule load openmpi\n" in text
        and "\n# Ours.\n" in text
    )


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "has no fields"),
        ("- a", "has no fields"),
        ("gpu: 4", "a field 'gpu', which is unknown: choose from name, system, gpus"),
        ("gpus: four", "gpus must be a whole number of at least 0, got 'four'"),
        ("cores: 0", "cores must be a whole number of at least 1, got 0"),
        ("options: --exclusive", "options must be a list of texts"),
        ("environment: [A]", "environment must have one variable per line"),
        ("launcher: [srun]", "launcher must be text"),
        ("a: [", "cannot be read"),
        ("a: !!python/object/apply:os.system [touch harm]", "cannot be read"),
    ],
)
def test_a_site_that_can_not_be(folder, text, told):
    Path("here.yaml").write_text(text)
    with pytest.raises(ValueError, match="site here.yaml.*" + re.escape(told)):
        site_of("here.yaml")
    assert not Path("harm").exists()


def test_only_what_differs_from_the_config_file_is_a_flag(capsys, folder):
    text = script(
        capsys, *PERLMUTTER, "--optim.lr=0.02", "--data.augment", "[flip,turn]", "--data.crop", "64x64", "--optim.clip", "1", "--mesh.tiles", "2x2",
        "--memory", "4GB", "--train.loggers", "[]",
    )  # fmt: skip
    flags = shlex.split(command(text).partition("train c.yaml")[2])
    assert flags == shlex.split(
        """--streaming.memory 4000000000 --data.crop 64x64 --data.augment '["flip", "turn"]' --optim.lr 0.02 --optim.clip 1.0 --train.loggers [] --train.resume true"""
    )
    Path("c.yaml").write_text("optim: {clip: 1.0}\nmesh: {samples: 4}\n")
    code, text, err = run(capsys, *PERLMUTTER, "--optim.clip", "null")
    assert (
        "--optim.clip null" in text
        and err
        == "distseg: note: data.store is None, which does not exist yet: prepare the store before the job starts\n"
    )


def test_a_sweep_is_an_array_with_a_folder_for_each_training(capsys, folder):
    text = script(
        capsys,
        *PERLMUTTER,
        "--sweep",
        "optim.lr=1e-3,3e-4",
        "--sweep",
        "data.augment=[flip,turn],[]",
    )
    assert (
        "#SBATCH --array=0-3\n" in text
        and "#SBATCH --output=c.%A_%a.log\n" in text
        and '"${ENTRY_FLAGS[@]}"' in command(text)
    )
    assert re.findall(r"^    (\d)\) ENTRY_FLAGS=\((.*)\) ;;$", text, re.MULTILINE) == [
        (
            "0",
            "--optim.lr 1e-3 --data.augment '[flip,turn]' --train.output runs/c/lr=1e-3,augment=flip-turn",
        ),
        ("1", "--optim.lr 1e-3 --data.augment '[]' --train.output runs/c/lr=1e-3,augment=none"),
        (
            "2",
            "--optim.lr 3e-4 --data.augment '[flip,turn]' --train.output runs/c/lr=3e-4,augment=flip-turn",
        ),
        ("3", "--optim.lr 3e-4 --data.augment '[]' --train.output runs/c/lr=3e-4,augment=none"),
    ]


def test_names_of_two_sections_stay_apart():
    assert (
        sweep(["model.name=demo,tiny", "loss.name=dice"], "r")[0][-1]
        == "r/model.name=demo,loss.name=dice"
    )


def test_an_array_in_each_system(capsys, folder):
    lsf = script(capsys, "--site", "summit", "--mesh.samples", "3", "--sweep", "train.seed=0,1,2")
    assert (
        '#BSUB -J "c[1-3]"\n' in lsf
        and 'case "$LSB_JOBINDEX" in\n    1) ' in lsf
        and "    3) " in lsf
        and "c.%J.%I.log" in lsf
    )
    pbs = script(capsys, "--site", "polaris", "--sweep", "train.seed=0,1,2")
    assert (
        'case "${ENTRY:=$PBS_ARRAY_INDEX}" in\n    0) ' in pbs
        and 'qsub -v ENTRY="$ENTRY" c.pbs' in pbs
        and "PBS -J" not in pbs
    )
    assert SYSTEMS["pbs"].commands("c.pbs", 3) == [["qsub", "-J", "0-2", "c.pbs"]]
    assert SYSTEMS["flux"].commands("c.flux", 2) == [
        ["flux", "batch", "--env=ENTRY=0", "c.flux"],
        ["flux", "batch", "--env=ENTRY=1", "c.flux"],
    ]
    assert SYSTEMS["slurm"].commands("c.sbatch", 3) == [
        ["sbatch", "--parsable", "c.sbatch"]
    ] and SYSTEMS["lsf"].commands("c.jsrun", 3) == [["bsub"]]


def test_a_scaling_study_is_a_job_for_each_number_of_nodes(capsys, folder):
    code, out, _ = run(capsys, *PERLMUTTER, "--scaling", "1,2,4", "--output", "study.sbatch")
    assert (code, out) == (0, "study-1.sbatch\nstudy-2.sbatch\nstudy-4.sbatch\n")
    for nodes, samples in ((1, 1), (2, 2), (4, 4)):
        text = Path(f"study-{nodes}.sbatch").read_text()
        assert f"#SBATCH --nodes={nodes}\n" in text and f"#SBATCH --job-name=c-{nodes}\n" in text
        assert command(text).partition("c.yaml")[2].split()[:4] == [
            "--mesh.samples",
            str(samples),
            "--train.output",
            f"runs/c/nodes={nodes}",
        ]
    text = script(
        capsys, *PERLMUTTER, "--scaling", "2,8", "--scale", "tiles", "--mesh.tiles", "1x4"
    )
    assert (
        "--mesh.tiles 2x2 " in text
        and "--mesh.tiles 4x4 " in text
        and "--mesh.samples" not in text
        and "1x4" not in command(text)
    )


def test_a_mesh_grows_along_an_axis():
    shape = MeshShape(2, Size("2x2"), 3)
    assert grown(shape, 48, "samples") == MeshShape(4, Size("2x2"), 3)
    assert grown(shape, 72, "tiles") == MeshShape(2, Size("3x4"), 3)
    assert grown(MeshShape(1, Size("1x1x1"), 1), 24, "tiles") == MeshShape(1, Size("2x3x4"), 1)
    with pytest.raises(
        ValueError,
        match="cannot grow to 8 processes by its tiles: its other axes need a multiple of 6 processes",
    ):
        grown(shape, 8, "tiles")


MESH = "a mesh of 2 samples x (2x2) tiles x 1 stages needs 8 processes"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            [*PERLMUTTER, "--nodes", "3"],
            f"{MESH}, but 3 nodes of 4 start 12: set --nodes 2, or mesh.samples, mesh.tiles and mesh.stages to a product of 12",
        ),
        (
            [*PERLMUTTER, "--nodes", "4"],
            f"{MESH}, but 4 nodes of 4 start 16: set --nodes 2, or --processes 2, or mesh.samples",
        ),
        (
            ["--site", "summit"],
            f"{MESH}, but 1 node of 6 starts 6: set mesh.samples, mesh.tiles and mesh.stages to a product of 6",
        ),
        (["--site", "perlmuter"], "there is no site 'perlmuter': choose generic, summit"),
        (["--site", "none.yaml"], "site none.yaml cannot be read"),
        (
            [],
            "site generic does not say its batch system: give --system, one of slurm, lsf, pbs, flux",
        ),
        (["--system", "sge"], "there is no batch system 'sge' here: choose slurm, lsf, pbs, flux"),
        (
            ["--system", "slurm"],
            "site generic does not say what a node has: give --gpus and --cores",
        ),
        (["--system", "slurm", "--gpus", "4"], "does not say what a node has: give --cores"),
        (
            ["--system", "slurm", "--gpus", "0", "--cores", "8"],
            "a node has no GPU, so the number of processes on it is not known: give --processes, at most 8, the number of cores",
        ),
        (
            [*CPU[:4], "--cores", "4", "--processes", "8"],
            "a node has 4 cores, too few for 8 processes",
        ),
        ([*PERLMUTTER, "--nodes", "0"], "--nodes must be at least 1, got 0"),
        ([*PERLMUTTER, "--gpus", "-1"], "--gpus must be at least 0, got -1"),
        ([*PERLMUTTER, "--processes", "-2"], "--processes must be at least 1, got -2"),
        (
            [*PERLMUTTER, "--time", "90"],
            "--time must be the job's limit as HH:MM:SS, such as 02:00:00, or with days as 1-12:00:00, got '90'",
        ),
        ([*PERLMUTTER, "--time", "00:00:00"], "--time must be the job's limit"),
        (
            [*PERLMUTTER, "--time", "00:08:00", "--warn", "300"],
            "--warn is 300 s, but --time is 480 s",
        ),
        (
            [*PERLMUTTER, "--account", "a\ntouch harm"],
            "account is 'a\\ntouch harm', but a value in a line of a script cannot have a line break",
        ),
        (
            [*PERLMUTTER, "--name", "a b"],
            "a job's name must have letters, digits and . _ - only, got 'a b'",
        ),
        (
            [*PERLMUTTER, "--launcher", "srun {gpu}"],
            "the launcher's line 'srun {gpu}' cannot be filled in ('gpu'): use only the words {nodes}, {tasks}",
        ),
        (
            [
                "--site",
                "summit",
                "--mesh.samples",
                "3",
                "--launcher",
                "jsrun -n2 -r1 -a6 -g6 -c48 {binding}",
            ],
            "resource sets of 48 cores (--cpu_per_rs), but a node has 42",
        ),
        (
            [*PERLMUTTER, "--sweep", "lr=1,2"],
            "--sweep lr is not a setting: write section.field=value,value",
        ),
        ([*PERLMUTTER, "--sweep", "optim.rate=1,2"], "--sweep optim.rate is not a setting"),
        (
            [*PERLMUTTER, "--sweep", "optim.lr=1,,2"],
            "--sweep optim.lr=1,,2 has an empty value: write optim.lr=value,value",
        ),
        ([*PERLMUTTER, "--sweep", "optim.lr"], "--sweep optim.lr has an empty value"),
        ([*PERLMUTTER, "--sweep", "optim.lr=1,1"], "--sweep optim.lr has the value 1 twice"),
        (
            [*PERLMUTTER, "--sweep", "optim.lr=1", "--sweep", "optim.lr=2"],
            "--sweep names optim.lr twice",
        ),
        ([*PERLMUTTER, "--sweep", "optim.lr=1,fast"], "optim.lr"),
        ([*PERLMUTTER, "--sweep", "train.output=a,b"], "--sweep sets train.output itself"),
        (
            [*PERLMUTTER, "--sweep", "data.focus_class=a/b,a:b"],
            "two trainings for the folder runs/c/focus_class=a-b",
        ),
        (
            [*PERLMUTTER, "--sweep", "mesh.samples=2,4"],
            "--mesh.samples 4 makes a mesh of 4 samples x (2x2) tiles x 1 stages, 16 processes, but the array's jobs have 8",
        ),
        (
            [*PERLMUTTER, "--train.resume", "best"],
            "train.resume",
        ),  # where there is more to choose than true and false
        (
            [*PERLMUTTER, "--scaling", "1,two"],
            "--scaling must be a list of distinct numbers of nodes, such as 1,2,4,8, got '1,two'",
        ),
        ([*PERLMUTTER, "--scaling", "2,2"], "--scaling must be a list of distinct numbers"),
        (
            [*PERLMUTTER, "--scaling", "1,2", "--nodes", "2"],
            "--scaling 1,2 makes one job for each number of nodes, so it cannot be combined with --nodes",
        ),
        (
            [*PERLMUTTER, "--scaling", "1,2", "--sweep", "train.seed=1,2"],
            "cannot be combined with --sweep",
        ),
        (
            [*PERLMUTTER, "--scaling", "1,2", "--scale", "stages"],
            "--scale must be samples or tiles, got 'stages'",
        ),
        (
            [*PERLMUTTER, "--scaling", "1,2", "--mesh.stages", "3"],
            "cannot grow to 4 processes by its samples: its other axes need a multiple of 12 processes",
        ),
        ([*PERLMUTTER, "--output", "c.yaml", "--overwrite"], "--output c.yaml is the config"),
        ([*PERLMUTTER, "--output", "folder"], "folder is a folder: give another --output"),
        (
            [*PERLMUTTER, "--scaling", "1,2", "--output", "taken.sbatch"],
            "taken-2.sbatch exists with other content",
        ),
        (
            [*PERLMUTTER, "--output", "there"],
            "there exists with other content: give --overwrite to replace it, or another --output",
        ),
    ],
)
def test_what_can_not_be_is_told_before_anything_is_written(capsys, folder, arguments, told):
    Path("there").write_text("mine")
    Path("taken-2.sbatch").write_text("mine")
    Path("folder").mkdir()
    before = sorted(p.name for p in folder.iterdir())
    code, out, err = run(capsys, *arguments)
    assert (
        (code, out) == (2, "")
        and told in err
        and err.startswith("distseg: error: ")
        and err.count("\n") == 1
    ), err
    assert (
        sorted(p.name for p in folder.iterdir()) == before
        and Path("there").read_text() == "mine"
        and Path("c.yaml").read_text() == CONFIG
    )


@pytest.mark.parametrize(
    "config", [[], ["c.yaml", "--config", "c.yaml"], ["c.yaml", "--config=c.yaml"]]
)
def test_without_one_config(capsys, folder, config):
    with pytest.raises(SystemExit):
        main(["submit", *config, *PERLMUTTER])
    assert (
        capsys.readouterr().err
        == "distseg: error: give exactly one config file to train, as the first argument: distseg submit CONFIG.yaml ...\n"
    )


def test_a_script_is_written_whole_and_over_nothing_else(capsys, folder):
    assert run(capsys, *PERLMUTTER, "--output", "jobs/a.sbatch") == (0, "jobs/a.sbatch\n", "")
    first = Path("jobs/a.sbatch").read_text()
    assert os.access("jobs/a.sbatch", os.X_OK) and [p.name for p in Path("jobs").iterdir()] == [
        "a.sbatch"
    ]
    assert run(capsys, *PERLMUTTER, "--output", "jobs/a.sbatch")[0] == 0, (
        "the same once more is no harm"
    )
    code, _, err = run(capsys, *PERLMUTTER, "--output", "jobs/a.sbatch", "--time", "01:00:00")
    assert code == 2 and "--overwrite" in err and Path("jobs/a.sbatch").read_text() == first
    assert (
        run(capsys, *PERLMUTTER, "--output", "jobs/a.sbatch", "--time", "01:00:00", "--overwrite")[
            0
        ]
        == 0
    )
    assert "--time=01:00:00" in Path("jobs/a.sbatch").read_text()


STAND_IN = '#!/bin/sh\necho "$0 $*" >> {folder}/asked; cat >> {folder}/asked\n{answer}\n'


@pytest.mark.parametrize(
    "arguments, program, answer, printed, asked",
    [
        (PERLMUTTER, "sbatch", "echo '712;cluster'", "job 712: c.sbatch; squeue -j 712\n", "sbatch --parsable c.sbatch\n"),
        (["--site", "summit", "--mesh.samples", "3"], "bsub", "echo 'Job <29209> is submitted to default queue <batch>.'", "job 29209: c.jsrun; bjobs 29209\n", None),
        (["--site", "polaris"], "qsub", "echo 88.polaris-pbs-01", "job 88.polaris-pbs-01: c.pbs; qstat 88.polaris-pbs-01\n", "qsub c.pbs\n"),
        (
            ["--system", "flux", "--gpus", "4", "--cores", "64", "--sweep", "train.seed=3,4"], "flux", "echo fAbc",
            "job fAbc: c.flux; flux jobs fAbc\njob fAbc: c.flux; flux jobs fAbc\n", "flux batch --env=ENTRY=0 c.flux\n{folder}/flux batch --env=ENTRY=1 c.flux\n",
        ),
    ],
)  # fmt: skip
def test_a_script_is_handed_in_only_when_asked(
    capsys, folder, monkeypatch, arguments, program, answer, printed, asked
):
    (folder / program).write_text(STAND_IN.format(folder=folder, answer=answer))
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    text = script(capsys, *arguments)
    assert not Path("asked").exists()
    assert run(capsys, *arguments, "--submit") == (0, printed, "")
    expected = (
        f"{folder}/bsub \n{text}" if asked is None else f"{folder}/{asked.format(folder=folder)}"
    )
    assert Path("asked").read_text() == expected


def test_a_system_that_refuses_or_is_not_there(capsys, folder, monkeypatch):
    (folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    code, out, err = run(capsys, *PERLMUTTER, "--submit")
    assert (
        (code, out) == (2, "")
        and "sbatch --parsable c.sbatch did not accept the script (code 1): sbatch: error: invalid account; correct the job, or submit the script by hand: it is written to c.sbatch"
        in err
    )
    code, out, err = run(capsys, "--site", "polaris", "--submit")
    assert (
        (code, out) == (2, "")
        and "the command qsub is not installed here, so c.pbs is written but not submitted: submit it on a machine with pbs"
        in err
    )


def test_small_things():
    assert [seconds_of(text) for text in ("02:00:00", "1-12:00:00", "00:01:30", "100:00:00")] == [
        7200,
        129600,
        90,
        360000,
    ]
    assert [warning_of(seconds, None) for seconds in (60, 1200, 7200)] == [
        15,
        300,
        300,
    ] and warning_of(60, 30) == 30
    assert (
        fill(
            "a @x@ @y@\nb @none@\nc @many@\n", {"x": 1, "y": "z", "none": None, "many": ("p", "q")}
        )
        == "a 1 z\nc p\nc q\n"
    )
    with pytest.raises(KeyError):
        fill("@unknown@\n", {})
    assert node_of(Site(gpus=4, cores=64, cpus=128)).cpus == 128
    assert node_of(Site(gpus=4, cores=64, cpus=128), cores=32).cpus == 32


def test_templates_are_installed_with_the_package():
    source = (ROOT / "pyproject.toml").read_text()
    assert '"distseg.cli.submit" = ["templates/*"]' in source
    found = sorted(path.name for path in (ROOT / "distseg/cli/submit/templates").iterdir())
    assert found == sorted(f"train.{system.suffix}" for system in SYSTEMS.values())
