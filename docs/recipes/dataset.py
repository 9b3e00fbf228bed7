"""Train on a torch Dataset, each sample group on its own images: mpirun -n 4 python dataset.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import distseg


class Squares(Dataset):
    """Images of noise with a brighter square, and its mask."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int):
        noise = torch.Generator().manual_seed(number)
        image, mask = torch.randn(1, 96, 128, generator=noise), torch.zeros(96, 128).long()
        mask[20 : 40 + number, 30:70] = 1
        return image + mask, mask


def main(epochs: int = 2) -> list[float]:
    torch.manual_seed(0)
    mesh = distseg.init_mesh()  # all ranks are sample groups; init_mesh(tiles=(1, 2)) for pairs
    network = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    model = distseg.distribute(network, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # All ranks of a sample group load the same images; groups load different ones.
    sampler = DistributedSampler(Squares(), mesh.shape.samples, mesh.sample)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.set_epoch(epoch)
        for image, mask in DataLoader(Squares(), batch_size=2, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            losses.append(model.backward(image, mask, "cross_entropy").item())
            optimizer.step()
    return losses


if __name__ == "__main__":
    print(main()[-1])
