"""Train and predict in a plain loop: mpirun -n 4 python plain_loop.py, or python plain_loop.py."""

import torch
from torch import nn

import distseg


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 2, 1)
    )


def cross_entropy(logits, target):
    return nn.functional.cross_entropy(logits, target, reduction="none")


def main(steps: int = 3) -> float:
    torch.manual_seed(0)
    mesh = distseg.init_mesh(samples=1, tiles=(1, -1))  # all ranks share an image
    model = distseg.distribute(network(), mesh)
    criterion = distseg.PixelLoss(cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        image, target = torch.randn(1, 3, 301, 437), torch.randint(2, (1, 301, 437))
        loss = model.backward(image, target, criterion)
        optimizer.step()
        optimizer.zero_grad()
    logits = model.predict(image)
    if mesh.rank == 0:
        print(f"loss {loss:.6f}, logits {tuple(logits.shape)}")
    return loss.item()


if __name__ == "__main__":
    main()
