"""The prefixes that a replica keeps, at its planner and at a router: the same by digests, by all of
them at once after a gap, and by what a router has just placed itself.
"""

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.prefixes.kept import KeptPrefixes
from shared.core.prefixes.known import KnownPrefixes
from shared.prefix import CHAIN_TOKENS, PLACES, chain_of, pack_hashes, prefix_of
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId
from tests import made

R1, R2 = ReplicaId("r1"), ReplicaId("r2")
DIGEST = made.digest("r1")
TEXT = list(range(40 * CHAIN_TOKENS))


def offer(tokens: list[int], due_unix_s: float = 2.0) -> Offer:
    return made.offer(
        prompt_tokens=len(tokens), next_due_unix_s=due_unix_s, prefix=prefix_of(chain_of(tokens))
    )


def told(kept: KeptPrefixes, replica: ReplicaId = R1) -> Digest:
    seq, more, fewer = kept.tell()
    return replace(
        DIGEST, replica=replica, prefix_seq=seq, prefixes_kept=more, prefixes_dropped=fewer
    )


def found(router: KnownPrefixes, asked: Offer, now_unix_s: float = 0.0) -> dict[ReplicaId, int]:
    digests = {R1: DIGEST, R2: replace(DIGEST, replica=R2)}
    return {r: d.cached_tokens for r, d in router.seen(asked, digests, now_unix_s).items()}


def test_a_long_prompt_has_a_short_prefix_that_falls_short_by_a_thirty_second_at_most() -> None:
    assert len(PLACES[: PLACES.index(2048) + 1]) == 64 + 5 * 32  # 131,072 tokens: 1.8 kB
    for shorter, longer in pairwise(PLACES):
        assert longer - shorter <= max(1, longer / 32)


def test_a_prompt_is_found_as_far_as_all_of_its_beginnings_are_kept() -> None:
    kept, asked = KeptPrefixes(block_tokens=16), offer([*TEXT[: 20 * CHAIN_TOKENS], *[7] * 100])
    prefix = prefix_of(chain_of(TEXT))
    kept.change(prefix, b"")
    assert kept.offered([asked])[0].cached_tokens == 20 * CHAIN_TOKENS
    assert kept.found([(3, asked.prefix)]) == [(20 * CHAIN_TOKENS, 0.0)]
    kept.change(b"", prefix[8 * 19 :])  # an engine drops the end first
    assert kept.found([(3, asked.prefix)]) == [(19 * CHAIN_TOKENS, 0.0)]
    assert KeptPrefixes(16, prefix).offered([asked])[0].cached_tokens == 20 * CHAIN_TOKENS


def test_what_lies_in_the_hosts_memory_is_found_and_takes_time_to_come_back() -> None:
    asked = offer(TEXT[: 20 * CHAIN_TOKENS + 1])
    kept = KeptPrefixes(16, asked.prefix[: 8 * 8], asked.prefix[8 * 8 :], kv_load_s=1 / 1024)
    wanted = 20 * CHAIN_TOKENS, 12 * CHAIN_TOKENS / 1024
    assert kept.found([(3, asked.prefix)]) == [wanted]
    seen = kept.offered([asked])[0]
    assert (seen.cached_tokens, seen.load_s) == wanted
    kept.change(asked.prefix[8 * 8 : 8 * 10], b"", asked.prefix[:8])
    assert kept.found([(3, asked.prefix)]) == [(20 * CHAIN_TOKENS, 11 * CHAIN_TOKENS / 1024)]
    kept.change(b"", asked.prefix[8 * 10 :])
    assert kept.found([(3, asked.prefix)]) == [(10 * CHAIN_TOKENS, CHAIN_TOKENS / 1024)]


def test_of_a_long_prompt_a_hash_stands_for_all_blocks_since_the_one_before() -> None:
    tokens = CHAIN_TOKENS * PLACES[70]
    asked = offer(list(range(tokens + 1)))
    kept = KeptPrefixes(16, asked.prefix[:-8], asked.prefix[-8:], kv_load_s=1 / 1024)
    apart = CHAIN_TOKENS * (PLACES[70] - PLACES[69])
    assert apart == 2 * CHAIN_TOKENS
    assert kept.found([(3, asked.prefix)]) == [(tokens, apart / 1024)]


def test_the_last_token_is_always_computed() -> None:
    kept, asked = KeptPrefixes(block_tokens=16), offer(TEXT[: 4 * CHAIN_TOKENS])
    kept.change(asked.prefix, b"")
    assert kept.offered([asked])[0].cached_tokens == 4 * CHAIN_TOKENS - 16


def test_tenants_that_do_not_share_have_no_beginning_in_common() -> None:
    mine, yours = (set(chain_of(TEXT, salt)) for salt in (b"mine", b"yours"))
    assert not mine & yours


def test_a_router_asks_for_all_after_a_gap_and_finds_nothing_meanwhile_that_it_was_not_told() -> (
    None
):
    kept, router, asked = KeptPrefixes(16), KnownPrefixes(), offer(TEXT)
    router.heard(told(kept))
    kept.change(prefix_of(chain_of(TEXT))[:80], b"")
    told(kept)  # this digest is lost
    kept.change(prefix_of(chain_of(TEXT))[80:160], b"")
    router.heard(told(kept))
    assert router.lacking == [R1]
    assert found(router, asked)[R1] == 0
    router.told(R1, kept.all())
    assert not router.lacking
    assert found(router, asked)[R1] == 20 * CHAIN_TOKENS


def test_a_new_incarnation_and_a_new_planner_begin_anew() -> None:
    kept, router, asked = KeptPrefixes(16), KnownPrefixes(), offer(TEXT)
    router.heard(told(kept))
    kept.change(prefix_of(chain_of(TEXT)), b"")
    router.heard(told(kept))
    assert found(router, asked)[R1] == 40 * CHAIN_TOKENS - 1
    router.heard(replace(told(KeptPrefixes(16)), incarnation="b"))
    assert found(router, asked)[R1] == 0 and not router.lacking
    heir = KeptPrefixes(16, pack_hashes(chain_of(TEXT)[:5]), first_seq=1 << 20)
    router.heard(replace(told(heir), incarnation="b", planner="q"))
    assert router.lacking == [R1]


def test_a_router_counts_on_what_it_has_placed_until_its_first_token_is_due() -> None:
    router, asked = KnownPrefixes(), offer(TEXT, due_unix_s=2.0)
    for replica in (R1, R2):
        router.heard(replace(DIGEST, replica=replica))
    router.placed(R1, asked, 0.0)
    assert found(router, asked, 1.9) == {R1: 40 * CHAIN_TOKENS - 1, R2: 0}
    assert found(router, asked, 2.1) == {R1: 0, R2: 0}


@given(st.integers(0, 1 << 32))
def test_a_router_that_heard_every_digest_knows_what_the_planner_knows(seed: int) -> None:
    rng, kept, router = Random(seed), KeptPrefixes(16), KnownPrefixes()
    hashes, now = [rng.getrandbits(64) for _ in range(30)], set[int]()
    router.heard(told(kept))
    for _ in range(40):
        more = set(rng.sample(hashes, rng.randrange(4))) - now
        fewer = set(rng.sample(sorted(now), rng.randrange(min(3, len(now) + 1))))
        kept.change(pack_hashes(sorted(more)), pack_hashes(sorted(fewer)))
        now = (now | more) - fewer
        if rng.random() < 0.5:
            router.heard(told(kept))
    router.heard(told(kept))
    assert not router.lacking
    for each in hashes:
        asked = replace(offer(TEXT), prefix=pack_hashes([each]))
        assert bool(found(router, asked)[R1]) == (each in now)
