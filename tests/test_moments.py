"""Means and variances that keep their digits, of any part of an image, combined from parts."""

import pytest
import torch

from distseg.layers.moments import Moments, by_group, combine, of_channels, stack


def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.double().transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1, correction=0)


def check(m: Moments, x: torch.Tensor, rtol: float) -> None:
    mean, var = exact(x)
    assert m.count.item() == x.numel() / x.shape[1]
    assert m.mean.dtype == m.m2.dtype == m.count.dtype == torch.float64
    torch.testing.assert_close(m.mean, mean, rtol=rtol, atol=rtol)
    torch.testing.assert_close(m.var, var, rtol=rtol, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(37, 41), (257, 301)])
def test_a_large_mean_does_not_swallow_the_variance(size, layout):
    """E[x^2] - E[x]^2 in float32 would give noise: 1000^2 has a spacing of 0.06, the variance is 0.0001."""
    x = (
        1000 + 0.01 * torch.randn(1, 5, *size, generator=torch.Generator().manual_seed(0))
    ).contiguous(memory_format=layout)
    check(of_channels(x), x, 1e-3)


def part_of(layout: torch.memory_format, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(
        1, 6, 40, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ) + torch.arange(6.0).view(1, 6, 1, 1)
    return x.to(dtype).contiguous(memory_format=layout)[
        :, :, 3:37, 7:41
    ]  # a view of owned pixels is not dense


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "dtype, rtol", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
def test_views_in_every_layout_and_precision(layout, dtype, rtol):
    x = part_of(layout, dtype)
    check(of_channels(x), x, rtol)


def test_volumes_and_single_pixels():
    x = torch.randn(1, 3, 5, 7, 9, dtype=torch.float64)
    check(of_channels(x), x, 1e-12)
    one = of_channels(torch.tensor([[[[4.0]], [[5.0]]]]))
    assert (one.count.item(), one.mean.tolist(), one.m2.tolist()) == (1, [4, 5], [0, 0])


def test_parts_of_any_size_combine_to_the_whole():
    x = torch.randn(1, 4, 31, 17, dtype=torch.float64) * 3 + 100
    parts = [of_channels(p) for p in x.split([1, 12, 5, 13], 2)]
    check(combine(stack(parts)), x, 1e-12)
    halves = stack([combine(stack(parts[:3])), parts[3]])
    check(combine(halves), x, 1e-12)


def test_by_hand():
    """1 2 3 and 7: mean 13/4, squared deviations 2.25^2 + 1.25^2 + .25^2 + 3.75^2."""
    found = combine(
        stack(
            [
                of_channels(torch.tensor(v, dtype=torch.float64).view(1, 1, 1, -1))
                for v in ([1.0, 2, 3], [7.0])
            ]
        )
    )
    assert (found.count.item(), found.mean.item(), found.m2.item()) == (4, 3.25, 20.75)


def test_nothing_adds_nothing():
    empty = Moments(torch.zeros((), dtype=torch.float64), *torch.zeros(2, 1, dtype=torch.float64))
    full = of_channels(torch.tensor([1.0, 3.0]).view(1, 1, 1, 2))
    found = combine(stack([empty, full]))
    assert (found.count.item(), found.mean.item(), found.m2.item()) == (2, 2, 2)


def test_groups_of_channels():
    x = torch.randn(1, 6, 8, 9, dtype=torch.float64) + torch.arange(6.0).view(1, 6, 1, 1) * 10
    found = by_group(of_channels(x), 2)
    values = x.view(2, -1)
    assert found.count.item() == values.shape[1]
    torch.testing.assert_close(found.mean, values.mean(1))
    torch.testing.assert_close(found.var, values.var(1, correction=0))


def test_a_message_and_back():
    m = stack([of_channels(torch.randn(1, 3, 4, 5)) for _ in range(2)])
    messages = torch.stack((m.packed(), m.packed() * 2))
    found = m.unpacked(messages)
    for mine, theirs in zip(m, found):
        assert torch.equal(theirs, torch.stack((mine, mine * 2)))
