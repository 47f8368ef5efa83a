"""Tests of profiles (iteration times by batch): what every form promises, and the files."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shared.errors import ConfigError
from shared.perf.forms import (
    Attention,
    PiecewiseTokens,
    SlosServeRoofline,
    SolaPolynomial,
    TokenTable,
)
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected
from shared.perf.profile_file import Form, load, names, read
from shared.perf.shape import BatchShape
from shared.perf.stratified import StratifiedLinear, Stratum

SHIPPED = {
    "a100-llama3-8b",
    "h100-llama3-8b",
    "a100-llama2-7b",
    "h100-llama2-7b",
    "a100-llama3-70b-tp4",
    "a100-opt-13b-tp2",
    "a100-opt-30b-tp4",
    "a100-qwen2.5-32b-tp2",
    "a100-qwen-14b",
    "h100-llama3-70b-tp4",
    "h200-llama3-8b",
    "h200-llama3-70b-tp4",
    "b200-llama3-8b",
    "b200-llama3-70b-tp4",
    "l40s-llama3-8b",
    "a100-llama3-8b-qoserve",
    "cpu-tiny",
}
# by hand, by their authors, and by analysis
NOT_FITTED = {
    "a100-qwen-14b",
    "cpu-tiny",
    "a100-llama3-8b-qoserve",
    "a100-opt-13b-tp2",
    "a100-opt-30b-tp4",
    "a100-qwen2.5-32b-tp2",
}
OVERHEAD_S = 0.001

ROOFLINE = SlosServeRoofline(k1a=8e-5, b_a=0.0065, k1b=6.8e-5, b_b=0.0123)
SOLA = SolaPolynomial(a0=3.8e-9, b0=3e-9, c0=6.4e-5, d0=0.0037, a1=4.6e-5, b1=8e-8, c1=0.0102)
# a decode's own cost came out negative
ATTENTION = Attention(e=0.0011, p1=3.8e-9, p2=2.2e-9, d0=3.4e-4, d1=-6.3e-6, d2=8.5e-8)
PIECEWISE = PiecewiseTokens(
    tile=64,
    knots=(0, 64, 256, 1024),
    slopes=(3e-5, -4e-5, 6e-5, -1e-5),
    c=0.009,
    attention=ATTENTION,
)
TABLE = TokenTable(
    table_tokens=(1, 64, 192, 512, 4096),
    table_seconds=(0.009, 0.0102, 0.0098, 0.034, 0.27),
    attention=ATTENTION,
)


def stratum(up_to_tokens: int | None, *coefficients: float) -> Stratum:
    """The coefficients in the order of its fields."""
    names = [name for name in Stratum.__struct_fields__ if name != "up_to_tokens"]
    return Stratum(up_to_tokens=up_to_tokens, **dict(zip(names, coefficients, strict=True)))


DECODE_DEAR = StratifiedLinear(
    strata=(
        stratum(512, 0.015, 5.9e-5, 2.2e-5, 3.6e-5, 1.1e-7, 7.6e-7),
        stratum(None, 0.005, 2.7e-5, 6.9e-5, -4.1e-5, 1.7e-7, 2.7e-6),
    )
)
PREFILL_DEAR = StratifiedLinear(
    strata=(
        stratum(256, 0.02, 1e-5, 6e-5, 2e-5, 1e-7, 1e-7),
        stratum(None, 0.001, 1e-5, 5e-5, 2e-5, 1e-7, 1e-7),
    )
)
FORMS: tuple[Form, ...] = (ROOFLINE, SOLA, PIECEWISE, TABLE, DECODE_DEAR, PREFILL_DEAR)


def drifted(base: Profile, late_s: float = 0.0) -> Corrected:
    """A corrected profile whose decode-only regime has drifted far above the mixed one, and
    prefill-only too.
    """
    corrected = Corrected(base)
    decodes = BatchShape(decodes=40, decode_context=40_000)
    mixed = decodes.with_chunk(400, 0)
    prefill = BatchShape().with_chunk(400, 0)
    for _ in range(120):
        for shape, times in ((decodes, 3.0), (mixed, 0.7), (prefill, 1.8)):
            corrected.observe(shape, times * base.batch_s(shape), late_s)
    return corrected


PROFILES: dict[str, Profile] = {name: load(name) for name in sorted(SHIPPED)}
PROFILES |= {
    f"{type(form).__name__}-{i}": form.profile("made", OVERHEAD_S) for i, form in enumerate(FORMS)
}
PROFILES |= {
    "Corrected": drifted(load("a100-llama3-8b")),
    "Corrected-stratified": drifted(load("a100-llama3-8b-qoserve")),
    "Corrected-late": drifted(load("a100-llama3-8b"), 0.002),
}
every_profile = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())


@st.composite
def shapes(draw: DrawFn) -> BatchShape:
    """Any batch: up to three chunks and 300 decodes, token counts near the strata's bounds and past
    the curves' ends among them.
    """
    decodes = draw(st.integers(0, 300))
    shape = BatchShape(
        decodes=decodes, decode_context=draw(st.integers(0, 500_000)) if decodes else 0
    )
    lengths = st.one_of(st.integers(1, 700), st.integers(1, 9_000))
    for tokens, cached in draw(st.lists(st.tuples(lengths, st.integers(0, 30_000)), max_size=3)):
        shape = shape.with_chunk(tokens, cached)
    return shape


@every_profile
def test_an_empty_batch_takes_no_time(profile: Profile) -> None:
    assert profile.batch_s(BatchShape()) == 0.0


@every_profile
@given(
    shape=shapes(),
    cached=st.integers(0, 30_000),
    budget_s=st.floats(0, 0.5),
    limit=st.integers(0, 9_000),
)
def test_a_budgeted_chunk_fits_and_one_token_more_would_not(
    profile: Profile, shape: BatchShape, cached: int, budget_s: float, limit: int
) -> None:
    chunk = profile.prefill_budget(shape, cached, budget_s, limit)
    assert 0 <= chunk <= limit
    if chunk:
        assert profile.batch_s(shape.with_chunk(chunk, cached)) <= budget_s
    if chunk < limit:
        assert profile.batch_s(shape.with_chunk(chunk + 1, cached)) > budget_s * (1 - 1e-9)


@every_profile
@given(shape=shapes(), tokens=st.integers(1, 3_000), cached=st.integers(0, 30_000))
def test_a_budget_a_hair_under_a_chunks_time_is_kept_to_the_last_bit(
    profile: Profile, shape: BatchShape, tokens: int, cached: int
) -> None:
    budget_s = math.nextafter(profile.batch_s(shape.with_chunk(tokens, cached)), 0.0)
    chunk = profile.prefill_budget(shape, cached, budget_s, 3_000)
    assert not chunk or profile.batch_s(shape.with_chunk(chunk, cached)) <= budget_s
    assert chunk < tokens
    assert profile.batch_s(shape.with_chunk(chunk + 1, cached)) > budget_s * (1 - 1e-9)


@every_profile
@given(shape=shapes(), grow=st.integers(0, 6), by=st.integers(1, 5_000))
def test_more_of_any_sum_never_takes_less_time(
    profile: Profile, shape: BatchShape, grow: int, by: int
) -> None:
    sums: list[float] = list(shape)
    sums[grow] += by
    more = BatchShape._make(sums)
    assert profile.batch_s(more) >= profile.batch_s(shape)


EXACT = [form.profile("made", OVERHEAD_S) for form in (ROOFLINE, SOLA)]


@given(shape=shapes())
def test_forms_give_what_their_formulas_say(shape: BatchShape) -> None:
    if not shape.tokens:
        return
    tokens = shape.tokens
    roofline_s = max(8e-5 * tokens + 0.0065, 6.8e-5 * tokens + 0.0123)
    prefill_s = (
        3.8e-9 * shape.prefill_cross
        + 3e-9 * shape.prefill_sq
        + 6.4e-5 * shape.prefill_tokens
        + 0.0037
    )
    decode_s = 4.6e-5 * shape.decodes + 8e-8 * shape.decode_context + 0.0102
    sola_s = prefill_s * (shape.prefills > 0) + decode_s * (shape.decodes > 0)
    for profile, expected_s in zip(EXACT, (roofline_s, sola_s), strict=True):
        assert profile.batch_s(shape) == pytest.approx(expected_s + OVERHEAD_S, rel=1e-9)


@given(shape=shapes())
def test_a_stratified_fit_is_never_below_its_own_formula_and_equals_it_in_its_first_stratum(
    shape: BatchShape,
) -> None:
    if not shape.tokens:
        return
    first, last = DECODE_DEAR.strata
    stratum = first if shape.tokens <= 512 else last
    formula_s = (
        stratum.intercept_s
        + stratum.token_s * shape.tokens
        + stratum.prefill_token_s * shape.prefill_tokens
    )
    formula_s += (
        stratum.decode_token_s * shape.decodes + stratum.decode_context_s * shape.decode_context
    )
    formula_s += stratum.prefill_context_s * shape.prefill_has
    predicted_s = DECODE_DEAR.profile("made", 0.0).batch_s(shape)
    assert predicted_s >= formula_s * (1 - 1e-9)
    if shape.tokens <= 512 or (shape.prefill_tokens > 700 and not shape.decodes):
        assert predicted_s == pytest.approx(formula_s, rel=1e-9)


def test_a_table_is_read_between_its_points_raised_over_its_dips_and_goes_on_past_its_end() -> None:
    profile = TABLE.profile("made", 0.0)

    def decodes_s(n: int) -> float:
        return profile.batch_s(BatchShape(decodes=n)) - ATTENTION.d0

    assert decodes_s(1) == pytest.approx(0.009)
    assert decodes_s(64) == pytest.approx(0.0102)
    assert decodes_s(192) == pytest.approx(0.0102)  # the dip at 192 is not believed
    assert decodes_s(352) == pytest.approx((0.0098 + 0.034) / 2)
    assert decodes_s(4096) == pytest.approx(0.27)
    assert decodes_s(8192) > 0.5


def test_piecewise_tokens_are_charged_by_the_whole_tile() -> None:
    profile = PIECEWISE.profile("made", 0.0)
    assert profile.batch_s(BatchShape(decodes=1)) == profile.batch_s(BatchShape(decodes=64))
    assert profile.batch_s(BatchShape(decodes=64)) == pytest.approx(
        0.009 + 64 * 3e-5 + ATTENTION.d0
    )


def test_exactly_the_promised_profiles_are_shipped() -> None:
    assert set(names()) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_file_loads_under_its_name_and_states_its_error(name: str) -> None:
    file = read(name)
    assert file.name == name == load(name).name
    assert file.error.against
    assert file.provenance
    memory = re.search(r"-(\d+)GB$", file.gpu)
    assert memory or name == "cpu-tiny"
    assert memory is None or (
        file.kv_capacity_tokens * file.kv_bytes_per_token < 1e9 * int(memory[1])
    )
    if isinstance(file.coefficients, TokenTable):
        assert file.overhead_s == 0.001
    if name not in NOT_FITTED:
        assert file.error.mape is not None
        assert 0 < file.error.mape < 0.05


def test_a_profile_is_read_from_any_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(stored("cpu-tiny") | {"name": "mine"}))
    assert load(str(path)).name == "mine"


def stored(name: str) -> dict[str, object]:
    text = (Path(__file__).parents[3] / "shared" / "perf" / "profiles" / f"{name}.json").read_text()
    document: dict[str, object] = json.loads(text)
    return document


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"a100-llama3-8b, .*cpu-tiny"):
        load("a100-lama")


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        load(str(tmp_path / "nowhere.json"))


NO_ATTENTION = {"e": 0, "p1": 0, "p2": 0, "d0": 0, "d1": 0, "d2": 0}
UNEQUAL = {
    "form": "token_table_plus_attention",
    "table_tokens": [1, 2, 3],
    "table_seconds": [0.1, 0.2],
    "attention": NO_ATTENTION,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"overhead_s": -1}, "overhead_s"),
        ({"colour": "red"}, "colour"),
        ({"coefficients": {"form": "cubic"}}, "coefficients"),
        ({"coefficients": {"form": "slos_serve_roofline", "k1a": 1, "b_a": 1, "k1b": 1}}, "b_b"),
        ({"coefficients": UNEQUAL}, "equally many"),
        ({"coefficients": {"form": "stratified_linear", "strata": []}}, "strata"),
        ({"error": {}}, "against"),
        ({"name": "Not A Name"}, "name"),
    ],
)
def test_a_file_that_is_not_a_profile_is_refused_with_the_reason(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(stored("cpu-tiny") | change))
    with pytest.raises(ConfigError, match=says):
        load(str(path))


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe", b"[]"])
def test_garbage_is_refused(garbage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.json"
    path.write_bytes(garbage)
    with pytest.raises(ConfigError, match=r"garbage\.json"):
        load(str(path))
