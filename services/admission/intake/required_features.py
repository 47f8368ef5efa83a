"""Finds a request's needs that not every engine meets, and whether some replica meets them. To
refuse for good, admission must have listened long enough to hear every living worker, and no
replica may have met the need since admission began. Otherwise the client may ask again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.admission.workers import Workers
from shared.errors import PeerError
from shared.features import ADAPTER, abilities, meets, needs, param
from shared.schemas import Announce, GenerateRequest

NAMES = {
    "logprobs": "log-probabilities",
    "structured": "structured output (response_format, structured_outputs)",
}


class Wanted(NamedTuple):
    adapter: str  # "": none
    needs: tuple[str, ...]  # sorted; it includes the adapter


def required_features(request: GenerateRequest, workers: Workers, ours: str) -> Wanted | None:
    """A request's adapter and needs; None: not known yet whether a replica meets them. `ours`: the
    model of our tokenizer, "" for the built-in one. Raises PeerError: `model_not_found`,
    `unsupported_parameter`, or `server_is_overloaded` where that may change by itself.
    """
    living = workers.living()
    adapter = _adapter(request, workers, living, ours)
    if adapter is None:
        return None
    wanted = Wanted(adapter, tuple(sorted(needs(request.sampling, adapter))))
    if not wanted.needs or any(meets(worker, wanted.needs) for worker in living):
        return wanted
    if not workers.complete:
        return None
    had = frozenset[str]().union(*map(abilities, living))
    lacking = [need for need in wanted.needs if need not in had] or list(wanted.needs)
    params = [param(need, request.sampling) for need in lacking]
    words = " and ".join(NAMES.get(name, name) for name in params)
    if not living or any(able.issuperset(wanted.needs) for able in workers.abilities):
        raise PeerError(
            f"no replica with {words} is there now: ask again",
            code="server_is_overloaded",
            param=params[0],
        )
    engines = ", ".join(sorted({worker.engine for worker in living}))
    raise PeerError(
        f"no replica supports {words}; their engines: {engines}",
        code="unsupported_parameter",
        param=params[0],
    )


def _adapter(
    request: GenerateRequest, workers: Workers, living: Sequence[Announce], ours: str
) -> str | None:
    """The adapter that the request names, as `adapter` or as its `model`. None: not known yet."""
    models = {worker.model for worker in living} or workers.models or {ours}
    if request.adapter and request.model not in (None, request.adapter, *models):
        raise PeerError(
            f"give one of model `{request.model}` and adapter `{request.adapter}`", param="adapter"
        )
    name, field = (request.adapter, "adapter") if request.adapter else (request.model, "model")
    if name is None or (field == "model" and name in models):
        return ""
    if any(ADAPTER + name in able for able in workers.abilities):
        return name
    if not workers.complete:
        return None
    if not living:
        raise PeerError(
            f"no replica is there now, of `{name}` or any other: ask again",
            code="server_is_overloaded",
            param=field,
        )
    served = ", ".join(
        f"`{each}`"
        for each in sorted({*models, *(name for worker in living for name in worker.adapters)})
    )
    raise PeerError(
        f"unknown {field} `{name}`; this fleet serves {served}", code="model_not_found", param=field
    )
