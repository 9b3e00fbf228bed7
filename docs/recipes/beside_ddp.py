"""A network over tiles beside a small one under DistributedDataParallel, on one DeviceMesh.

torchrun --nproc-per-node 4 beside_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import distseg

shape = (int(os.environ["WORLD_SIZE"]) // 2, 2)
device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("samples", "tiles"))
mesh = distseg.init_mesh(comm=device_mesh)

torch.manual_seed(0)
segments = distseg.distribute(torch.nn.Conv2d(3, 2, 5, padding=2), mesh)
of_groups = device_mesh.get_group("samples")
score = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=of_groups)
parameters = [*segments.parameters(), *score.parameters()]
optimizer = torch.optim.AdamW(parameters, 1e-2)
criterion = distseg.PixelLoss(torch.nn.CrossEntropyLoss(reduction="none"))

generator = torch.Generator().manual_seed(mesh.sample)  # each sample group has its own images
for _ in range(3):
    image = torch.rand(1, 3, 101, 137, generator=generator)
    target = (image.mean(1) > 0.5).long()
    optimizer.zero_grad()
    loss = segments.backward(image, target, criterion)
    error = (score(image.mean((2, 3))) - target.float().mean()).square().mean()
    error.backward()
    optimizer.step()
if mesh.rank == 0:
    print(f"loss {loss:.6f} error {error:.6f}")
dist.destroy_process_group()
