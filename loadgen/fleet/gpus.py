"""Finds the GPUs and cores of this machine, and gives each worker its GPUs, model and role."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from loadgen.fleet.ports import HOST
from shared.errors import ConfigError


class Workers(Protocol):
    """The workers of a fleet, as its FleetSpec has them."""

    @property
    def engine(self) -> str: ...

    @property
    def replicas(self) -> int: ...

    @property
    def places(self) -> int: ...

    @property
    def vllm(self) -> Mapping[str, Any]: ...

    @property
    def models(self) -> Mapping[str, str]: ...

    @property
    def roles(self) -> Sequence[str]: ...


def devices(spec: Workers, n: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of worker n. Raises ConfigError where there are too few."""
    each = int(spec.vllm.get("tensor_parallel_size", 1))
    return share_of(spec.engine, spec.places, each, n, environment)


def model_of(spec: Workers, n: int) -> dict[str, str]:
    """The model of worker n, where there are several."""
    if not spec.models:
        return {}
    name, where = list(spec.models.items())[n // spec.replicas]
    if spec.engine == "sim":
        return {"SLACKLINE_WORKER_MODEL": name, "SLACKLINE_WORKER_PROFILE": where}
    return {"SLACKLINE_WORKER_MODEL": where, "SLACKLINE_WORKER_SERVED_NAME": name}


def role_of(spec: Workers, n: int) -> dict[str, str]:
    """The role of worker n, where they have roles: the last one named is that of the rest."""
    if not spec.roles:
        return {}
    role = spec.roles[min(n, len(spec.roles) - 1)]
    listens = {"SLACKLINE_WORKER_ROLE": role, "SLACKLINE_WORKER_KV_LISTEN": f"{HOST}:0"}
    return listens | ({"SLACKLINE_WORKER_PREFIX_CACHING": "true"} if spec.engine == "sim" else {})


def share_of(
    engine: str, replicas: int, each: int, n: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """The GPUs of worker n, which needs `each`. Each of several workers on one machine has GPUs of
    its own, in turn, out of the visible ones or out of all. Raises ConfigError where they are too
    few.
    """
    gpus = visible_gpus(environment)
    if replicas == 1 or engine == "sim" or (engine == "torch" and not gpus):
        return {}
    needed = each * replicas
    if gpus and len(gpus) < needed:
        if engine == "torch" and environment.get("SLACKLINE_WORKER_KV_BLOCKS"):
            return {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]}
        raise ConfigError(
            f"{replicas} replicas of {each} GPU{'s' * (each > 1)} need {needed}, and there "
            f"{'is' if len(gpus) == 1 else 'are'} {len(gpus)}"
            + "; replicas of the torch engine may share one with SLACKLINE_WORKER_KV_BLOCKS"
            * (engine == "torch")
        )
    mine = (gpus or [str(gpu) for gpu in range(needed)])[n * each : (n + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or else all that the machine has."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu and gpu != "-1"]  # -1: none
    found = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((name for name in found if name.isdigit()), key=int)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def torch_replicas() -> int:
    """The number of torch workers: one for each GPU; without GPUs 1, or 2 from four cores on."""
    return len(visible_gpus(os.environ)) or max(1, min(2, cores() // 2))
