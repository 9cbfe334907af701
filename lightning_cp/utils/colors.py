"""Colours of pictures that differ for the colour-blind, too."""

from __future__ import annotations

PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#777777",
)
"""The colours of Okabe and Ito, with a grey for their black."""


def color_of(number: int) -> str:
    """Return the colour of one of several things; more than eight repeat them."""
    return PALETTE[number % len(PALETTE)]
