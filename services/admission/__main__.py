"""python -m services.admission"""

import asyncio
from random import Random

from services.admission.config import AdmissionConfig
from services.admission.service import serve
from shared.bus.api import Bus
from shared.clock import Clock
from shared.service import run
from shared.telemetry import Tracing
from shared.text import Tokenizer


async def body(cfg: AdmissionConfig, bus: Bus, clock: Clock, stop: asyncio.Event, tracing: Tracing, rng: Random) -> None:
    tokenizer = Tokenizer.load(cfg.model) if cfg.model else Tokenizer.builtin()
    await serve(cfg, bus, clock, tokenizer, stop, tracing=tracing, rng=rng)


if __name__ == "__main__":
    run("admission", AdmissionConfig, body)
