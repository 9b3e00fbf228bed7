"""Holds the trained parameters of a network and steps the optimizer."""

from __future__ import annotations

import torch
from torch import nn

from distseg.comm.mesh import Mesh
from distseg.comm.progress import heartbeat
from distseg.comm.reducer import Gradients, make_reducer
from distseg.comm.replicas import broadcast
from distseg.config.settings import OptimConfig
from distseg.models.network import user_names
from distseg.runtime.loss_scale import LossScale
from distseg.runtime.optimizer import make_optimizer, set_learning_rate


class ParameterUpdate:
    """Trained parameters of a rank's network, with their gradients, reducer and optimizer.

    The reducer sums the gradients over the replicas.

    Attributes:
        loss_scale: the factor of the loss gradient with precision fp16, else None.

    Args:
        mesh: the mesh of ranks.
        optim: the settings of the optimizer.
        reducer: the value of the setting ``mesh.reducer``, which names the library that sums
            gradients.
        halved: True if gradients are rounded to 16 bits before they are summed over the replicas.
        network: the network on its device. All replicas take over the weights and buffers of
            the first replica, so all ranks must create this object together.
        device: the device of the network.
    """

    loss_scale: LossScale | None = None

    def __init__(
        self,
        mesh: Mesh,
        optim: OptimConfig,
        reducer: str,
        halved: bool,
        network: nn.Module,
        device: torch.device,
    ):
        broadcast(network, mesh.replicas)
        trained = user_names(
            ((name, p) for name, p in network.named_parameters() if p.requires_grad), network
        )
        self.mesh, self.parameters, self._clip = mesh, list(trained.values()), optim.clip
        self.gradients = Gradients(self.parameters, flat=mesh.replicas.size > 1)
        heartbeat("start of what sums gradients")
        self.reducer = make_reducer(reducer, mesh, halved, device.type)
        self.optimizer = make_optimizer(optim, trained)

    def descend(self, rate: float, norm: float, epoch: int) -> None:
        """Clip the gradients and step the optimizer.

        Args:
            rate: the learning rate of this step.
            norm: the 2-norm of the gradients of the whole network, before they are clipped.
            epoch: the number of the epoch. Parts that are trained only from a later epoch on
                (``optim.thaw``) are not changed.

        Raises:
            RuntimeError: if a postponed weight gradient was not computed yet.
        """
        self.mesh.waits.check_done()
        if self._clip:
            self.gradients.clip(self._clip, norm)
        set_learning_rate(self.optimizer, rate, epoch)
        self.optimizer.step()
