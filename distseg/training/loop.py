"""Train from a config; this file shows the whole run from top to bottom.

Every rank runs the same lines. If only one rank should print or write, this rank has the real log,
progress bar or checkpoint writer, and the other ranks have objects that do nothing.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

from distseg.comm.launch import JointFailure, ToBeContinued, gathered, peak_memory
from distseg.comm.progress import heartbeat, phase
from distseg.comm.replicas import check_same
from distseg.config.settings import Config
from distseg.config.units import si
from distseg.inference.evaluate import evaluate
from distseg.inference.images import evaluate_images
from distseg.inference.metrics import score_of, scores
from distseg.inference.validation_pictures import ValidationPictures
from distseg.report.closing import closing_of_early_stop, closing_of_training
from distseg.report.log import SilentLog, open_log
from distseg.report.loggers.opening import WITH_PICTURES
from distseg.report.progress import progress
from distseg.runtime.optimizer import learning_rate
from distseg.training.checkpoint.files import find, read_run_manifest
from distseg.training.control import RunControl
from distseg.training.run import Run


def train(config: Config, world) -> dict | None:
    """Train a network, and return the scores of the last validation.

    All ranks of ``world`` must call it together. Only rank 0 gets the scores, the others get None.
    Rank 0 gets None, too, if there was no validation.

    Raises:
        ValueError, OSError: the config, data or mesh is wrong. It is raised on all ranks before any
            work.
        ToBeContinued: a signal or the time limit ended the run, and a checkpoint is written. It is
            raised on all ranks.
    """
    run = Run(config, world)
    result = run.position.validation if run.first else None
    if run.finished:
        if run.first:
            print(_why_finished(run), flush=True)
        return result
    with (
        RunControl(run.mesh.world, config.train) as control,
        open_log(
            config.train.output,
            config.train.loggers,
            run.first,
            run.resumed.get("step"),
            revalidates=run.position.samples > 0,
            alive=partial(heartbeat, "end of the loggers"),
        ) as log,
    ):
        for line in run.lines if run.first else []:
            print(line, flush=True)
        log.write(
            "start",
            run.position.step,
            run.position.epoch,
            config=run.config.as_plain(),
            parameters=run.parameters,
            precision=run.engine.precision,
            device=run.engine.device.type,
            base_memory=run.base_memory(),
        )
        training = _Training(run, control, log)
        try:
            while not training.ended:
                training.epoch()
        except Exception:
            # Do not lose a checkpoint that is being written. The error is the one to report.
            with suppress(Exception):
                run.checkpoints.flush()
            raise
        seconds = training.seconds
        log.write(
            "end",
            training.position.step,
            training.position.epoch - 1,
            seconds=seconds,
            bytes_read=run.loader.bytes_read,
            peak_memory=world.allgather(peak_memory(run.engine.device)),
            peak_memory_of_steps=world.allgather(training.peak_of_steps),
        )
        if run.first and run.loader.steps_read:
            print(
                f"rank 0 read {si(run.loader.bytes_read / run.loader.steps_read, 'B')} a step",
                flush=True,
            )
    phase("waiting for all ranks to end")
    gathered(world)
    for line in training.closing() if run.first else ():
        print(line, flush=True)
    return training.position.validation if run.first else None


class _Training:
    """Training of one run, epoch by epoch: steps, validation and checkpoints."""

    def __init__(self, run: Run, control: RunControl, log: SilentLog):
        self.run, self.control, self.log, self.config = run, control, log, run.config
        self.position, self.first_step = run.position, run.first_step
        self.ended, self.stopped_early, self._start = False, False, time.monotonic()
        self.peak_of_steps: int | None = None  # bytes of this rank before the first validation

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def epoch(self) -> None:
        """Run the remaining steps of the current epoch.

        Then write a checkpoint and validate, each if it is due after this epoch. If a validation
        has the best score so far, also write a checkpoint, so that these weights are not lost. The
        run ends after the last epoch, when its time is over, or if the score no longer improves.
        """
        run, train, number = self.run, self.config.train, self.position.epoch
        run.engine.context.epoch = number
        self._steps(number)
        if self.peak_of_steps is None:
            self.peak_of_steps = peak_memory(run.engine.device)
        self.ended = number + 1 == train.epochs or self._out_of_time()
        saves = self.ended or (number + 1) % train.checkpoint_every == 0
        validates = (
            bool(train.validate_every)
            and (self.ended or (number + 1) % train.validate_every == 0)
            and "val" in run.store.splits
        )
        # Save before validation, so that an error in validation loses no steps.
        saved = saves and validates
        if saved:
            self._save()
        if validates:
            self._validate(number)
        self.position, self.first_step = replace(self.position, epoch=number + 1, samples=0), 0
        self.stopped_early = not self.ended and run.stops_early(self.position)
        score = score_of(self.position.validation) if validates else None
        if saved:
            run.checkpoints.update(score, **asdict(self.position))
        elif saves or self.stopped_early or self.position.best_epoch == number + 1:
            self._save(score)
        self.ended |= self.stopped_early
        if self.ended:
            run.checkpoints.flush()

    def _steps(self, number: int) -> None:
        """Run the remaining steps of an epoch, and log each of them."""
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
                self.control.post()
                # Not position.step, as a resumed run may have a different number of steps per epoch
                # than before.
                rate = learning_rate(self.config.optim, number * steps + k, run.total)
                loss, norm = engine.step(micro_batches, rate)
                self.position = self.position.after_step(
                    run.samples_after(k + 1), engine.loss_scale
                )
                step, scale = self.position.step, self.position.loss_scale
                _check_finite(loss, norm, step, train.output, scale)
                if train.check_replicas and step % train.check_replicas == 0:
                    check_same(run.model, run.mesh.replicas)
                self.log.write(
                    "step",
                    step,
                    number,
                    loss=loss,
                    lr=rate,
                    gradient_norm=norm if math.isfinite(norm) else None,
                    seconds=self.seconds,
                    **({} if scale is None else {"loss_scale": scale}),
                )
                bar.advance(pixels=engine.pixels(micro_batches), loss=loss)
                self._heed()

    def _heed(self) -> None:
        """Do what all ranks have decided after a step: go on, save, or save and end the run.

        If the thread that writes checkpoints had an error, raise it first.

        Raises:
            ToBeContinued: the run ends.
        """
        self.run.checkpoints.check()
        decision = self.control.decision()
        if decision.save:
            self._save()
        if decision.stop:
            self._leave(decision.stop)

    def _save(self, score: float | None = None) -> None:
        """Begin to write a checkpoint of the current state.

        Args:
            score: the score of a validation of the current weights; None if it is not known.
        """
        run = self.run
        run.checkpoints.save(run.model, run.engine.optimizer, run.manifest(self.position), score)
        self.control.saved(run.checkpoints.seconds)

    def _leave(self, why: str) -> None:
        """End the run, after waiting until the last checkpoint is written.

        Args:
            why: the reason, for the message.

        Raises:
            ToBeContinued: always, on all ranks.
        """
        self.run.checkpoints.flush()
        phase("waiting for all ranks to end")
        gathered(self.run.world)
        at = self.position
        raise ToBeContinued(
            f"{why}: the run ends after step {at.step} with a checkpoint in "
            f"{self.config.train.output}, to be continued with --train.resume true"
        )

    def _validate(self, number: int) -> None:
        """Validate the network after an epoch, and log, print and record its scores.

        A signal or a time limit may end the run in the middle; a checkpoint is then written.
        """
        run, decisions = self.run, []

        def stop() -> bool:
            decisions.append(self.control.ask())
            return bool(decisions[-1].stop)

        phase(f"validation after epoch {number + 1}")
        of_images = run.store.of_images
        common = (run.predictor, run.store, "val", run.world, stop, run.validation_loss)
        pictures = None
        if of_images:
            found = evaluate_images(*common)
        elif set(WITH_PICTURES) & set(self.config.train.loggers):
            pictures = ValidationPictures(run.store, "val")
            found = evaluate(*common, pictures.add)
        else:
            found = evaluate(*common)
        if found is None:
            self._save()
            self._leave(decisions[-1].stop)
        result = (
            found if of_images else {"loss": found.loss, **scores(found.matrix, run.store.classes)}
        )
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
        loss = result["loss"]
        self.log.write("validation", self.position.step, number, loss=loss, **logged)
        for name, pixels in pictures.gathered(run.world) if pictures else ():
            self.log.picture(self.position.step, name, pixels)
        if run.first:
            print(f"epoch {number + 1}: validation {words}; loss {loss:.4g}", flush=True)
        self.position = self.position.with_validation(number + 1, result, score_of(result))

    def closing(self) -> list[str]:
        """Return the last lines to print: the result, the run's folder and the next command."""
        output, at = self.config.train.output, self.position
        best = find(output)
        manifest = read_run_manifest(best)
        scored = None
        if manifest.get("score") is not None:
            scored = {
                "checkpoint": best,
                "epoch": manifest["epoch"],
                "validation": manifest["validation"],
            }
        lines = closing_of_training(
            output, at.epoch, at.step, self.seconds, scored, list(self.run.store.splits)
        )
        if self.stopped_early:
            lines.insert(0, closing_of_early_stop(at.best_epoch, at.validated, at.validation))
        return lines

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        return limit is not None and self.run.world.bcast(self.seconds > 60 * limit, root=0)


def _why_finished(run: Run) -> str:
    """Return the message that a run which goes on from a checkpoint has nothing left to do."""
    at, train = run.position, run.config.train
    if at.epoch >= train.epochs:
        return (
            f"{train.output} has its {at.epoch} epochs already, and train.epochs is "
            f"{train.epochs}: raise it to go on"
        )
    stopped = closing_of_early_stop(at.best_epoch, at.validated, at.validation)
    return f"{train.output} {stopped}; train.patience is {train.patience}: raise it to go on"


def _check_finite(
    loss: float, norm: float, step: int, output: str, scale: float | None = None
) -> None:
    """End the run if the loss or the gradient's norm is not a finite number.

    With precision fp16, a norm that is not finite only halves the loss scale, until the scale is
    below 1. All numbers are the same on every rank, so all ranks raise the error together.

    Args:
        loss: the loss of the step.
        norm: the norm of its gradient.
        step: the number of the step.
        output: the folder of the run, for the message.
        scale: the loss scale after the step; None without precision fp16.

    Raises:
        JointFailure: a number is not finite. The message names the step, both numbers and how to
            fix it.
    """
    adapts = scale is not None and scale >= 1
    if not (math.isfinite(loss) and (math.isfinite(norm) or adapts)):
        raise JointFailure(
            f"step {step}: the loss is {loss} and the gradient's norm is {norm}, but both must be "
            "finite: lower optim.lr, set optim.clip, or train with train.precision fp32; "
            f"checkpoints of steps before this one are in {output}, if any was written"
        )
