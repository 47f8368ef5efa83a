"""Tests that a fleet may be upgraded one process at a time: what earlier releases wrote is read
today, and what is written today they can read. docs/operate.md says what a version may change.
"""

import base64
from pathlib import Path

import msgspec
import pytest

from shared.bus import codec
from tests.releases.sample import FOLDER, Release, all_kinds, shapes

RELEASES = [
    msgspec.json.decode(path.read_bytes(), type=Release) for path in sorted(FOLDER.glob("*.json"))
]
TODAY = shapes(all_kinds().values())
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)


@every_release
def test_every_message_that_an_earlier_release_wrote_is_read_and_kept(release: Release) -> None:
    kinds = all_kinds()
    for name, samples in release.samples.items():
        assert samples and name in kinds, f"{name}: who sent or stored it may still run"
        for sample in samples:
            message = codec.decode(kinds[name], base64.b64decode(sample), json=False)
            again = codec.decode(kinds[name], codec.encode(message, json=False), json=False)
            assert again == message, name


@every_release
def test_a_new_field_may_be_missing_and_a_field_is_dropped_only_if_it_could_be_missing(
    release: Release,
) -> None:
    for name, before in release.shapes.items():
        now = TODAY.get(name)
        if now is None:
            continue  # no kind of message holds it any more
        known = {*before.required, *before.optional}
        assert set(now.required) <= known, f"{name}: an earlier release does not write it"
        fields = {*now.required, *now.optional}
        assert set(before.required) <= fields, f"{name}: an earlier release cannot do without it"
        assert set(now.required) <= set(before.required), f"{name}: it was not always written"
        if before.array:
            old, new = [*before.required, *before.optional], [*now.required, *now.optional]
            assert now.array and new[: len(old)] == old, f"{name}: fields are told by their place"


@every_release
def test_a_struct_that_refuses_unknown_fields_gets_new_ones_only_where_they_are_left_out(
    release: Release,
) -> None:
    """A request that uses a new field is refused by a process of the earlier release."""
    for name, before in release.shapes.items():
        now = TODAY.get(name)
        if now is not None and before.strict:
            new = {*now.required, *now.optional} - {*before.required, *before.optional}
            assert not new or now.terse, f"{name}: {new} are always written"


def test_the_shapes_say_what_is_required(tmp_path: Path) -> None:
    class Inner(msgspec.Struct, array_like=True):
        a: int
        b: int = 0

    class Outer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
        inner: dict[str, list[Inner | None]]
        named: int = msgspec.field(default=1, name="Named")

    found = {name.rpartition(".")[2]: shape for name, shape in shapes([Outer]).items()}
    assert (found["Outer"].required, found["Outer"].optional) == (["inner"], ["Named"])
    assert found["Outer"].strict and found["Outer"].terse and not found["Outer"].array
    assert found["Inner"].array and found["Inner"].required == ["a"]
