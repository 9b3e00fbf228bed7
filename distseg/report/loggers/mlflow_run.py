"""Logger that shows a run in MLflow.

The package's own variables apply: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from distseg.report.loggers.interface import LoggedRun, named_values, remember_id, remembered_id

_NAME = "mlflow"
_PARAMS = 100  # parameters that MLflow takes at once
_METRICS = 500  # numbers that are sent at once; MLflow takes 1000
_SECONDS = 5.0  # numbers are sent after this time at the latest


class MlflowLogger:
    """Run of MLflow: settings as parameters, numbers as metrics, pictures as artifacts.

    The methods are those of :class:`distseg.report.loggers.interface.Logger`. A resumed run goes on
    with the same run of MLflow. MLflow does not allow a parameter to change, so a setting that has
    changed becomes a tag such as ``optim.lr from step 40``.

    Args:
        run: the run.
    """

    def __init__(self, run: LoggedRun):
        self._run, self._metrics, self._sent = run, [], time.monotonic()

    def start(self, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        now = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in named_values(settings, ".")
        }
        known = remembered_id(self._run, _NAME)
        if known is None:
            self._id, before = self._created(), {}
        else:
            self._id, before = known, self._client.get_run(known).data.params
            self._client.update_run(known, status="RUNNING")
        self._set_params({name: value for name, value in now.items() if name not in before})
        for name, value in now.items():
            if before.get(name, value) != value:
                self._client.set_tag(self._id, f"{name} from step {self._run.resumed_step}", value)

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._metrics += [
            Metric(_allowed(f"{kind}/{name}"), float(value), now, step)
            for name, value in {**values, "epoch": epoch}.items()
        ]
        if len(self._metrics) >= _METRICS or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        file = f"validation/{_allowed(name)}/step-{step:08d}.png"
        self._client.log_image(self._id, pixels, artifact_file=file)

    def end(self, complete: bool) -> None:
        self._send()
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")

    def _created(self) -> str:
        """Create a run in the experiment of MLFLOW_EXPERIMENT_NAME, and return its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "distseg")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        id = self._client.create_run(experiment, run_name=self._run.folder.name).info.run_id
        remember_id(self._run, _NAME, id)
        return id

    def _set_params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in values.items()]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS])

    def _send(self) -> None:
        while self._metrics:
            batch, self._metrics = self._metrics[:_METRICS], self._metrics[_METRICS:]
            self._client.log_batch(self._id, metrics=batch)
        self._sent = time.monotonic()


def _allowed(name: str) -> str:
    """Return a name in which each character that MLflow refuses is replaced by its code, ``-3a-``.

    The code is the number of the character in hexadecimal.
    """
    return re.sub(r"[^/\w.\- ]", lambda found: f"-{ord(found[0]):x}-", name)
