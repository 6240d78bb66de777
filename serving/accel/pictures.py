"""Which pages each layer kept, as pictures to look into a selector; off unless FOREWORD_ACCEL_PICTURES is a folder.

A picture shows one layer and step of one request: a row is a tile of queries, a column a page of the cache, and its
brightness the share of heads that keep it. Pages that a tile cannot see are black.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor

VARIABLE = "FOREWORD_ACCEL_PICTURES"
# Pixels of a tile and page.
_SCALE = 4


def folder() -> Path | None:
    """Where pictures go, or None."""
    given = os.environ.get(VARIABLE)
    return None if not given else Path(given)


def draw(into: Path, name: str, layer: int, first: int, kept: Tensor) -> Path:
    """Write one picture, and return where it is.

    Args:
        name: of the request; what does not belong into a file's name is left out.
        first: position of the step's first query.
        kept: [heads, tiles, pages], bool.
    """
    from PIL import Image

    shares = kept.float().mean(0).mul(255).round().byte().cpu().numpy()  # [tiles, pages]
    into.mkdir(parents=True, exist_ok=True)
    safe = re.sub(r"[^A-Za-z0-9-]", "", name)[:64] or "request"
    path = into / f"{safe}-from{first:06}-layer{layer:02}.png"
    picture = Image.fromarray(shares)
    picture.resize((picture.width * _SCALE, picture.height * _SCALE), Image.Resampling.NEAREST).save(path)
    return path
