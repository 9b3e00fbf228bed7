"""Train on one process, as in a notebook: an image in streamed tiles, within a limit of memory."""

import numpy as np
import torch
from torch import nn

import distseg


def main(path: str = "image.npy") -> float:
    np.save(path, np.random.default_rng(0).standard_normal((3, 700, 900), np.float32))
    image = np.load(path, mmap_mode="r")  # read box by box
    target = (image[0] > 0).astype(np.int64)

    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))
    model = distseg.distribute(network, streaming="2GB")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        loss = model.backward(image, target, "cross_entropy")
        optimizer.step()
        optimizer.zero_grad()
    for box, logits in model.predict_tiles(image):
        print(box, logits.shape)

    network.load_state_dict(model.whole_state_dict())  # plain PyTorch again
    return loss.item()


if __name__ == "__main__":
    main()
