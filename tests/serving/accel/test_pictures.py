"""Pictures of kept pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from serving.accel import pictures


def test_brightness_is_the_share_of_heads(tmp_path: Path) -> None:
    kept = torch.tensor([[[True, True, False], [True, False, False]], [[True, False, False], [True, False, False]]])
    path = pictures.draw(tmp_path / "new", "ask-1", 3, 512, kept)
    assert path.name == "ask-1-from000512-layer03.png"
    with Image.open(path) as picture:
        assert picture.size == (12, 8)
        assert [picture.getpixel((x, y)) for y in (0, 4) for x in (0, 4, 8)] == [255, 128, 0, 255, 0, 0]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/", "", "a\x00b"])
def test_a_picture_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    path = pictures.draw(tmp_path, name, 0, 0, torch.ones(1, 1, 1, dtype=torch.bool))
    assert path.parent == tmp_path
    assert path.is_file()


def test_off_unless_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pictures.VARIABLE, raising=False)
    assert pictures.folder() is None
    monkeypatch.setenv(pictures.VARIABLE, "pictures")
    assert pictures.folder() == Path("pictures")
