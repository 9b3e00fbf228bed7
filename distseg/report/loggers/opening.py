"""Opens the loggers of ``train.loggers``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from distseg.report.loggers.background import BackgroundLogger
from distseg.report.loggers.csv_tables import CsvLogger
from distseg.report.loggers.interface import LoggedRun, Logger
from distseg.report.loggers.mlflow_run import MlflowLogger
from distseg.report.loggers.tensorboard_events import TensorBoardLogger
from distseg.report.loggers.wandb_run import WandbLogger

_LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CsvLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_DEFAULT = "tensorboard"  # a logger that nobody asked for may be missing
WITH_PICTURES = ("tensorboard", "wandb", "mlflow")


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed, except TensorBoard.

    A missing TensorBoard is no error, because it is the default of ``train.loggers``.

    Args:
        names: the names of the loggers.

    Raises:
        ValueError: a package is missing; the message names the line that installs it.
    """
    for name in names:
        error = _import_error(name)
        if error is not None and name != _DEFAULT:
            raise ValueError(
                f"train.loggers has {name}, but the package cannot be imported ({error}): "
                f"pip install 'distseg[{name}]', or take {name} out of train.loggers"
            )


def opened_loggers(
    names: Sequence[str], run: LoggedRun, alive: Callable[[], None]
) -> list[BackgroundLogger]:
    """Return the loggers of a run, each of which runs in its own thread.

    If TensorBoard is not installed, print one line that says so.

    Args:
        names: the names of the loggers.
        run: the run.
        alive: function that is called several times a second while loggers end.
    """
    found = []
    for name in names:
        if _import_error(name) is None:
            found.append(BackgroundLogger(name, _LOGGERS[name](run), alive))
        else:
            print(
                f"{name} is not installed (pip install {name}): log.jsonl is written, event files "
                "are not",
                file=sys.stderr,
            )
    return found


def _import_error(name: str) -> ImportError | None:
    """Import the package of a logger, and return the error if the import fails, else None.

    The first import happens here and not in the logger's thread, because two threads that import
    the same packages may wait for each other.
    """
    try:
        importlib.import_module(_MODULES.get(name, "csv"))
    except ImportError as error:
        return error
    return None
