"""Logger that writes tables for spreadsheets: ``steps.csv`` and ``validation.csv``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distseg.report.disk import atomic_write
from distseg.report.loggers.interface import LoggedRun

FILES = {"step": "steps.csv", "validation": "validation.csv"}


class CsvLogger:
    """Writer of a table of steps and a table of validations. Pictures are left out.

    The methods are those of :class:`distseg.report.loggers.interface.Logger`. A run that is resumed
    from a checkpoint first removes the rows of all steps after the checkpoint, because it runs
    these steps again.

    Args:
        run: the run.
    """

    def __init__(self, run: LoggedRun):
        self._run = run

    def start(self, settings: Mapping[str, Any]) -> None:
        run = self._run
        self._tables = {kind: _Table(run.folder / file) for kind, file in FILES.items()}
        if run.resumed_step is not None:
            again = run.resumed_step - run.revalidates
            for kind, last in (("step", run.resumed_step), ("validation", again)):
                self._tables[kind].keep(_up_to(last))

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._tables[kind].append({"step": step, "epoch": epoch, **values})

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Do nothing, because a table cannot show pictures."""

    def end(self, complete: bool) -> None:
        """Do nothing: each row is written when it comes."""


def _up_to(last: int) -> Callable[[dict], bool]:
    """Return a function that returns True for rows of a table up to step ``last``.

    It returns False for later rows, and for a row whose step is not a whole number, as in a line
    that was cut off.
    """
    return lambda row: str(row["step"]).isdecimal() and int(row["step"]) <= last


class _Table:
    """CSV file to which rows are added one by one; a row may add new columns.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._columns = list(self._reader().fieldnames or ()) if path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self.keep(lambda row: True)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def keep(self, wanted: Callable[[dict], bool]) -> None:
        """Rewrite the file with all columns and with the rows for which ``wanted`` returns True.

        The new file replaces the old one only when it is complete.
        """
        rows = [row for row in self._reader() if wanted(row)] if self.path.exists() else []
        with (
            atomic_write(self.path) as growing,
            open(growing, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

    def _reader(self) -> csv.DictReader:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return csv.DictReader(lines, restval="")
