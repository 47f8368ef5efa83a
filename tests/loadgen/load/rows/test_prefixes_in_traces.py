"""Tests of traces that say what prompts have in common, and of traces of sessions."""

from pathlib import Path

import pytest

from loadgen.load.arrivals import recorded_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import Rows
from shared.errors import ConfigError
from shared.prefix import Piece
from shared.rules.tiers import DEFAULT

MOONCAKE = """\
{"timestamp": 27000, "input_length": 1300, "output_length": 5, "hash_ids": [46, 47, 48]}
{"timestamp": 30000, "input_length": 1024, "output_length": 7, "hash_ids": [46, 47]}
{"timestamp": 30000, "input_length": 600, "output_length": 0, "hash_ids": [46, 49]}
"""
AGENT = """\
{"session_id": "a", "timestamp": 0, "input_length": 70, "output_length": 9, "hash_ids": [1, 2]}
{"session_id": "b", "timestamp": 500, "input_length": 64, "output_length": 9, "hash_ids": [1]}
{"session_id": "a", "delay": 1500, "input_length": 130, "output_length": 4, "hash_ids": [1, 2, 3],
"""
ROUND = '{"session_id": "a", "delay": 900, "tool_wait_ms": 350, "request_id": "x", '


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def plan(trace: Trace) -> list[PlannedRequest]:
    arrivals = [row.arrival_s or 0.0 for row in trace.rows]
    return plan_requests(arrivals, Rows(trace, in_order=True), DEFAULT, 1)


def test_mooncakes_own_lines_and_our_column_give_the_same_prompts(tmp_path: Path) -> None:
    lines = read_trace(written(tmp_path / "a.jsonl", MOONCAKE))
    text = (
        "arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n0,1300,5,46 47 48\n3,1024,7,46 47"
    )
    column = read_trace(written(tmp_path / "a.csv", text))
    assert (lines.rows, lines.id_tokens, lines.failed) == (column.rows, 512, 1)
    first, second = plan(lines)
    assert first.pieces == (Piece(46, 512), Piece(47, 512), Piece(48, 276))
    assert second.pieces == first.pieces[:2]
    assert first.text == (*first.pieces, Piece(-1, 0), Piece(-1, 5))


def test_rounds_of_a_session_follow_one_another(tmp_path: Path) -> None:
    later = ROUND + '"input_length": 190, "output_length": 3, "hash_ids": [1, 2, 3]}\n'
    agent = AGENT.replace("[1, 2, 3],", "[1, 2, 3]}") + later
    trace = read_trace(written(tmp_path / "a.jsonl", agent))
    assert trace.id_tokens == 64
    a, second, third, b = plan(trace)
    assert (a.arrival_s, b.arrival_s, b.after) == (0.0, 0.5, None)
    assert (second.after, third.after) == (a.number, second.number)
    assert (second.pause_s, third.pause_s) == (1.5, 1.25)
    assert third.pieces == (Piece(1, 64), Piece(2, 64), Piece(3, 62))
    assert [r.prompt_tokens for r in plan(trace.within(160))] == [70, 130, 64]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (AGENT, "line 3: "),
        ('{"timestamp": 1, "input_length": 5}', "line 1: .*output_length"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 5, "output_length": 1}', "line 4: .*>= 0"),
        (MOONCAKE + '{"session_id": "q", "input_length": 5, "output_length": 1}', "line 4: .*time"),
        (
            MOONCAKE
            + '{"timestamp": 1, "input_length": 9000, "output_length": 1, "hash_ids": [1]}',
            "line 4: 1 block ids for 9000 tokens; in most rows blocks have 512",
        ),
    ],
)
def test_an_error_in_json_lines_names_the_line(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        read_trace(written(tmp_path / "a.jsonl", text))


def test_an_error_in_the_column_names_the_line(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n0,1300,5,46;47\n"
    with pytest.raises(ConfigError, match="line 2, column prefix_hash_ids"):
        read_trace(written(tmp_path / "a.csv", text))


def test_jitter_moves_rounded_times_alike_for_the_same_seed(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "a.jsonl", 40 * MOONCAKE))
    moved, _ = recorded_arrivals(trace, None, 100.0, 3, jitter_s=3.0)
    again, _ = recorded_arrivals(trace, None, 100.0, 3, jitter_s=3.0)
    assert moved.rows == again.rows
    times = [row.arrival_s or 0.0 for row in moved.rows]
    assert times == sorted(times) and len(set(times)) == 80
    assert all(0 <= at_s <= 6 for at_s in times)
