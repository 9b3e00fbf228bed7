"""Logger that shows a run on Weights & Biases, or writes it for ``wandb sync`` (offline mode).

The package's own variables apply: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from distseg.report.loggers.interface import LoggedRun, remember_id, remembered_id

_NAME = "wandb"


class WandbLogger:
    """Logger that shows a run on Weights & Biases.

    The methods are those of :class:`distseg.report.loggers.interface.Logger`. A resumed run goes on
    with the same run of Weights & Biases. W&B does not remove the numbers of steps after the
    checkpoint, so each of these steps has two equal values.

    Args:
        run: the run.
    """

    def __init__(self, run: LoggedRun):
        self._run = run

    def start(self, settings: Mapping[str, Any]) -> None:
        import wandb

        id = remembered_id(self._run, _NAME) or secrets.token_hex(4)
        remember_id(self._run, _NAME, id)
        self._wandb_run = wandb.init(
            id=id,
            resume="allow",
            name=self._run.folder.name,
            project=os.environ.get("WANDB_PROJECT", "distseg"),
            dir=str(self._run.folder),
            settings=wandb.Settings(console="off", init_timeout=60),
        )
        self._wandb_run.config.update(dict(settings), allow_val_change=True)
        # W&B drops numbers whose own step is lower than the last one, but this axis may repeat.
        self._wandb_run.define_metric("*", step_metric="step")

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._wandb_run.log({"step": step, "epoch": epoch, **named})

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        import wandb

        self._wandb_run.log({"step": step, f"validation/{name}": wandb.Image(pixels)})

    def end(self, complete: bool) -> None:
        self._wandb_run.finish(exit_code=0 if complete else 1)
