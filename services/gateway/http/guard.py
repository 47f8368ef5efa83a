"""Finds the tenant of an HTTP request. Without keys all are let in, and only loopback is served."""

from collections.abc import Mapping

from services.gateway.http import envelope
from services.gateway.http.envelope import Rejected
from shared import subjects
from shared.rules.http_keys import HttpKeys

TENANT = "x-llm-d-inference-fairness-id"
ANTHROPIC_KEY = "x-api-key"  # where Anthropic's clients have their key


def read_tenant(headers: Mapping[str, str], keys: HttpKeys | None) -> str:
    """The tenant of the key, or, without keys, the tenant that the headers name. Raises Rejected
    for a missing or unknown key or another's tenant; PeerError for a name that is no id.
    """
    named = headers.get(TENANT)
    if keys is None:
        return subjects.check_id(subjects.DEFAULT_TENANT if named is None else named, TENANT)
    given = headers.get("authorization") or f"Bearer {headers.get(ANTHROPIC_KEY, '')}"
    scheme, _, key = given.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Rejected(envelope.NO_KEY)
    tenant = keys.tenant_of(key.strip())
    if tenant is None:
        raise Rejected(envelope.UNKNOWN_KEY)
    if named not in (None, tenant):
        raise Rejected(envelope.OTHER_TENANT)
    return tenant
