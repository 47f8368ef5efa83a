"""Leaves tools out of a body that its API's owner runs itself: a model need not call each."""

from collections.abc import Collection

import msgspec

from shared.errors import UNDECODABLE


def without_hosted(raw: bytes, callers: Collection[str | None]) -> tuple[bytes, list[str]]:
    """The body without tools of other types than `callers`, which the caller runs, and the types
    that were left out.
    """
    if b'"tools"' not in raw:
        return raw, []
    try:
        body = msgspec.json.decode(raw)
    except UNDECODABLE:
        return raw, []
    tools = body.get("tools") if isinstance(body, dict) else None
    if not isinstance(tools, list):
        return raw, []
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    hosted = [kind for kind in kinds if isinstance(kind, str) and kind not in callers]
    if not hosted:
        return raw, []
    ours = [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in hosted]
    return msgspec.json.encode({**body, "tools": ours}), list(dict.fromkeys(hosted))
