"""Tests that a simulated request's measure, computed at its end from the instants of all tokens, is
the one that a worker folds token by token, and so is judged alike.
"""

from array import array
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from loadgen.simulator.token_times import measured
from shared.core.record.judgement import missed
from shared.measure import Measure
from shared.vocabulary import Definition, Slo

# tokens that come after no time come together
gaps = st.lists(st.sampled_from([0.1, 0.3, 0.0, 0.02]), min_size=2, max_size=40)


@pytest.mark.parametrize("definition", Definition)
@given(gaps_s=gaps, thinking=st.none() | st.integers(0, 45), ttft_s=st.sampled_from([None, 0.05]))
def test_both_measures_are_the_same_by_every_definition(
    gaps_s: list[float], thinking: int | None, ttft_s: float | None, definition: Definition
) -> None:
    slo = Slo(
        ttft_s=ttft_s,
        tbt_s=0.15,
        thinking_tbt_s=None if thinking is None else 0.05,
        definition=definition,
    )
    at_s = [sum(gaps_s[: n + 1]) for n in range(len(gaps_s))]
    ended = None if thinking is None or thinking > len(at_s) else thinking
    folded = Measure.begin(slo, 0.0)
    for instant, tokens in groupby(at_s):
        n = len(list(tokens))
        known = ended if ended is not None and folded.tokens + n >= ended else None
        folded = folded.emit(n, instant, slo, known)
    whole = measured(array("d", at_s), slo, 0.0, ended)
    assert missed(whole, slo, 0.0) is missed(folded, slo, 0.0)
    same = ("tokens", "first_unix_s", "last_unix_s", "worst_tbt_s", "late_tokens", "long_gaps")
    one, other = asdict(whole), asdict(folded)
    assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert one["next_due_unix_s"] == pytest.approx(other["next_due_unix_s"])
