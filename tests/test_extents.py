"""Sizes as a user writes them."""

import pytest

from distseg.config.sizes import Size


@pytest.mark.parametrize(
    "given, values, text, volume",
    [
        ("97x131", (97, 131), "97x131", 12707),
        ("4X5×6", (4, 5, 6), "4x5x6", 120),
        (" 2 x 3 ", (2, 3), "2x3", 6),
        ("8", (8,), "8", 8),
        (8, (8,), "8", 8),
        ([2, 3], (2, 3), "2x3", 6),
        (Size("2x3"), (2, 3), "2x3", 6),
    ],
)
def test_reads_what_it_writes(given, values, text, volume):
    found = Size(given)
    assert (found, str(found), repr(found), found.volume) == (values, text, text, volume)
    assert Size(str(found)) == found


@pytest.mark.parametrize(
    "given, message",
    [
        ("97y131", r"'97y131' \(DS103\)"),
        ("1.5x2", r"'1\.5x2' \(DS103\)"),
        ("-1x2", r"'-1x2' \(DS103\)"),
        ("3x", r"'3x' \(DS103\)"),
        ("", r"'' \(DS103\)"),
        ([1.5, 2], r"'1\.5x2' \(DS101\)"),
        ((0, 2), r"'0x2' \(DS102\)"),
        ((3, -1), r"'3x-1' \(DS102\)"),
        ((), r"'' \(DS102\)"),
    ],
)
def test_says_what_is_wrong(given, message):
    with pytest.raises(ValueError, match=message):
        Size(given)
