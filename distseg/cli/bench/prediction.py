"""Predict the step of a case by the planner, to lay it beside the measured one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distseg.cli.bench.cases import Case
from distseg.cli.bench.results import Measurement
from distseg.cli.planned_training import PlannedTraining
from distseg.config.settings import Config, PipelineConfig, SpatialConfig, StreamingConfig
from distseg.models.capture.capture import as_network
from distseg.models.network import is_flat
from distseg.planning.machine import Machine
from distseg.planning.mesh_search import Planner
from distseg.training.verify import prepare


@dataclass(frozen=True)
class StepPrediction:
    """Planner of the cases of one measurement.

    Attributes:
        config: the settings, from which a case takes everything but its layout.
        random: True for random images of a case's size, False for the images of the store.
        machine: the machine; None if the planner cannot predict any case.
    """

    config: Config
    random: bool
    machine: Machine | None

    def beside(self, case: Case, measured: Measurement) -> Measurement:
        """Return the measurement of a case with its prediction, or with the reason for none."""
        config = self.config
        if reason := left_out(config.streaming, config.pipeline, config.spatial):
            return replace(measured, note=reason)
        prepared = prepare(
            config.with_values(case.changes(config.mesh, config.pipeline, config.spatial)),
            case.image if self.random else None,
        )
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
    """Return why the planner cannot predict steps with these settings; an empty text if it can."""
    if streaming.active:
        return "the planner does not predict streamed tiles"
    if pipeline.placement != "linear":
        return f"the planner does not predict pipeline.placement {pipeline.placement}"
    if spatial.tiles_per_rank.volume > 1:
        return "the planner does not predict several tiles of a rank"
    return ""
