"""Predict the step of a case by the planner, to lay it beside the measured one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distseg.cli.bench.cases import Case
from distseg.cli.bench.measuring import Steps
from distseg.cli.bench.results import Measurement
from distseg.cli.planned_training import PlannedTraining
from distseg.config.settings import PipelineConfig, SpatialConfig, StreamingConfig
from distseg.models.capture.capture import as_network
from distseg.models.network import is_flat
from distseg.planning.machine import Machine
from distseg.planning.mesh_search import Planner


@dataclass(frozen=True)
class StepPrediction:
    """Predictions of the planner for the cases of one measurement.

    Attributes:
        steps: how the steps of the cases are measured.
        machine: the speed of the machine; None if the planner cannot predict any case.
    """

    steps: Steps
    machine: Machine | None

    def beside(self, case: Case, measured: Measurement) -> Measurement:
        """Return a measurement with the planner's prediction added, or the reason for none."""
        config = self.steps.config
        if reason := left_out(config.streaming, config.pipeline, config.spatial):
            return replace(measured, note=reason)
        prepared = self.steps.prepared(case)
        training = PlannedTraining(prepared.config, as_network(prepared.model), prepared.size)
        if self.machine is None or not is_flat(training.model):
            network = config.model.name
            return replace(measured, note=f"distseg cannot follow the layers of {network}")
        try:
            found = Planner(training.work(self.machine), self.machine).predict(case.layout)
        except ValueError as e:
            return replace(measured, note=str(e))
        predicted = {"seconds": found.seconds, "memory": found.memory, "parts": found.parts}
        return replace(measured, predicted=predicted)


def left_out(streaming: StreamingConfig, pipeline: PipelineConfig, spatial: SpatialConfig) -> str:
    """Return why the planner cannot predict steps with these settings, or "" if it can."""
    if streaming.active:
        return "the planner does not predict streamed tiles"
    if pipeline.placement != "linear":
        return f"the planner does not predict pipeline.placement {pipeline.placement}"
    if spatial.tiles_per_rank.volume > 1:
        return "the planner does not predict several tiles of a rank"
    return ""
