"""The rendered examples in jobs/, run with stand-ins for the cluster's programs that write down what they are asked."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from distseg.cli.main import main
from distseg.cli.submit.jsrun import check

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "train.sbatch": "srun",
    "train.jsrun": "jsrun",
    "train.pbs": "mpiexec",
    "train.flux": "flux",
}
STAND_IN = '#!/bin/sh\necho "$(basename $0) $*" >> {folder}/asked\necho "OMP=$OMP_NUM_THREADS end=$SLURM_JOB_END_TIME" >> {folder}/environment\n{answer}\n'
VARIABLES = {"SLURM_JOB_ID": "7", "PBS_O_WORKDIR": str(ROOT), "LS_SUBCWD": str(ROOT)}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(
    script: Path,
    folder: Path,
    code: int,
    queue: str = "exit 0",
    end: str = "2026-01-02T03:04:05",
    **environment: str,
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """The script's end, and what the stand-ins were asked; the training ends with ``code``, and ``queue`` is what batch systems answer."""
    answers = dict.fromkeys(("srun", "jsrun", "mpiexec"), f"exit {code}") | dict.fromkeys(
        ("scontrol", "qsub"), queue
    )
    answers |= {"flux": f'[ "$1" = run ] && exit {code}\n{queue}', "squeue": f"echo {end}"}
    for name, answer in answers.items():
        (folder / name).write_text(STAND_IN.format(folder=folder, answer=answer))
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TZ": "UTC"} | VARIABLES | environment
    (folder / "asked").write_text("")
    done = subprocess.run(["bash", str(script)], cwd=ROOT, env=env, capture_output=True, text=True)
    return done, (folder / "asked").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_what_its_second_line_makes(script, tmp_path, monkeypatch, capsys):
    """Where this fails: run that line again, with --overwrite."""
    made_by = re.search(
        r"^# Made by: distseg (submit .*)$", (ROOT / "jobs" / script).read_text(), re.MULTILINE
    )[1]
    (tmp_path / "jobs").mkdir()
    shutil.copy(ROOT / "jobs/demo.yaml", tmp_path / "jobs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(made_by))
    assert end.value.code == 0, capsys.readouterr().err
    assert (tmp_path / "jobs" / script).read_text() == (ROOT / "jobs" / script).read_text()


@pytest.mark.parametrize("script, launcher", SCRIPTS.items())
def test_the_training_is_started_to_be_resumed(script, launcher, tmp_path):
    done, asked = run(ROOT / "jobs" / script, tmp_path, 0)
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line for line in asked if "-m distseg train" in line]
    assert (
        len(starts) == 1
        and starts[0].startswith(f"{launcher} ")
        and starts[0].endswith(" --train.resume true")
    )
    assert not any(line.startswith(("scontrol", "qsub", "flux --parent")) for line in asked)
    assert ("--train.job_minutes 119" in starts[0]) == (script != "train.sbatch"), (
        "Slurm says itself when a job has to have ended"
    )
    environment = (tmp_path / "environment").read_text().splitlines()[-1]
    assert (
        environment
        == f"OMP={dict(zip(SCRIPTS, (16, 7, 8, 24)))[script]} end={'1767323045' if script == 'train.sbatch' else ''}"
    )


@pytest.mark.parametrize(
    "end, told", [("2026-01-02T03:04:05", "1767323045"), ("NONE", ""), ("", ""), ("N/A", "")]
)
def test_a_job_without_an_end_has_none(end, told, tmp_path):
    """And not last midnight, which is what `date` makes of nothing."""
    run(ROOT / "jobs/train.sbatch", tmp_path, 0, end=end)
    assert (tmp_path / "environment").read_text().splitlines()[-1] == f"OMP=16 end={told}"


AGAIN = {
    "train.sbatch": "scontrol requeue 7",
    "train.pbs": "qsub jobs/train.pbs",
    "train.flux": "flux --parent batch jobs/train.flux",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_is_to_be_continued_queues_again(script, tmp_path):
    done, asked = run(ROOT / "jobs" / script, tmp_path, 75)
    if script == "train.jsrun":
        assert done.returncode == 75, "LSF queues a job with this code again by itself"
        assert '\n#BSUB -Q "75"\n' in (ROOT / "jobs" / script).read_text()
        return
    assert (done.returncode, asked[-1]) == (0, AGAIN[script])
    done, _ = run(ROOT / "jobs" / script, tmp_path, 75, queue="exit 1")
    assert (
        done.returncode == 75
        and "the run is to be continued, but" in done.stderr
        and "submit" in done.stderr
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("code", [1, 2, 137, 143])
def test_any_other_end_is_the_jobs_end(script, code, tmp_path):
    done, asked = run(ROOT / "jobs" / script, tmp_path, code)
    assert (done.returncode, done.stderr) == (code, "")
    assert not any(line in AGAIN.values() for line in asked)


@pytest.mark.parametrize(
    "options, script, variables",
    [
        (
            ["--site", "perlmutter"],
            "demo.sbatch",
            {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"},
        ),
        (["--site", "summit", "--mesh.samples", "3"], "demo.jsrun", {"LSB_JOBINDEX": "2"}),
        (["--site", "polaris"], "demo.pbs", {"PBS_ARRAY_INDEX": "1"}),
        (["--site", "polaris"], "demo.pbs", {"ENTRY": "1"}),  # submitted by the job of the array
        (["--system", "flux", "--gpus", "4", "--cores", "64"], "demo.flux", {"ENTRY": "1"}),
    ],
)
def test_an_array_runs_its_entry_and_queues_it_alone_again(
    options, script, variables, tmp_path, capsys
):
    with pytest.raises(SystemExit):
        main(
            [
                "submit",
                "jobs/demo.yaml",
                *options,
                "--sweep",
                "train.seed=3,4,5",
                "--output",
                str(tmp_path / script),
            ]
        )
    capsys.readouterr()
    done, asked = run(tmp_path / script, tmp_path, 75, **variables)
    started = next(line for line in asked if "-m distseg train" in line)
    assert "--train.seed 4 --train.output runs/demo/seed=4 " in started
    again = {
        "demo.sbatch": "scontrol requeue 7_1",
        "demo.pbs": f"qsub -v ENTRY=1 {tmp_path}/demo.pbs",
        "demo.flux": f"flux --parent batch --env=ENTRY=1 {tmp_path}/demo.flux",
    }
    assert done.returncode == (75 if script == "demo.jsrun" else 0) and (
        script == "demo.jsrun" or asked[-1] == again[script]
    )
    done, asked = run(tmp_path / script, tmp_path, 0, **{name: "9" for name in variables})
    assert (done.returncode, done.stderr) == (2, "this array has no training 9\n") and not any(
        "distseg" in line for line in asked
    )


def test_the_line_of_jsrun_keeps_its_rules(tmp_path):
    """The same rules that tests/test_jsrun.py breaks one by one, on Summit's nodes."""
    _, asked = run(ROOT / "jobs/train.jsrun", tmp_path, 0)
    line = next(line for line in asked if line.startswith("jsrun "))
    assert check(line, nodes=2, cores=42, gpus=6, tasks=12).rs_per_host == 1
