"""Colours: readers with any kind of colour vision tell them apart."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from distseg import report
from distseg.report.style import NATURAL, PALETTE, UNLABELLED, class_colors

# How colours look without one kind of cones, in linear light: Machado et al. 2009, severity 1.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.434, 0.376, 0.190], [0.213, 0.715, 0.072], [0.018, 0.109, 0.873]])


def lab(color, sight) -> np.ndarray:
    """Return a colour as it is seen, in CIE L*a*b* with the white point D65."""
    value = class_colors([""], [color])[0] / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(sight) @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


PAGE = (Path(report.__file__).parent / "templates/base.html").read_text()
WHITISH = {"snow", "ice", "cloud", "background"}
COLORS = {
    "palette": {*PALETTE, UNLABELLED},
    "natural": {color for name, color in NATURAL.items() if name not in WHITISH} | {UNLABELLED},
    **{
        f"lines of the report, {n}": set(re.findall(r"--c\d: (#\w+)", line))
        for n, line in enumerate(line for line in PAGE.splitlines() if "--c0:" in line)
    },
}


@pytest.mark.parametrize("name", COLORS)
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_differ_for_colour_blind_readers(name, sight):
    """A distance of 10 in CIE L*a*b* is seen at once."""
    pairs = itertools.combinations(sorted(COLORS[name]), 2)
    seen = {color: lab(color, SIGHTS[sight]) for color in COLORS[name]}
    assert len(seen) >= 8
    assert not [pair for pair in pairs if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 10]
