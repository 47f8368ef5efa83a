"""Finds a request's model, its needs that not every engine meets, and whether some replica meets
them. To refuse for good, admission must have listened long enough to hear every living worker, and
no replica may have met the need since admission began. Otherwise the client may ask again.
"""

from collections.abc import Collection
from typing import NamedTuple

from services.admission.workers import Workers
from shared.errors import PeerError
from shared.features import ADAPTER, abilities, needs, param, serves
from shared.rules.model_names import ModelNames
from shared.schemas import GenerateRequest

NAMES = {
    "logprobs": "log-probabilities",
    "structured": "structured output (response_format, structured_outputs)",
}


class Wanted(NamedTuple):
    adapter: str  # "": none
    needs: tuple[str, ...]  # sorted; it includes the adapter
    model: str = ""  # "": any, as no worker was heard of


def required_features(
    request: GenerateRequest, workers: Workers, ours: Collection[str], names: ModelNames
) -> Wanted | None:
    """A request's model, adapter and needs; None: not known yet whether a replica meets them.
    `ours`: the models of our tokenizers. Raises PeerError: `model_not_found`,
    `unsupported_parameter`, or `server_is_overloaded` where that may change by itself.
    """
    chosen = chosen_model(request.model, request.adapter, workers, ours, names)
    if chosen is None:
        return None
    model, adapter = chosen
    wanted = Wanted(adapter, tuple(sorted(needs(request.sampling, adapter))), model)
    living = [worker for worker in workers.living() if serves(worker, model, ())]
    if not wanted.needs or any(serves(worker, model, wanted.needs) for worker in living):
        return wanted
    if not workers.complete:
        return None
    had = frozenset[str]().union(*map(abilities, living))
    lacking = [need for need in wanted.needs if need not in had] or list(wanted.needs)
    params = [param(need, request.sampling) for need in lacking]
    words = " and ".join(NAMES.get(name, name) for name in params)
    if not living or any(
        model in ("", of) and able.issuperset(wanted.needs) for of, able in workers.kinds
    ):
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


def chosen_model(
    model: str | None, adapter: str, workers: Workers, ours: Collection[str], names: ModelNames
) -> tuple[str, str] | None:
    """The model, "" for any, and the adapter that a request means, which names the adapter as
    `adapter` or as its `model`. None: not known yet. Raises PeerError.
    """
    living, model = workers.living(), names.meant(model) if model or not adapter else None
    models = {worker.model for worker in living} | workers.models
    # before a worker was heard, its name is not known: that of a folder is not always announced
    heard, models = bool(models), models or set(ours)
    if adapter and model not in (None, adapter, *models):
        raise PeerError(f"give one of model `{model}` and adapter `{adapter}`", param="adapter")
    name, field = (adapter, "adapter") if adapter else (model, "model")
    several = set(ours) if len(ours) > 1 else set[str]()  # the operator told of them
    if name is None:
        return _only(models | several, heard, workers)
    if field == "model" and name in models:
        return (name if heard or len(ours) > 1 else ""), ""
    having = {of for of, able in workers.kinds if of in models and ADAPTER + name in able}
    if adapter and model in models:
        having &= {model}
    if len(having) > 1:
        having = having & {worker.model for worker in living} or having
    if len(having) > 1:
        raise PeerError(
            f"{_listed(having)} have an adapter `{name}`: name the model, too", param=field
        )
    if having:
        return having.pop(), name
    if not workers.complete:
        return None
    if not living or (name in several and workers.last(name) is None):
        raise PeerError(
            f"no replica is there now, of `{name}`{'' if living else ' or any other'}: ask again",
            code="server_is_overloaded",
            param=field,
        )
    served = {*models, *(name for worker in living for name in worker.adapters)}
    raise PeerError(
        f"unknown {field} `{name}`; this fleet serves {_listed(served)}",
        code="model_not_found",
        param=field,
    )


def _only(models: Collection[str], heard: bool, workers: Workers) -> tuple[str, str] | None:
    """The model of a request that names none, and no adapter."""
    if len(models) < 2:
        return next(iter(models), "") if heard else "", ""
    if not heard:
        if not workers.complete:
            return None
        raise PeerError("no replica is there now: ask again", code="server_is_overloaded")
    raise PeerError(
        f"there are several models: name one of {_listed(models)} in `model`", param="model"
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
