"""Training from a config: the story of a run from top to bottom.

Every rank runs the same lines. Where only one should speak or write, it holds the real log, bar or checkpoint folder
and the others hold silent ones.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from distseg.comm.launch import JointFailure, ToBeContinued, gathered
from distseg.comm.replicas import check_same
from distseg.comm.watch import phase
from distseg.config.settings import Config
from distseg.config.units import si
from distseg.inference.evaluate import evaluate
from distseg.inference.images import evaluate_images
from distseg.inference.metrics import score_of, scores
from distseg.report.closing import closing_of_training
from distseg.report.log import SilentLog, open_log
from distseg.report.progress import progress
from distseg.runtime.optimizer import learning_rate
from distseg.training.checkpoint.files import find, read_run_manifest
from distseg.training.control import RunControl
from distseg.training.run import Run, plain


def train(config: Config, world) -> dict | None:
    """Train on all ranks of ``world``; returns the last validation's scores on rank 0.

    Raises:
        ValueError, OSError: on all ranks, before work starts, for whatever in config, data or mesh can not be.
        ToBeContinued: on all ranks, when the run was told to end and has written a checkpoint.
    """
    run = Run(config, world)
    result = run.position.validation if run.first else None
    if run.finished:
        if run.first:
            print(
                f"{config.train.output} has its {run.position.epoch} epochs already, and train.epochs is {config.train.epochs}: raise it to go on",
                flush=True,
            )
        return result
    with (
        RunControl(run.mesh.world, config.train) as orders,
        open_log(
            config.train.output,
            config.train.tensorboard,
            run.first,
            run.resumed.get("step"),
            revalidates=run.position.samples > 0,
        ) as log,
    ):
        for line in run.lines if run.first else []:
            print(line, flush=True)
        log.write(
            "start",
            run.position.step,
            run.position.epoch,
            config=plain(run.config),
            parameters=run.parameters,
        )
        story = _Story(run, orders, log)
        while not story.ended:
            story.epoch()
        log.write(
            "end",
            story.position.step,
            story.position.epoch - 1,
            seconds=story.seconds,
            bytes_read=run.loader.bytes_read,
        )
        if run.first and run.loader.steps_read:
            print(
                f"rank 0 read {si(run.loader.bytes_read / run.loader.steps_read, 'B')} a step",
                flush=True,
            )
    phase("waiting for all ranks to end")
    gathered(world)
    for line in story.closing() if run.first else ():
        print(line, flush=True)
    return story.position.validation if run.first else None


class _Story:
    """Epoch after epoch of a run."""

    def __init__(self, run: Run, orders: RunControl, log: SilentLog):
        self.run, self.orders, self.log, self.config = run, orders, log, run.config
        self.position, self.first_step = run.position, run.first_step
        self.ended, self._start = False, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def epoch(self) -> None:
        """The steps of an epoch that are left, its checkpoint, its validation."""
        run, train, number = self.run, self.config.train, self.position.epoch
        run.engine.context.epoch = number
        self._steps(number)
        self.ended = number + 1 == train.epochs or self._out_of_time()
        saves = self.ended or (number + 1) % train.checkpoint_every == 0
        validates = (
            bool(train.validate_every)
            and (self.ended or (number + 1) % train.validate_every == 0)
            and "val" in run.store.splits
        )
        if saves and validates:
            self._save()  # what validation meets with costs no steps
        if validates:
            self._validate(number)
        self.position, self.first_step = replace(self.position, epoch=number + 1, samples=0), 0
        if saves and validates:
            score = score_of(self.position.validation)
            run.checkpoints.update(
                score, epoch=number + 1, samples=0, validation=self.position.validation
            )
        elif saves:
            self._save()
        if self.ended:
            run.checkpoints.flush()

    def _steps(self, number: int) -> None:
        run, engine, loader, train = self.run, self.run.engine, self.run.loader, self.config.train
        steps = loader.steps_per_epoch
        with progress(
            steps - self.first_step, "step", f"epoch {number + 1}/{train.epochs}", enabled=run.first
        ) as bar:
            engine.watch_step(bar.partly)
            for k, micro_batches in enumerate(
                loader.epoch(number, self.first_step), self.first_step
            ):
                phase(f"epoch {number + 1}, step {k + 1} of {steps}")
                self.orders.post()
                rate = learning_rate(
                    self.config.optim, number * steps + k, run.total
                )  # not by the step: a resumed run may take other steps
                loss, norm = engine.step(micro_batches, rate)
                step = self.position.step + 1
                self.position = replace(self.position, step=step, samples=run.samples_after(k + 1))
                _check_finite(loss, norm, step, self.config)
                if train.check_replicas and step % train.check_replicas == 0:
                    check_same(run.model, run.mesh.replicas)
                self.log.write(
                    "step",
                    step,
                    number,
                    loss=loss,
                    lr=rate,
                    gradient_norm=norm,
                    seconds=self.seconds,
                )
                bar.advance(pixels=engine.pixels(micro_batches), loss=loss)
                self._heed()

    def _heed(self) -> None:
        """Do what the run is told after a step."""
        self.run.checkpoints.check()
        wish = self.orders.met()
        if wish.save:
            self._save()
        if wish.stop:
            self._leave(wish.stop)

    def _save(self) -> None:
        run = self.run
        run.checkpoints.save(run.model, run.engine.optimizer, run.manifest(self.position))
        self.orders.saved(run.checkpoints.seconds)

    def _leave(self, why: str) -> None:
        """End with the checkpoint that was just begun."""
        self.run.checkpoints.flush()
        phase("waiting for all ranks to end")
        gathered(self.run.world)
        at = self.position
        raise ToBeContinued(
            f"{why}: the run ends after step {at.step} with a checkpoint in {self.config.train.output}, to be continued with --train.resume true"
        )

    def _validate(self, number: int) -> None:
        run, told = self.run, []

        def stop() -> bool:
            told.append(self.orders.ask())
            return bool(told[-1].stop)

        phase(f"validation after epoch {number + 1}")
        of_images = run.store.of_images
        found = (evaluate_images if of_images else evaluate)(
            run.predictor, run.store, "val", run.world, stop
        )
        if found is None:
            self._save()
            self._leave(told[-1].stop)
        result = found if of_images else scores(found, run.store.classes)
        if of_images:
            logged = {
                kind: result[kind]
                for kind in ("accuracy", "mean_accuracy", "auc", "kappa", "mae", "rmse", "r2")
                if kind in result
            }
            words = ", ".join(
                f"{kind.replace('_', ' ')} {value:.3f}"
                for kind, value in logged.items()
                if value is not None
            )
        else:
            iou = {name: row["iou"] for name, row in result["classes"].items()}
            logged = dict(iou=iou, mean_iou=result["mean_iou"], accuracy=result["accuracy"])
            words = "IoU " + ", ".join(
                f"{n} {v:.3f}" if v is not None else f"{n} -" for n, v in iou.items()
            )
        self.log.write("validation", self.position.step, number, **logged)
        if run.first:
            print(f"epoch {number + 1}: validation {words}", flush=True)
        self.position = replace(self.position, validation=result)

    def closing(self) -> list[str]:
        """Return what came out of the run, where it lies, and the next command."""
        output, at = self.config.train.output, self.position
        best = find(output)
        manifest = read_run_manifest(best)
        told = None
        if manifest.get("score") is not None:
            told = {
                "checkpoint": best,
                "epoch": manifest["epoch"],
                "validation": manifest["validation"],
            }
        return closing_of_training(
            output, at.epoch, at.step, self.seconds, told, list(self.run.store.splits)
        )

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        return limit is not None and self.run.world.bcast(self.seconds > 60 * limit, root=0)


def _check_finite(loss: float, norm: float, step: int, config: Config) -> None:
    """Both are the same on every rank, so all of them end here together."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise JointFailure(
            f"step {step}: the loss is {loss} and the gradient's norm {norm}: lower optim.lr, set optim.clip, or train with train.precision fp32; "
            f"checkpoints up to here are in {config.train.output}"
        )
