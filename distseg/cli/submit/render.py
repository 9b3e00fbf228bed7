"""Make the script of a job from the template of its batch system.

A template is a script with placeholders such as ``@nodes@``. A line is left out if its placeholder
has no value. If the placeholder has several values, the line is repeated for each value.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from importlib.resources import files
from pathlib import Path

from distseg.cli.submit.job import Job
from distseg.cli.submit.jsrun import check

_INDEX = {
    "slurm": "$SLURM_ARRAY_TASK_ID",
    "lsf": "$LSB_JOBINDEX",
    "pbs": "${ENTRY:=$PBS_ARRAY_INDEX}",
    "flux": "$ENTRY",
}
_LOGS = {
    "slurm": ("%j", "%A_%a"),
    "lsf": ("%J", "%J.%I"),
    "flux": ("{{id}}", "{{id}}"),
    "pbs": ("", ""),
}
_AGAIN = {"pbs": '-v ENTRY="$ENTRY" ', "flux": '--env=ENTRY="$ENTRY" '}


def render(job: Job) -> str:
    """Return the script of a job, made from the template of the batch system.

    Raises:
        ValueError: the launcher's line has an unknown word in braces, or breaks jsrun's rules; or a
            value has a line break.
    """
    template = (
        files("distseg.cli.submit").joinpath("templates", f"train.{job.system.suffix}").read_text()
    )
    words = _words(job)
    _refuse_line_breaks(words)
    text = fill(template, words)
    return re.sub(r"\n{3,}", "\n\n", text)


def _refuse_line_breaks(words: dict[str, object]) -> None:
    """Refuse a value with a line break, which would begin a new line of the script.

    The flags of an array are not checked, since they are quoted for the shell.

    Args:
        words: the values of the template's placeholders, by name.

    Raises:
        ValueError: the message names the placeholder and the value.
    """
    for name in (
        *(words.keys() - {"entries", "command"}),
        "command",  # last, because it contains other values
    ):
        value = words[name]
        if "\n" in "".join(map(str, value if isinstance(value, tuple) else (value,))):
            raise ValueError(
                f"{name} is {value!r}, but a value in a line of a script cannot have a line break: "
                "give it without a line break"
            )


def fill(template: str, words: dict[str, object]) -> str:
    """Return the template with its placeholders replaced by the values in ``words``.

    A placeholder is written ``@name@``. If its value is None or an empty tuple, its line is left
    out. If the value is a longer tuple, the line is repeated for each element.
    """
    return "".join(
        line for written in template.splitlines(keepends=True) for line in _lines(written, words)
    )


def _lines(line: str, words: dict[str, object]) -> list[str]:
    """Return the lines that a line of a template becomes: none, one, or one for each value."""
    names = re.findall(r"@(\w+)@", line)
    values = {name: words[name] for name in names}
    if any(value is None or value == () for value in values.values()):
        return []
    several = next((name for name, value in values.items() if isinstance(value, tuple)), None)
    if several:
        return [
            text for value in values[several] for text in _lines(line, {**words, several: value})
        ]
    return [re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), line)]


def launch_line(job: Job) -> str:
    """Return the line of the script that starts the processes; a line for jsrun is checked.

    Raises:
        ValueError: the line has an unknown word in braces, or breaks jsrun's rules.
    """
    nodes = job.nodes
    words = dict(
        nodes=nodes.count,
        tasks=nodes.tasks,
        processes=nodes.processes,
        gpus=nodes.gpus,
        node_cores=nodes.cores,
    )
    words |= dict(cores=nodes.cores // nodes.processes, cpus=nodes.cpus // nodes.processes)
    words |= dict(pmi="none" if job.transport == "torch" else "pmix")
    words |= dict(binding=job.site.binding if nodes.processes == nodes.gpus else "")
    written = job.launcher or job.site.launcher or job.system.launcher
    try:
        line = " ".join(written.format(**words).split())
    except (KeyError, IndexError, ValueError) as e:
        raise ValueError(
            f"the launcher's line {written!r} cannot be filled in ({e}): use only the words"
            f" {', '.join('{' + word + '}' for word in words)}"
        ) from None
    if line.split()[0].rpartition("/")[2] == "jsrun":
        check(line, nodes.count, nodes.cores, nodes.gpus, nodes.tasks)
    return line


def _words(job: Job) -> dict[str, object]:
    """Return the values of the template's placeholders by name; a value None removes its line."""
    nodes, last = job.nodes, len(job.entries) - 1
    many = bool(job.entries)
    log = _LOGS[job.system.name][many]
    return {
        "title": (
            f"{job.config} with distseg under {job.system.name}"
            + (f", {len(job.entries)} trainings" if many else "")
        ),
        "command": job.command,
        "about": tuple(textwrap.wrap(job.site.about, 118)),
        "name": job.name,
        "job_name": f'"{job.name}[1-{len(job.entries)}]"' if many else job.name,
        "account": job.account,
        "queue": job.queue,
        "qos": job.qos,
        "options": (*job.site.options, *job.options),
        "nodes": nodes.count,
        "processes": nodes.processes,
        "gpus": nodes.gpus or None,
        "ngpus": f":ngpus={nodes.gpus}" if nodes.gpus else "",
        "cpus": nodes.cpus // nodes.processes,
        "cores": nodes.cores // nodes.processes,
        "node_cpus": nodes.cpus,
        "limit": job.system.limit(job.seconds),
        "minutes": max(1, job.seconds // 60 - 1),
        "warn": job.warn,
        "last": last if many else None,
        # In an array, the last job's $SLURM_JOB_ID stands for the whole array.
        "me": "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if many else "$SLURM_JOB_ID",
        "log": f"{job.name}.{log}.log",
        "modules": shlex.join((*job.site.modules, *job.modules)) or None,
        "activate": shlex.quote(str(Path(job.venv).expanduser() / "bin/activate"))
        if job.venv
        else None,
        "environment": tuple(
            f"{name}={shlex.quote(value)}" for name, value in job.site.environment.items()
        ),
        "entries": _cases(job) if many else None,
        "mesh": f"{job.shape}: {job.shape.size} processes, on {nodes}",
        "launch": launch_line(job),
        "trains": job.trains,
        "arguments": " ".join(
            [
                shlex.quote(job.config),
                *map(shlex.quote, job.flags),
                *(['"${ENTRY_FLAGS[@]}"'] if many else []),
            ]
        ),
        "again": (_AGAIN.get(job.system.name, "") if many else "") + shlex.quote(job.script),
    }


def _cases(job: Job) -> str:
    """Return shell code that sets ``ENTRY_FLAGS`` to the flags of one training of a job array.

    The training is chosen by the index that the batch system gives to each job of the array.
    """
    cases = [
        f"    {index}) ENTRY_FLAGS=({shlex.join(flags)}) ;;"
        for index, flags in enumerate(job.entries, job.system.first)
    ]
    index = _INDEX[job.system.name]
    return "\n".join(
        [
            f'case "{index}" in',
            *cases,
            f'    *) echo "this array has no training {index}" >&2; exit 2 ;;',
            "esac",
        ]
    )
