"""python -m services.admission"""

import asyncio
from random import Random

from services.admission.config import AdmissionConfig
from services.admission.service import Admission
from shared.bus.api import Bus
from shared.clock import Clock
from shared.models import shipped as models
from shared.process.main import Export, run
from shared.process.telemetry import Tracing
from shared.text.tokenizer import Tokenizer


async def body(
    cfg: AdmissionConfig,
    bus: Bus,
    clock: Clock,
    stop: asyncio.Event,
    tracing: Tracing,
    rng: Random,
    export: Export,
) -> None:
    tokenizer = Tokenizer.load(models.folder(cfg.model)) if cfg.model else Tokenizer.builtin()
    admission = Admission(cfg, bus, clock, tokenizer, tracing, rng)
    export(admission.metrics)
    await admission.run(stop)


if __name__ == "__main__":
    run("admission", AdmissionConfig, body)
