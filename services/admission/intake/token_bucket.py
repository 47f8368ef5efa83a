"""Limits each tenant's rate of tokens by a bucket. A request is let in while the bucket is not
below empty; then it pays for its prompt, and at its end for its output.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from shared.rules.tenants import Tenant

TENANTS_LIMIT = 10_000  # buckets kept; the least recently used is forgotten, and full again


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_unix_s: float


class TokenBuckets:
    """The buckets of one admission instance. All instances have equal parts of each rate."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, name: str, tenant: Tenant, admissions: int, now_unix_s: float) -> float:
        """Seconds until a request of this tenant is let in; 0: now."""
        if math.isinf(tenant.tokens_s):
            return 0.0
        bucket = self._filled(name, tenant, admissions, now_unix_s)
        return max(-bucket.tokens, 0.0) * admissions / tenant.tokens_s

    def take(
        self, name: str, tenant: Tenant, tokens: int, admissions: int, now_unix_s: float
    ) -> None:
        """Take `tokens`, which were read or made, out of the tenant's bucket."""
        if not math.isinf(tenant.tokens_s):
            self._filled(name, tenant, admissions, now_unix_s).tokens -= tokens

    def _filled(self, name: str, tenant: Tenant, admissions: int, now_unix_s: float) -> _Bucket:
        burst = tenant.burst_tokens / admissions
        bucket = self._buckets.pop(name, None) or _Bucket(burst, now_unix_s)
        passed_s = max(now_unix_s - bucket.at_unix_s, 0.0)
        bucket.tokens = min(bucket.tokens + passed_s * tenant.tokens_s / admissions, burst)
        bucket.at_unix_s = max(now_unix_s, bucket.at_unix_s)
        self._buckets[name] = bucket
        if len(self._buckets) > TENANTS_LIMIT:
            self._buckets.popitem(last=False)
        return bucket
