"""A real command line on several ranks: `done = mpirun(4, "-m", "distseg", "train", config)`."""

import time
from dataclasses import dataclass

import pytest

from . import launch, transport
from .effort import POLL, Effort


@dataclass(frozen=True)
class Done:
    args: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float  # that it took, less those that other work on the machine took from it

    def __str__(self) -> str:
        return f"$ {' '.join(self.args)}\nstatus {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run(n: int, argv: list[str], timeout: float, env: dict[str, str], cwd) -> Done:
    """`python argv...` on n ranks. When it returns or raises, no process of it is left."""
    folder = launch.job_folder()
    try:
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = launch.start(n, argv, folder, env, stdout=out, stderr=err, cwd=cwd)
            clock = Effort(process.pid)
            try:
                while process.poll() is None and clock.now() <= timeout:
                    time.sleep(POLL)
                late, seconds = process.poll() is None, clock.look()
            finally:  # also when the test's own limit strikes first
                launch.end(process, folder)
        texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    finally:
        launch.remove(folder)
    (stdout, stderr), status = texts, process.returncode
    if transport.TORCH:
        status, stderr = transport.as_of_ranks(status, stderr)
    done = Done(process.args, status, stdout, stderr, seconds)
    if late:
        pytest.fail(
            f"timed out after {timeout:g} s, stack of every rank below\n{done}", pytrace=False
        )
    return done
