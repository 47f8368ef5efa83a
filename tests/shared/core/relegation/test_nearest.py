"""Tests of which request of the pool a replica is handed: one whose beginning it has counts as
older, by the part of its prompt that is new there.
"""

from shared.core.prefixes.kept import KeptPrefixes
from shared.core.relegation.relegation import (
    Heard,
    Listed,
    RelegationCore,
    RelegationSettings,
    Told,
)
from shared.prefix import CHAIN_TOKENS, chain_of, prefix_of
from shared.schemas import Digest, Record
from shared.vocabulary import RecordState, ReplicaId, ServiceClass, Slo
from tests import made

NOW, R = 1000.0, ReplicaId("r")
TEXT = list(range(40 * CHAIN_TOKENS))
QUARTER = prefix_of(chain_of(TEXT[: 10 * CHAIN_TOKENS]))


def record(key: str, waited_s: float, *, kin: bool = False, importance: float = 1.0) -> Record:
    """A request that has waited so long. `kin`: its prompt begins with TEXT."""
    return made.record(
        key,
        state=RecordState.RELEGATED,
        service_class=ServiceClass.BEST_EFFORT,
        slo=Slo(),
        importance=importance,
        arrived_unix_s=NOW - waited_s,
        expires_unix_s=NOW + 1e6,
        prompt_tokens=len(TEXT),
        prefix=prefix_of(chain_of(TEXT)) if kin else b"",
    )


def handed(*records: Record, kept: bytes = QUARTER) -> list[str]:
    """The requests that a replica is handed at its next two digests. It has `kept`."""
    core, planner = RelegationCore(RelegationSettings(per_digest=1)), KeptPrefixes(16)
    core.handle(Heard(_digest(planner, 0.0)), now_unix_s=NOW)
    planner.change(kept, b"")
    core.handle(Listed(records), now_unix_s=NOW)
    actions = [
        action
        for n in (1, 2)
        for action in core.handle(Heard(_digest(planner, n * 0.1)), now_unix_s=NOW + n * 0.1)
    ]
    core.check()
    return [action.key for action in actions]


def _digest(planner: KeptPrefixes, after_s: float) -> Digest:
    seq, more, fewer = planner.tell()
    return made.digest(
        R,
        at_unix_s=NOW + after_s,
        running=1,
        surplus=True,
        prefix_seq=seq,
        prefixes_kept=more,
        prefixes_dropped=fewer,
    )


def test_a_request_goes_where_its_beginning_is_before_one_that_is_little_older() -> None:
    older, kin = record("a.older", 60.0), record("a.kin", 50.0, kin=True)
    assert handed(older, kin) == ["a.kin", "a.older"]
    assert handed(older, kin, kept=b"") == ["a.older", "a.kin"]


def test_none_waits_for_ever_for_others_whose_beginning_is_kept() -> None:
    # 50 s / 0.75 of the prompt that are new there count as 67 s
    older, kin = record("a.older", 70.0), record("a.kin", 50.0, kin=True)
    assert handed(older, kin) == ["a.older", "a.kin"]


def test_what_is_kept_does_not_pass_a_more_important_request_or_another_tenants_turn() -> None:
    kin = record("a.kin", 50.0, kin=True)
    assert handed(kin, record("a.first", 1.0, importance=2.0)) == ["a.first", "a.kin"]
    younger = [record("a.kin2", 49.0, kin=True), record("b.other", 1.0)]
    assert handed(kin, *younger) == ["a.kin", "b.other"]


def test_what_digests_did_not_tell_is_asked_for() -> None:
    planner, core = KeptPrefixes(16), RelegationCore(RelegationSettings(per_digest=1))
    planner.change(QUARTER, b"")
    planner.tell()
    core.handle(Heard(_digest(planner, 0.0)), now_unix_s=NOW)
    assert core.lacking == [R]
    core.handle(Told(R, planner.all()), now_unix_s=NOW)
    assert not core.lacking
    both = record("a.older", 60.0), record("a.kin", 50.0, kin=True)
    core.handle(Listed(both), now_unix_s=NOW)
    [place] = core.handle(Heard(_digest(planner, 0.1)), now_unix_s=NOW + 0.1)
    assert place.key == "a.kin"


def test_replicas_that_fell_silent_are_forgotten() -> None:
    planner, core = KeptPrefixes(16), RelegationCore()
    planner.change(QUARTER, b"")
    planner.tell()
    core.handle(Heard(_digest(planner, 0.0)), now_unix_s=NOW)
    assert core.lacking == [R]
    core.handle(Listed(()), now_unix_s=NOW + 60)
    assert not core.lacking
