"""Tests of `slackline key`: it prints a new HTTP key of a tenant once, and stores its hash."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from loadgen.cli.main import main
from shared.rules import http_keys
from shared.rules.rules import read_rules
from shared.rules.tenants import Tenant


def test_it_prints_each_key_once_and_adds_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    made = []
    for tenant in ("acme", "acme", "b"):
        assert main(["key", tenant, str(file)]) == 0
        out, err = capsys.readouterr()
        made.append(out.strip())
        assert made[-1] not in err
        file.write_text(file.read_text().rstrip("\n"))  # as some editors leave it
    keys = http_keys.read(file)
    assert [keys.tenant_of(key) for key in made] == ["acme", "acme", "b"]
    assert not any(key in file.read_text() for key in made)


def test_a_bad_tenant_or_file_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "a b", str(tmp_path / "keys")]) == 2
    assert main(["key", "acme", str(tmp_path / "no" / "keys")]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 2)
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_prints_the_lines_of_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["key", "acme"]) == 0
    key, lines = capsys.readouterr()
    tenants = tomllib.loads(lines)["tenants"]
    keys = read_rules("", "", msgspec.convert(tenants, dict[str, Tenant])).keys
    assert keys is not None
    assert keys.tenant_of(key.strip()) == "acme"
