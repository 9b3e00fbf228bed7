"""Networks of several outputs, as packages return them, or of several inputs."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn


class Deep(nn.Module):
    """Heads at full and half size, and one before the decoder."""

    def __init__(self, in_channels, out_channels, aux_channels=None):
        super().__init__()
        self.first, self.down, self.up = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.Conv2d(14, 6, 3, padding=1),
        )
        self.norm, self.drop, self.head = (
            nn.BatchNorm2d(8),
            nn.Dropout2d(0.2),
            nn.Conv2d(6, out_channels, 1),
        )
        self.aux, self.early = (
            nn.Conv2d(8, aux_channels or out_channels, 3, padding=1),
            nn.Conv2d(6, out_channels, 3, padding=1),
        )

    def heads(self, x):
        a = F.relu(self.first(x))
        b = F.relu(self.norm(self.down(a)))
        c = F.relu(self.up(torch.cat((a, F.interpolate(b, scale_factor=2)), 1)))
        return self.head(c), self.aux(self.drop(b)), self.early(a)

    def forward(self, x):
        """Return a list at any time, as UNet++ and nnU-Net do."""
        return list(self.heads(x))


class Dict(Deep):
    """As torchvision's networks; what else is there does not matter."""

    def forward(self, x):
        out, aux, _ = self.heads(x)
        return {"aux": aux, "out": out, "sizes": list(x.shape)}


class Training(Deep):
    """A tuple in training alone, the best map last."""

    def forward(self, x):
        out, aux, _ = self.heads(x)
        return (aux, out) if self.training else out


class Stacked(Deep):
    """Maps of full size in a dim of their own in training, as MONAI's DynUNet."""

    def forward(self, x):
        out, aux, early = self.heads(x)
        return (
            torch.stack((out, F.interpolate(aux, size=x.shape[2:]), early), 1)
            if self.training
            else out
        )


class Quarter(nn.Module):
    """Maps that are all smaller than the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second = nn.Conv3d(in_channels, 6, 3, 2, 1), nn.Conv3d(6, 6, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv3d(6, out_channels, 1) for _ in range(2))

    def forward(self, x):
        a = F.relu(self.first(x))
        return [self.heads[0](a), self.heads[1](F.relu(self.second(a)))]


Answers = namedtuple("Answers", "logits aux_logits")


class Classifier(nn.Module):
    """Vectors of an image, as of Inception."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second = nn.Conv2d(in_channels, 6, 3, padding=1), nn.Conv2d(6, 6, 3, 2, 1)
        self.head, self.aux = nn.Linear(6, out_channels), nn.Linear(6, out_channels)

    def forward(self, x):
        a = F.relu(self.first(x))
        answer = self.head(F.relu(self.second(a)).mean((2, 3)))
        return Answers(answer, self.aux(a.mean((2, 3)))) if self.training else answer


class Inputs(nn.Module):
    """Two images."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.colours, self.depth, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(1, 4, 5, padding=2),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def forward(self, colours, depth):
        return self.head(F.relu(torch.cat((self.colours(colours), self.depth(depth)), 1)))


class Both(Inputs):
    """Two images, and two outputs."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.aux = nn.Conv2d(4, out_channels, 1)

    def forward(self, colours, depth):
        depth = self.depth(depth)
        return self.head(F.relu(torch.cat((self.colours(colours), depth), 1))), self.aux(depth)


class Attending(Deep):
    """Whose calls are not followed."""

    def forward(self, x):
        out, aux, _ = self.heads(x)
        return {"out": out * out.flatten(2).softmax(-1).view_as(out), "aux": aux}
