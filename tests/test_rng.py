"""The counter-based generator: known numbers, and the same ones in whatever order they are asked for."""

import numpy as np
import torch

from distseg.tiling import rng

SPLITMIX64_OF_SEED_0 = (
    0xE220A8397B1DCDAF,
    0x6E789E6AA1B965F4,
    0x06C45D188009454F,
    0xF88BB8A8724C81EC,
)
SPLITMIX64_OF_SEED_1234567 = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
)


def test_the_published_stream():
    for seed, published in ((0, SPLITMIX64_OF_SEED_0), (1234567, SPLITMIX64_OF_SEED_1234567)):
        assert rng.uniform(seed, 4).tolist() == [(z >> 11) / 2**53 for z in published]


def test_same_numbers_at_any_position():
    for k in (0, rng.key(3, "a"), (1 << 64) - 1):
        stream = rng.uniform(k, 1000)
        positions = torch.randint(0, 1000, (7, 11), generator=torch.Generator().manual_seed(0))
        assert rng.uniform_at(k, positions).numpy().tolist() == stream[positions.numpy()].tolist()
        assert rng.uniform(k, 10).tolist() == stream[:10].tolist()


def test_positions_beyond_32_bits():
    far = (1 << 40) + 5
    k = rng.key(1)
    z = (k + rng._GOLDEN * (far + 1)) & rng._MASK
    assert rng.uniform_at(k, torch.tensor([far])).item() == (rng._mix(z) >> 11) / 2**53


def test_a_key_depends_on_every_part_and_its_place():
    paths = [
        (s, e, n, layer)
        for s in range(5)
        for e in range(5)
        for n in range(-2, 20)
        for layer in ("enc0.drop", "enc1.drop")
    ]
    assert len({rng.key(*path) for path in paths}) == len(paths)
    assert rng.key(1, 2) != rng.key(2, 1) != rng.key(2, 1, 0) != rng.key(2)
    assert all(0 <= rng.key(*path) < 1 << 64 for path in paths)
    assert rng.key(1, 2, "x") == rng.key(np.int64(1), torch.tensor(2), "x")


def test_keys_stay_what_they_were():
    """A run that resumes under a later version must draw the same masks."""
    assert rng.key(0, 0, 0, "enc0_drop0", "dropout") == 4068656880002973857


def test_numbers_are_uniform_and_keys_independent():
    streams = np.stack([rng.uniform(rng.key(7, n), 4000) for n in range(20)])
    assert 0 <= streams.min() and streams.max() < 1
    assert abs(streams.mean() - 0.5) < 0.005
    assert abs(streams.var() - 1 / 12) < 0.002
    related = np.corrcoef(streams) - np.eye(20)
    assert abs(related).max() < 0.08  # 5 standard deviations of 1 / sqrt(4000)


def test_permutations():
    orders = [rng.permutation(rng.key(0, epoch), 50) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[1].tolist() == rng.permutation(rng.key(0, 1), 50).tolist()
    assert rng.permutation(0, 0).tolist() == []
