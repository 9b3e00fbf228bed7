"""Completion in the shell: argcomplete is asked as bash asks it, in a process of its own."""

import os
import subprocess
import sys
from typing import Literal

import pytest

from distseg.cli.completion import values_of

pytest.importorskip("argcomplete")


def completions(line: str, folder) -> list[str]:
    """Return what may stand at the end of a line, when the Tab key is pressed there."""
    found = folder / "found"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "distseg"]
    subprocess.run(command, env=os.environ | asked, cwd=folder, check=True, timeout=60)
    return found.read_text().split()


@pytest.mark.parametrize(
    "line, expected",
    [
        ("distseg pr", ["prepare", "predict", "profile"]),
        ("distseg train --optim.s", ["--optim.schedule"]),
        ("distseg train my.yaml --optim.name ad", ["adam", "adamw"]),
        ("distseg train my", ["my.yaml"]),
        pytest.param("distseg plot c", ["curves"], marks=pytest.mark.slow),
        pytest.param("distseg evaluate run --sp", None, marks=pytest.mark.slow),
        pytest.param("distseg submit my.yaml --nod", ["--nodes"], marks=pytest.mark.slow),
        pytest.param("distseg bench we", ["weak"], marks=pytest.mark.slow),
        pytest.param("distseg bench io --cr", ["--crops"], marks=pytest.mark.slow),
        pytest.param("distseg init --net", ["--network"], marks=pytest.mark.slow),
    ],
)
def test_a_line_is_completed(line, expected, tmp_path):
    (tmp_path / "my.yaml").write_text("run: {}\n")
    found = completions(line, tmp_path)
    assert "--split" in found if expected is None else found == expected


def test_values_follow_from_types():
    assert values_of(Literal["sgd", "adam"] | None) == ["sgd", "adam"]
    assert values_of(bool | str) == ["true", "false"]
    assert values_of(int) == values_of(list[Literal["flip"]]) == []
