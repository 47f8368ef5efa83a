"""Tests against an independent judge: Dynamo's simulator finds the same prefixes at the same times.

Skipped where `make judge` has not installed it.
"""

from pathlib import Path
from random import Random

import pytest

from loadgen.lab.judge.judge import PYTHON, Load, ours, theirs
from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import Trace

ROOT = Path(__file__).parents[4]


def conversations(seed: int) -> Trace:
    """Sessions whose prompts grow, with one system prompt for all, in blocks of 512 tokens."""
    rng, rows, fresh = Random(seed), list[TraceRow](), 1
    for _ in range(60):
        at_s, ids = rng.uniform(0.0, 120.0), [0]
        for _ in range(rng.randint(1, 6)):
            news = rng.randint(1, 9)
            ids += range(fresh, fresh + news)
            fresh += news
            prompt = 512 * len(ids) - rng.randint(0, 511)
            rows.append(TraceRow(at_s, prompt, rng.randint(2, 200), "", ids=tuple(ids)))
            at_s += rng.uniform(2.0, 20.0)
    return Trace("conversations", sorted(rows, key=lambda row: row.arrival_s or 0.0))


@pytest.mark.skipif(not (ROOT / PYTHON).is_file(), reason="no judge: make judge installs it")
@pytest.mark.parametrize(
    "load",
    [
        Load(replicas=4, kv_tokens=400_000),
        Load(replicas=1, kv_tokens=100_000),
        Load(replicas=2, kv_tokens=50_048, times=2.0),
    ],
)
def test_the_judge_finds_the_same_prefixes_and_first_tokens_at_the_same_times(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    trace = conversations(1)
    judged, found = theirs(trace, load, tmp_path), ours(trace, load)
    assert found.cached_fraction == pytest.approx(judged.cached_fraction, abs=0.02)
    assert found.ttft_mean_s == pytest.approx(judged.ttft_mean_s, rel=0.1)
    assert found.ttft_p50_s == pytest.approx(judged.ttft_p50_s, rel=0.1)
    assert judged.cached_fraction > 0.1
