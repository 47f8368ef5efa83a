"""Tests of reading traces and tiers from files: errors name the place, and plans repeat by seed."""

import gzip
from contextlib import suppress
from pathlib import Path

import pytest

from loadgen.cli.options.plan import read_fitting
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import read_trace
from loadgen.load.workload import Rows, named_workload
from loadgen.simulator.traffic import stored_as
from shared.errors import ConfigError, PeerError
from shared.perf import profile_file
from shared.rules.tiers import BUILT_IN, DEFAULT, DEMO_3, Tier, TierSet, load_tiers
from shared.vocabulary import Definition, Slo

NORMALISED = "arrival_s,prompt_tokens,output_tokens,app,client_id\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_normalised_trace_is_read_zipped_or_not_and_begins_at_zero(tmp_path: Path) -> None:
    text = NORMALISED + "10.5,100,20,chat,7\n12.0,300,1,code,8\n"
    plain = read_trace(written(tmp_path / "a.csv", text))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert (
        plain.rows
        == read_trace(tmp_path / "b.csv.gz").rows
        == [TraceRow(0.0, 100, 20, "chat"), TraceRow(1.5, 300, 1, "code")]
    )
    assert plain.recorded
    assert plain.span_s == 1.5


def test_azures_own_format_is_read_with_and_without_a_zone(tmp_path: Path) -> None:
    old = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    new = "2024-05-11 23:59:59.500000+00:00,10,20\n2024-05-12 00:00:01.500000+00:00,30,40\n"
    first, second = (
        read_trace(written(tmp_path / "old.csv", AZURE + old)),
        read_trace(written(tmp_path / "new.csv", AZURE + new)),
    )
    assert [row.arrival_s for row in first.rows] == pytest.approx([0, 0.052], abs=1e-5)
    assert [(row.prompt_tokens, row.output_tokens) for row in first.rows] == [(4808, 10), (3180, 8)]
    assert second.span_s == pytest.approx(2.0, abs=1e-5)


def test_instants_with_offsets_are_compared_as_instants_also_where_the_offset_changes(
    tmp_path: Path,
) -> None:
    """The clocks went back within these three seconds."""
    rows = ("02:59:58+02:00,100,9", "02:59:59+02:00,110,9", "02:00:00+01:00,120,9")
    text = AZURE + "".join(f"2024-10-27 {row}\n" for row in (*rows, "02:00:01+01:00,130,9"))
    trace = read_trace(written(tmp_path / "a.csv", text))
    assert [row.prompt_tokens for row in trace.rows] == [100, 110, 120, 130]
    assert trace.span_s == 3.0


def test_rows_of_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    text = NORMALISED + "5,472,18,a,1\n45,0,230,a,1\n120,300,0,a,1\n130,300,7,a,1\n"
    trace, notes = read_fitting(written(tmp_path / "a.csv", text), 8192)
    assert [row.arrival_s for row in trace.rows] == [0.0, 125.0]
    assert notes[0].endswith("left out: 2")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.csv", "größe 大.csv"])
def test_a_mark_of_byte_order_any_line_end_and_any_name_are_read(
    tmp_path: Path, zipped: bool, end: str, name: str
) -> None:
    raw = b"\xef\xbb\xbf" + (NORMALISED + "1,2,3,äé,1\n").replace("\n", end).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if zipped else raw)
    assert read_trace(tmp_path / name).rows == [TraceRow(0.0, 2, 3, "äé")]


def test_each_damaged_byte_of_an_archive_is_told_in_a_line(tmp_path: Path) -> None:
    """Or it does not matter: it is in the archive's header."""
    text = NORMALISED + "".join(f"{n},{n % 97 + 1},{n % 13 + 1},a,1\n" for n in range(200))
    whole, path = gzip.compress(text.encode()), tmp_path / "a.csv.gz"
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with suppress(ConfigError):
            read_trace(path)


@pytest.mark.parametrize(
    "text", [NORMALISED + ",5,6,x,1\n,7,8,x,1\n", "prompt_tokens,output_tokens\n5,6\n7,8\n"]
)
def test_lengths_without_times_are_a_trace_too(text: str, tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "a.csv", text))
    assert not trace.recorded
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(5, 6), (7, 8)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (NORMALISED + "1,2,3,a,1\n1,many,3,a,1\n", r"line 3, column prompt_tokens: `many`"),
        (NORMALISED + "1,2,-1,a,1\n", r"line 2, column output_tokens: `-1`"),
        (NORMALISED + "1,2,0,a,1\n", r"holds no requests"),
        (AZURE + "2024-10-27 03:00:00Z,1,1\n2024-10-27 03:00:01,1,1\n", r"line 3.* offset"),
        (NORMALISED + "-1,2,3,a,1\n", r"line 2, column arrival_s: `-1`"),
        (NORMALISED + "nan,2,3,a,1\n", r"line 2, column arrival_s: `nan`"),
        (NORMALISED + "1,2\n", r"line 2: 2 columns where the header has 5"),
        (NORMALISED + "1,2,3,a,1\n,2,3,a,1\n", r"line 3: a request without a time"),
        (AZURE + "yesterday,1,1\n", r"line 2, column TIMESTAMP: `yesterday`"),
        ("arrival_s,prompt,output\n1,2,3\n", r"line 1: no column prompt_tokens, output_tokens"),
        (NORMALISED, r"holds no requests"),
        ("", r"line 1: no column"),
    ],
)
def test_an_error_in_a_trace_names_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        read_trace(written(tmp_path / "bad.csv", text))


def test_a_trace_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"arrival_s,prompt" * 999)[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "cut.csv.gz")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "bytes.csv")


def test_the_mix_gives_each_tier_lengths_of_its_own_and_the_same_seed_gives_the_same_plan() -> None:
    def plan(seed: int) -> list[PlannedRequest]:
        arrivals_s, lengths = [i / 10 for i in range(3000)], named_workload("mix", 8192)
        return plan_requests(arrivals_s, lengths, DEMO_3, seed, tenants=5, important=0.25)

    planned = plan(3)
    assert planned == plan(3) != plan(4)
    assert {(p.tier, p.application) for p in planned} == {
        ("interactive", "azure-code"),
        ("summary", "azure-conv"),
        ("batch", "sharegpt"),
    }
    for tier in DEMO_3.tiers:
        assert sum(p.tier == tier for p in planned) == pytest.approx(1000, abs=100)
    assert sum(p.importance > 1 for p in planned) == pytest.approx(750, abs=75)
    assert {p.tenant for p in planned} == {f"tenant-{i}" for i in range(5)}


def test_a_request_of_the_plan_does_not_depend_on_how_many_come_before_it() -> None:
    source = named_workload("sharegpt", 8192)
    few, many = (plan_requests([0.0] * n, source, DEFAULT, 9) for n in (10, 100))
    assert few == many[:10]


def test_rows_in_order_are_those_of_the_trace(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "a.csv", NORMALISED + "0,5,6,x,1\n1,7,8,y,1\n"))
    planned = plan_requests([0.0, 1.0], Rows(trace, in_order=True), DEFAULT, 0)
    assert [(p.prompt_tokens, p.output_tokens, p.application) for p in planned] == [
        (5, 6, "x"),
        (7, 8, "y"),
    ]


def test_a_tier_that_the_trace_records_is_taken_and_any_other_drawn(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,tier\n"
    rows = [f"{i},5,6,{'batch' if i % 2 else ''}\n" for i in range(60)]
    source = Rows(read_trace(written(tmp_path / "a.csv", header + "".join(rows))), in_order=True)
    planned = [request.tier for request in plan_requests([0.0] * 60, source, DEMO_3, 0)]
    assert set(planned[1::2]) == {"batch"}
    assert set(planned[::2]) == {"interactive", "summary", "batch"}
    toy = TierSet(name="toy", default="chat", tiers={"chat": DEMO_3.tiers["interactive"]})
    with pytest.raises(ConfigError, match=r"tier `batch`, which the tiers toy do not have.*chat"):
        plan_requests([0.0] * 60, source, toy, 0)


# ---------------------------------------------------------------- tiers


def test_tiers_are_read_from_toml_and_from_json(tmp_path: Path) -> None:
    toml = (
        'name="mine"\ndefault="a"\n[tiers.a]\nshare=2\nservice_tier="default"\n'
        "[tiers.a.slo]\nttft_s=1\n[tiers.b.slo]\nttlt_s=60\n"
    )
    json = (
        '{"name":"mine","default":"a","tiers":{"a":{"share":2,"service_tier":"default",'
        '"slo":{"ttft_s":1}},"b":{"slo":{"ttlt_s":60}}}}'
    )
    first, second = (
        load_tiers(str(written(tmp_path / "t.toml", toml))),
        load_tiers(str(written(tmp_path / "t.json", json))),
    )
    assert first == second
    assert list(first.tiers) == ["a", "b"]
    assert (
        first.for_service_tier(None)
        == first.for_service_tier("auto")
        == first.for_service_tier("default")
        == "a"
    )
    assert first.for_service_tier("b") == "b"
    with pytest.raises(PeerError, match="unknown service_tier `flex`"):
        first.for_service_tier("flex")


def test_tiers_are_read_from_a_configuration_file(tmp_path: Path) -> None:
    text = """
        policy = "fcfs"
        default_tier = "b"
        [tiers.a]
        slo = {ttft_s = 1}
        share = 2
        [tiers.b]
        slo = {ttlt_s = 60}
        [tenants.acme]
        weight = 4.0
        """
    tiers = load_tiers(str(written(tmp_path / "slackline.toml", text)))
    assert (tiers.default, list(tiers.tiers), tiers.tiers["a"].share) == ("b", ["a", "b"], 2)
    named = 'tiers = "demo-3"\ndefault_tier = "batch"\n[gateway]\nport = 1\n'
    tiers = load_tiers(str(written(tmp_path / "named.toml", named)))
    assert (tiers.default, tiers.tiers) == ("batch", DEMO_3.tiers)
    ours = 'name = "x"\ndefault = "a"\n[tiers.a]\nslo = {ttft_s = 1}\n'
    naming = f'tiers = "{written(tmp_path / "ours.toml", ours)}"\n'
    tiers = load_tiers(str(written(tmp_path / "naming.toml", naming)))
    assert (tiers.default, list(tiers.tiers)) == ("a", ["a"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tiers.a]\nslo = {ttlt = 60}\n", r"toml: tiers\.a\.slo\.ttlt: unknown field"),
        ("default_tier = 'b'\n[tiers.a]\nslo = {ttlt_s = 60}\n", "default is `b`"),
        ("tiers = 'slackline.toml'\n", r"toml: tiers: Expected `object`, got `str`"),  # itself
        ("[tenants.acme]\nweight = 4.0\n", "has no tiers"),
        ('{"name":"x","default":"a","tiers":{}}', "at least one tier"),
        ('{"name":"x","default":"b","tiers":{"a":{"slo":{"ttft_s":1}}}}', "default is `b`"),
        (
            '{"name":"x","default":"a","tiers":{"a":{"slo":{"definition":"ttlt"}}}}',
            "without any bound",
        ),
        (
            '{"name":"x","default":"a","tiers":{"a":{"slo":{"ttft_s":1,"definition":"p99"}}}}',
            "Invalid enum value 'p99'",
        ),
        ('{"name":"x","default":"a","tiers":{"a":{"slo":{"ttft_s":-1}}}}', "`float` >= 0.0001"),
        ('{"name":"x","default":"a.b","tiers":{"a.b":{"slo":{"ttft_s":1}}}}', "tier name `a.b`"),
        ("{", "not proper JSON"),
    ],
)
def test_a_file_without_proper_tiers_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "t.json" if text.startswith("{") else "slackline.toml"
    with pytest.raises(ConfigError, match=why):
        load_tiers(str(written(tmp_path / name, text)))


def test_the_importance_of_a_tier_counts_once_as_in_admission() -> None:
    tiers = TierSet(name="x", default="a", tiers={"a": Tier(slo=Slo(ttlt_s=60.0), importance=0.5)})
    [sent] = plan_requests([0.0], named_workload("mix", 8192), tiers, 1)
    assert sent.importance == 1.0
    profile = profile_file.load("a100-llama3-8b")
    record, _ = stored_as(sent, tiers, profile, 8192, 1024, 0.0)
    assert record.importance == 0.5


def test_a_tier_may_name_the_definition_that_it_is_judged_by(tmp_path: Path) -> None:
    text = """
        name = "ours"
        default = "chat"
        [tiers.chat]
        slo = {ttft_s = 1.0, tbt_x = 2, definition = "mean-tpot"}
        [tiers.batch]
        slo = {ttlt_s = 60}
        """
    tiers = load_tiers(str(written(tmp_path / "t.toml", text)))
    assert tiers.definition == "mean-tpot, deadline"
    alone = {"zero_load_ttft_s": 0.1, "zero_load_tbt_s": 0.02, "zero_load_ttlt_s": 1.0}
    assert tiers.tiers["chat"].slo.resolved(**alone) == Slo(
        ttft_s=1.0, tbt_s=0.04, definition=Definition.MEAN_TPOT
    )
    assert tiers.judged_by(Definition.TTLT).definition == "ttlt"
    assert tiers.judged_by(None) == tiers


def test_an_unknown_set_of_tiers_is_refused_with_the_known_names() -> None:
    assert all(load_tiers(name) is tiers for name, tiers in BUILT_IN.items())
    with pytest.raises(ConfigError, match="default, qoserve-3, demo-3"):
        load_tiers("gold")
