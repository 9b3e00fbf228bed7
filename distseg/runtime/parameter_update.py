"""Holds the trained parameters of a network and steps the optimizer."""

from __future__ import annotations

import torch
from torch import nn

from distseg.comm.mesh import Mesh
from distseg.comm.reducer import Gradients, make_reducer
from distseg.comm.replicas import broadcast
from distseg.comm.watch import heartbeat
from distseg.config.settings import Config
from distseg.models.network import user_names
from distseg.runtime.optimizer import make_optimizer, set_learning_rate


class ParameterUpdate:
    """Trained parameters of a rank's network, their gradients, reducer and optimizer.

    The reducer sums the gradients over the replicas.

    Args:
        config: the run's settings.
        mesh: the mesh of ranks.
        network: the network on its device. All replicas take the first one's values. Collective.
        device: the device of the network.
    """

    def __init__(self, config: Config, mesh: Mesh, network: nn.Module, device: torch.device):
        broadcast(network, mesh.replicas)
        trained = user_names(
            ((name, p) for name, p in network.named_parameters() if p.requires_grad), network
        )
        self.config, self.mesh, self.parameters = config, mesh, list(trained.values())
        self.gradients = Gradients(self.parameters, flat=mesh.replicas.size > 1)
        heartbeat("start of what sums gradients")
        self.reducer = make_reducer(
            config.mesh.reducer, mesh, config.approximate.gradients == "fp16", device.type
        )
        self.optimizer = make_optimizer(config.optim, trained)

    def descend(self, rate: float, norm: float, epoch: int) -> None:
        """Clip gradients of this ``norm``, and step the optimizer.

        Raises:
            RuntimeError: if a weight gradient is still to be computed.
        """
        self.mesh.waits.check_done()
        if self.config.optim.clip:
            self.gradients.clip(self.config.optim.clip, norm)
        set_learning_rate(self.optimizer, rate, epoch)
        self.optimizer.step()
