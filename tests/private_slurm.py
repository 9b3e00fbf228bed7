"""A Slurm of one node in a folder of its own: started for a test where its programs are installed, gone without a trace after it.

munged, slurmctld and slurmd run as this user, on free ports of the loopback; nothing of a Slurm or munge that the
machine may have besides is read or written. The node has as many CPUs as asked for, whatever the machine has.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_OVER = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_CONFIG = """
ClusterName=distseg
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire: a requeued job waits that long, 120 s by default
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
TmpFS={folder}/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MpiDefault=pmix
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus}
PartitionName=debug Nodes=n1 Default=YES MaxTime=INFINITE
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    lacking = [program for program in NEEDED if _program(program) is None]
    return (
        f"no Slurm here ({', '.join(lacking)} not installed): jobs/try_slurm.sh installs it on Debian"
        if lacking
        else None
    )


class PrivateSlurm:
    """Starts when entered, ends when left; ``environment`` is what its commands and jobs need."""

    def __init__(self, cpus: int = 4):
        self.cpus = cpus
        self.daemons: list[subprocess.Popen] = []

    def __enter__(self) -> PrivateSlurm:
        self.folder = Path(tempfile.mkdtemp(prefix="distseg-slurm-"))
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "TMPDIR": str(self.folder / "tmp"),
        }
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.folder.chmod(0o711)  # munge wants its socket to be reachable for all
        for name, mode in (("munge", 0o711), ("state", 0o700), ("spool", 0o755), ("tmp", 0o700)):
            (self.folder / name).mkdir()
            (self.folder / name).chmod(mode)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = dict(zip(("control_port", "node_port"), _free_ports(2)))
        host, user = socket.gethostname().partition(".")[0], _user()
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(folder=self.folder, host=host, user=user, cpus=self.cpus, **ports)
        )
        self._daemon(
            "munged",
            "-F",
            *(f"--{option}={self.folder}/munge/{name}" for option, name in _MUNGE.items()),
        )
        self._wait(lambda: (self.folder / "munge/socket").exists(), "munged opens its socket")
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", "n1")
        self._wait(
            lambda: "idle" in self.run("sinfo", "-h", "-o", "%T", check=False), "the node is idle"
        )

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.out").open("wb") as out:
            self.daemons.append(
                subprocess.Popen(
                    [_program(program), *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait(self, done, what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline or any(
                daemon.poll() is not None for daemon in self.daemons
            ):
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text()[-2000:]}"
                    for path in sorted(self.folder.glob("*.out"))
                )
                raise RuntimeError(f"Slurm did not come so far that {what}\n{logs}")
            time.sleep(0.1)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """A command's output; with ``check``, a failure is an error."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, cwd=cwd
        )
        if check and done.returncode:
            raise RuntimeError(
                f"$ {' '.join(command)}\ncode {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(
        self,
        job: str,
        states: str,
        seconds: float,
        restarts: int = 0,
        watch: Callable[[dict], None] = lambda now: None,
    ) -> dict[str, str]:
        """What Slurm knows of the job once it is in one of the states, after so many requeues at least."""
        deadline = time.monotonic() + seconds
        while True:
            now = self.state(job)
            watch(now)
            if now["JobState"] in states.split("|") and int(now["Restarts"]) >= restarts:
                return now
            if time.monotonic() > deadline or now["JobState"] in _OVER:
                told = (
                    Path(now["StdOut"]).read_text(errors="replace")[-3000:]
                    if Path(now["StdOut"]).exists()
                    else "(no log)"
                )
                raise RuntimeError(
                    f"job {job} should be {states} within {seconds:.0f} s, but is {now['JobState']} ({now['Reason']}, "
                    f"exit code {now['ExitCode']}) after {now['Restarts']} restarts\n--- its log\n{told}"
                )
            time.sleep(0.2)

    def __exit__(self, *_) -> None:
        if len(self.daemons) == 3:
            self.run("scancel", "--full", "-u", _user(), check=False)
            deadline = time.monotonic() + 15
            while self.run("squeue", "-h", check=False) and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self._left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)

    def _left(self) -> list[int]:
        """Processes that the daemons started and that are still there: they have our configuration in their environment."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                pass
        return found


_MUNGE = {
    "socket": "socket",
    "key-file": "key",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
