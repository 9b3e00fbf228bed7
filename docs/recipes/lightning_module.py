"""Train in Lightning by manual optimization: mpirun -n 2 python lightning_module.py."""

import lightning
import torch
from dataset import Squares
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import distseg


class Segmentation(lightning.LightningModule):
    """Lightning runs the loop; distseg computes the gradient over all ranks."""

    def __init__(self, network: nn.Module, mesh):
        super().__init__()
        self.automatic_optimization = False
        self.model = distseg.distribute(network, mesh)
        self.losses = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.losses.append(self.model.backward(*batch, "cross_entropy").item())
        optimizer.step()


def main() -> list[float]:
    torch.manual_seed(0)
    mesh = distseg.init_mesh()
    network = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    module = Segmentation(network, mesh)
    sampler = DistributedSampler(Squares(), mesh.shape.samples, mesh.sample, shuffle=False)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    # Each process is alone to Lightning: distseg sends the messages.
    environment = lightning.fabric.plugins.environments.LightningEnvironment()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, plugins=[environment], barebones=False, **quiet
    )
    trainer.fit(module, DataLoader(Squares(), batch_size=2, sampler=sampler))
    return module.losses


if __name__ == "__main__":
    print(main()[-1])
