"""Tests of the explanation of a configuration file: what each line sets, and when it counts."""

from loadgen.fleet.explained import Explained, explain, fields_beside, line_of

SCHEMA = {
    "type": "object",
    "properties": {
        "policy": {"type": "string", "default": "slackline", "description": "Plans."},
        "tiers": {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/Tier"}},
            ]
        },
        "worker": {"type": "object", "properties": {"pace": {"description": "Speed."}}},
    },
    "$defs": {
        "Tier": {
            "type": "object",
            "properties": {"slo": {"$ref": "#/$defs/Slo", "description": "Bounds."}},
        },
        "Slo": {"type": "object", "properties": {"ttft_s": {"description": "First token."}}},
    },
}
TEXT = """\
# a comment = not a key
policy = "fcfs"  # why
tiers.nightly.slo = { ttft_s = 9 }

[tiers.chat]
slo.ttft_s = 1.0

[ worker ]   # a table
pace = 2.0
paec = [
  1,
]
"""


def lines() -> list[Explained]:
    return list(explain(TEXT, SCHEMA))


def test_each_line_that_sets_something_is_named_with_its_meaning() -> None:
    assert [(one.line, one.key, one.meaning) for one in lines()] == [
        (2, "policy", "Plans."),
        (3, "tiers.nightly.slo", "Bounds."),
        (6, "tiers.chat.slo.ttft_s", "First token."),
        (9, "worker.pace", "Speed."),
        (10, "worker.paec", ""),
    ]


def test_it_says_what_a_running_fleet_takes_over() -> None:
    at_once = {one.key: one.at_once for one in lines()}
    assert at_once["tiers.chat.slo.ttft_s"]
    assert not at_once["policy"]
    assert lines()[0].default == "slackline"


def test_the_fields_beside_a_key_are_those_of_its_table() -> None:
    assert fields_beside("worker.paec", SCHEMA) == ["pace"]
    assert fields_beside("tiers.chat.slo.ttft_ms", SCHEMA) == ["ttft_s"]
    assert fields_beside("tiers.chat", SCHEMA) == []  # any name will do
    assert fields_beside("nobody.knows", SCHEMA) == []


def test_a_fault_is_found_at_the_line_of_its_key_or_the_first_below_it() -> None:
    assert line_of("worker.paec", lines()) == 10
    assert line_of("tiers", lines()) == 3
    assert line_of("worker.pace.unit", lines()) == 9
    assert line_of("tier", lines()) is None
