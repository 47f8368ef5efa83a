"""The tokenizers of the fleet's models. That of a model which is not configured is read from the
folder that its worker names, since a model may come at any time. A worker may name a shipped model,
or a folder beside a configured one: its key must not make admission read anything else.
"""

import asyncio
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import structlog

from shared.errors import ConfigError, PeerError
from shared.models import shipped
from shared.schemas import Announce
from shared.text.tokenizer import Tokenizer

log = structlog.get_logger()

AGAIN_S = 30.0  # between two looks at a folder that has no tokenizer
READ_LIMIT = 16  # tokenizers read because a worker named them: up to 100 MB each


def folders_in(model: str, models: str) -> dict[str, Path]:
    """The folders of an admission's models, by name; that of `model` is first. `models`: with
    commas between them, each as FOLDER or NAME=FOLDER. Raises ConfigError.
    """
    found: dict[str, Path] = {}
    for text in filter(None, (part.strip() for part in (model, *models.split(",")))):
        name, _, folder = text.rpartition("=")
        path = shipped.folder(folder)
        name = name or path.resolve().name
        if found.setdefault(name, path).resolve() != path.resolve():
            raise ConfigError(f"two folders of the model {name}: {found[name]} and {path}")
    return found


class Tokenizers:
    """`configured`: by model. The first is that of simulated engines, too, which take any tokens;
    where there is none, that is the built-in one. `roots`: a worker may name a folder in these.
    """

    def __init__(
        self, configured: Mapping[str, Tokenizer] | None = None, roots: Collection[Path] = ()
    ) -> None:
        self.configured = tuple(configured or ())
        self._roots = frozenset(root.resolve() for root in roots)
        self._known = dict(configured or {})
        self._first = next(iter(self._known.values()), Tokenizer.builtin())
        self._failed: dict[tuple[str, str], float] = {}  # model and folder: when, by the loop
        self._one_by_one = asyncio.Lock()

    def tool_format(self, model: str) -> str:
        return self._known.get(model, self._first).tool_format

    async def of(self, model: str, worker: Announce | None) -> Tokenizer | None:
        """The tokenizer of a model, a worker of which is `worker`; None: there is none here."""
        if (known := self._known.get(model)) is not None:
            return known
        if worker is None or worker.engine == "sim":
            return self._first
        async with self._one_by_one:
            if worker.model not in self._known:
                await self._read(worker.model, worker.folder)
        return self._known.get(worker.model)

    async def _read(self, model: str, folder: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._failed.get((model, folder), -AGAIN_S) < AGAIN_S:
            return
        try:
            if not folder:
                raise ConfigError("its worker names no folder")
            if len(self._known) - len(self.configured) >= READ_LIMIT:
                raise ConfigError(f"{READ_LIMIT} models were read already")
            self._known[model] = await asyncio.to_thread(_load, folder, self._roots)
        except ConfigError as error:
            self._failed = {(model, folder): now_s} | dict(list(self._failed.items())[:READ_LIMIT])
            log.warning("tokenizer.missing", model=model, folder=folder, error=str(error))
        else:
            log.info("tokenizer.read", model=model, folder=folder)


def missing(model: str) -> PeerError:
    """The refusal of a text for a model whose tokenizer is not here."""
    return PeerError(
        f"admission has no tokenizer of `{model}`: set SLACKLINE_ADMISSION_MODELS to its folder,"
        " which the worker's tokenizer.json is in; prompts of token ids are served",
        code="server_error",
    )


def _load(folder: str, roots: Collection[Path]) -> Tokenizer:
    """The tokenizer in a folder that a worker names. Raises ConfigError."""
    try:
        if folder not in shipped.names() and Path(os.path.realpath(folder)).parent not in roots:
            raise ConfigError(f"{folder} is not beside a folder of SLACKLINE_ADMISSION_MODELS")
        return Tokenizer.load(shipped.folder(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"no usable tokenizer in {folder}: {error!r}") from error
