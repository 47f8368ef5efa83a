"""Tests of `slackline config`: it explains a configuration line by line, and names each mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli.main import main
from shared.process.configuration import SECTIONS
from tests.rings import slow_but

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
FIELDS = ROOT / "docs" / "configuration-fields.md"
SCHEMA = ROOT / "docs" / "slackline.schema.json"
EXAMPLE = re.search(r"<!-- a whole file -->\n\n```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    assert EXAMPLE is not None
    file = tmp_path / "slackline.toml"
    file.write_text(EXAMPLE[1])
    return file


def run(*words: str) -> int:
    return main(["config", *words])


def test_the_example_of_the_page_is_explained_line_by_line(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", str(example)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith("every service would start with it\n")
    assert max(len(line) for line in out.splitlines()[1:]) <= 80  # the first is the path
    assert run("check", str(example), "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["faults"] == []
    assert all(line["meaning"] for line in told["lines"])
    set_here = [
        number
        for number, line in enumerate(example.read_text().splitlines(), start=1)
        if re.match(r"^[\w.]+ = ", line)
    ]
    assert [line["line"] for line in told["lines"]] == set_here
    at_once = {line["key"]: line["at_once"] for line in told["lines"]}
    assert at_once["tenants.acme.weight"]
    assert not at_once["worker.profile_s"]


def test_it_says_what_a_first_key_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slackline.toml"
    for console, opens in (
        ("", "is off without"),
        ("[gateway]\nconsole_keys = 'k'\n", "opens with"),
    ):
        file.write_text(f"[tenants.acme]\nkeys = ['{64 * 'a'}']\n{console}")
        assert run("check", str(file), "--json") == 0
        [warning] = json.loads(capsys.readouterr().out)["warnings"]
        assert f"a caller without one gets 401, and the console {opens} console_keys" in warning
        assert run("check", str(file)) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"note {warning} every service would start with it" in said
    file.write_text("[tenants.acme]\nweight = 2\n")
    assert run("check", str(file)) == 0
    assert "note" not in capsys.readouterr().out


WRONG = [
    (
        "policy = 'no-such'\n[gateway]\nhost = '0.0.0.0'\n[worker]\npace = 'fast'\npaec = 1\n",
        [
            "no-such",
            "without keys only loopback is served",
            r"line 5: worker.pace: Expected `float`",
            r"line 6: unknown key 'paec' in \[worker\]; the nearest is pace; there are: ",
        ],
    ),
    (
        "[tiers.chat]\nslo = { ttft_s = 1 }\n\n[tiers.nightly]\nslo = { ttlt = 9 }\n",
        [r"^wrong      line 5: tiers\.nightly\.slo\.ttlt: unknown field; the nearest is ttlt_"],
    ),
    (
        "[tenants.acme]\nweight = 1.0\n[tenants.b]\nkeys = ['x']\nwieght = 2\n",
        [
            r"^wrong      line 4: tenants\.b\.keys\.0: Expected the SHA-256 that ",
            r"^wrong      line 5: tenants\.b\.wieght: unknown field; the nearest is weight; ",
        ],
    ),
    (
        "[tenants.acme]\nweight = 1.0\n[tenants.b]\nweight = 2\nwieght = 2\n",
        [r"^wrong      line 5: .*wieght: unknown field; the nearest is weight; there are: b"],
    ),
    ("[gateway]\nport = 99999\n", [r"^wrong      line 2: gateway\.port: .* <= 65535$"]),
    (
        (
            "colour = 'red'\ndefault_tier = 'nobody'\npolicy = 'no-such'\n"
            "[tiers.chat]\nslo = { ttft_s = -1, tbt = 0.1 }\nshare = 'many'\n"
            "[tenants.acme]\nweight = 0\nslo = 5\n[wroker]\na = 1\n"
        ),
        [
            r"^wrong      line 1: unknown key 'colour'; there are: ",
            r"^wrong      line 5: tiers\.chat\.slo\.ttft_s: Expected `float` >= 0\.0001$",
            r"^wrong      line 5: tiers\.chat\.slo\.tbt: unknown field; the nearest is tbt_s",
            r"^wrong      line 6: tiers\.chat\.share: Expected `float`, got `str`$",
            r"^wrong      line 8: tenants\.acme\.weight: Expected `float` > 0\.0$",
            r"^wrong      line 9: tenants\.acme\.slo: Expected `object`, got `int`$",
            r"^wrong      line 11: unknown key 'wroker'; the nearest is worker; ",
            r"^wrong      no policy is called 'no-such'; ",
        ],
    ),
    (
        "[tiers.chat]\nslo = 5\n[tiers.nightly]\nshare = 2\n",
        [
            r"^wrong      line 2: tiers\.chat\.slo: Expected `object`, got `int`$",
            r"^wrong      line 4: tiers\.nightly: missing required field `slo`$",
        ],
    ),
    (
        (
            "default_tier = 'x'\n[tiers.auto]\nslo = {}\n[tenants.'a b']\nweight = 1\n"
            "[tenants.'*'.slo]\nttft_x = 2\n"
        ),
        [
            "^wrong      tiers: default is `x`, .*; tier name `auto` is taken: .*; tier .* bound$",
            r"^wrong      tenants: tenant `a b` must be .*; tenant `\*`: its slo must be in ",
        ],
    ),
    ("[gateway\n", ["^wrong      the configuration .*/slackline.toml cannot be read: "]),
    ("[nobody]\n", ["^wrong      unknown key 'nobody'"]),
    ("worker = 5\n", ["^wrong      worker: worker in .* must be a section, "]),
]


@pytest.mark.parametrize(("wrong", "faults"), slow_but([WRONG[0], WRONG[5]], WRONG))
def test_what_is_wrong_is_told_once_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, faults: list[str]
) -> None:
    file = tmp_path / "slackline.toml"
    file.write_text(wrong)
    assert run("check", str(file)) == 1
    out, err = capsys.readouterr()
    for fault in faults:
        assert re.search(fault, err, re.MULTILINE), err
    assert len(err.splitlines()) == len(faults)
    assert "would start" not in out


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "no-such.toml") == 2
    assert "no-such.toml cannot be read" in capsys.readouterr().err


def test_a_password_in_a_url_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACKLINE_URL", "nats://me:secret@127.0.0.1:4222")
    file = tmp_path / "slackline.toml"
    file.write_text("[gateway]\nport = 1\n")
    assert run("check", str(file)) == 0
    out = "".join(capsys.readouterr())
    assert "SLACKLINE_URL" in out
    assert "secret" not in out


def test_the_pages_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    """`slackline config fields` and `slackline config schema` make them."""
    assert run("fields") == 0
    fields = capsys.readouterr().out
    assert fields.strip() in FIELDS.read_text()
    assert not re.search(r"^- `\w+`( \(.*\))?:$", fields, re.MULTILINE), "one without its meaning"
    assert run("schema") == 0
    schema = capsys.readouterr().out
    assert schema == SCHEMA.read_text()
    made = json.loads(schema)
    assert {*SECTIONS} <= made["properties"].keys()
    for name, kind in (("tiers", "Tier"), ("tenants", "Tenant")):
        assert f"#/$defs/{kind}" in json.dumps(made["properties"][name])
