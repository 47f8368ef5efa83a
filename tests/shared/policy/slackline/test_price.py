"""Slackline's price of work, by a profile that was corrected."""

from pathlib import Path

import pytest

from shared.perf.online import Corrected
from shared.perf.profile_file import load
from shared.perf.shape import BatchShape
from shared.policy.slackline.price import prices_of
from tests.shared.policy.flat_profile import flat_profile


def test_a_decode_has_its_price_where_mixed_batches_seem_to_cost_no_more_than_prefills(
    tmp_path: Path,
) -> None:
    """Prefills alone were slow, mixed batches were not: one more decode changes nothing there."""
    base = load(flat_profile(tmp_path, batch_s=0.003, token_s=2e-4))
    profile = Corrected(base)
    alone, mixed = BatchShape(256, 1), BatchShape(256, 1, decodes=8)
    for _ in range(200):
        profile.observe(alone, 2.0 * base.batch_s(alone))
        profile.observe(mixed, base.batch_s(mixed))
    full = BatchShape(1024, 1, decodes=1)
    assert profile.batch_s(full._replace(decodes=2)) == profile.batch_s(full)
    among_s = profile.batch_s(BatchShape(decodes=65)) - profile.batch_s(BatchShape(decodes=1))
    assert prices_of(profile).decode_s == pytest.approx(among_s / 64)
