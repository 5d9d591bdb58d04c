"""The colours of all pictures, beside those of actions (`KINDS`). They are told apart in print, in light and dark
pages, and by the colour-blind."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DARK", "LIGHT", "Scheme", "ink_on"]


class Scheme(NamedTuple):
    """The colours around the actions."""

    page: str
    text: str
    faint: str
    """Lines and what matters less."""
    wait: str


LIGHT = Scheme("#ffffff", "#1f2328", "#8c959f", "#dfe3e8")
DARK = Scheme("#0d1117", "#e6edf3", "#7d8590", "#30363d")


def ink_on(colour: str) -> str:
    """The colour of text on one of the actions' colours: dark on light ones, light on dark ones. It is none of a
    scheme's, which differ from page to page."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "#fafafa"
