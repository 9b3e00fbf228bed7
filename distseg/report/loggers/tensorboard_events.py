"""Logger that writes TensorBoard event files into the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from distseg.report.loggers.interface import LoggedRun, named_values

FOLDER = "tensorboard"


class TensorBoardLogger:
    """Writer of event files for TensorBoard.

    The methods are those of :class:`distseg.report.loggers.interface.Logger`. A resumed run repeats
    the steps after its checkpoint. TensorBoard is told to hide their old numbers, so curves look as
    if the run had never stopped.

    Args:
        run: the run.
    """

    def __init__(self, run: LoggedRun):
        self._run = run

    def start(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        step = self._run.resumed_step
        self._writer = SummaryWriter(
            str(self._run.folder / FOLDER),
            purge_step=None if step is None else step + 1,
            flush_secs=10,
        )
        rows = [f"| {name} | {json.dumps(v)} |" for name, v in named_values(settings, ".")]
        table = "\n".join(["| setting | value |", "|---|---|", *rows])
        self._writer.add_text("settings", table, step or 0)

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._writer.add_image(f"validation/{name}", pixels, step, dataformats="HWC")

    def end(self, complete: bool) -> None:
        self._writer.close()
