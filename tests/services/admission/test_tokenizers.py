"""Tests of the folders in which admission reads a tokenizer because a worker names them."""

import os
import shutil
from pathlib import Path

import pytest

from services.admission.tokenizers import Tokenizers
from shared.models import shipped
from shared.text.tokenizer import Tokenizer
from tests import made

SHIPPED = shipped.folder(shipped.DEFAULT)


def model(folder: Path) -> Path:
    """A folder that has a tokenizer."""
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


async def read(tokenizers: Tokenizers, folder: Path | str) -> Tokenizer | None:
    return await tokenizers.of("m", made.announce(model="m", engine="torch", folder=str(folder)))


@pytest.fixture
def tokenizers(tmp_path: Path) -> Tokenizers:
    folder = model(tmp_path / "models" / "configured")
    return Tokenizers({"configured": Tokenizer.load(folder)}, [folder.parent])


async def test_a_folder_beside_a_configured_one_is_read(
    tokenizers: Tokenizers, tmp_path: Path
) -> None:
    folder = model(tmp_path / "models" / "m")
    assert await read(tokenizers, folder) is Tokenizer.load(folder)


async def test_a_shipped_model_is_read_by_its_name(tokenizers: Tokenizers) -> None:
    assert await read(tokenizers, shipped.DEFAULT) is Tokenizer.load(SHIPPED)


@pytest.mark.parametrize(
    "named", ["elsewhere", "models/../elsewhere", "models/link", "models/a/b", "models/\0"]
)
async def test_no_other_folder_is_read(tokenizers: Tokenizers, tmp_path: Path, named: str) -> None:
    """Its tokenizer.json is a pipe without a writer: to read it would never end."""
    for folder in (tmp_path / "elsewhere", tmp_path / "models" / "a" / "b"):
        folder.mkdir(parents=True)
        os.mkfifo(folder / "tokenizer.json")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "elsewhere")
    assert await read(tokenizers, tmp_path / named) is None
