"""Draw images with a sampler of one's own, equal on all ranks: mpirun -n 2 python sampler.py."""

import torch
from dataset import Squares
from torch import nn
from torch.utils.data import DataLoader, Sampler

import distseg


class LargeFirst(Sampler):
    """Yields the images of this sample group by the area of their masks, largest first."""

    def __init__(self, data, mesh):
        order = sorted(range(len(data)), key=lambda n: -int(data[n][1].sum()))
        whole = len(order) // mesh.shape.samples * mesh.shape.samples
        self.mine = order[mesh.sample : whole : mesh.shape.samples]

    def __iter__(self):
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


def main() -> list[float]:
    torch.manual_seed(0)
    mesh, data = distseg.init_mesh(), Squares()
    network = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    model = distseg.distribute(network, mesh)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for image, mask in DataLoader(data, sampler=LargeFirst(data, mesh)):
        optimizer.zero_grad()
        losses.append(model.backward(image, mask, "cross_entropy + 0.5*dice").item())
        optimizer.step()
    return losses


if __name__ == "__main__":
    print(main()[-1])
