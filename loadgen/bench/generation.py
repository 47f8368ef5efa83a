"""The torch engine beside transformers' own `generate` and `generate_batch`.

A process of its own measures them.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import msgspec

from loadgen.bench.figure import Figure
from loadgen.fleet.child import Say
from shared.errors import SlacklineError
from shared.perf.draft import fractions_of
from shared.perf.engine_figures import CPU, EngineFigures

PART = "torch engine"
OUTSIDE_AIM, OUTSIDE_BATCH = 0.05, 8
AIM = 1.0  # the engine should be no slower than transformers, which it is made of
LONGEST_S = 1800.0


def measure(quick: bool, say: Say) -> list[Figure]:
    """The figures; none if torch is not installed. Raises SlacklineError if the process fails."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        say("  skipped: torch and transformers are not installed")
        return []
    command = [sys.executable, "-m", "services.worker.bench.engine"]
    command += ["--quick"] if quick else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            out, progress = process.communicate(timeout=LONGEST_S)
        except BaseException:  # else the process would run on alone
            process.kill()
            raise
    if process.returncode:
        raise SlacklineError(
            f"the bench of the torch engine ended with status {process.returncode}; "
            f"its output:\n{progress}"
        )
    return figures(msgspec.json.decode(out, type=EngineFigures))


def figures(measured: EngineFigures) -> list[Figure]:
    model = (
        f"{measured.model}, {measured.parameters / 1e6:.1f} M parameters, "
        f"device: {measured.device}, threads: {measured.threads}"
    )
    found = []
    for number, speed in enumerate(measured.speeds):
        note = f"best of {measured.rounds}" if number else model
        found.append(Figure(PART, speed.name, speed.engine, "tokens/s", note=note))
        others = {"generate": speed.generate, "generate_batch": speed.generate_batch}
        for other, per_s in others.items():
            if per_s is not None:
                name, note = f"{speed.name}, over {other}", f"{other}: {per_s:,.0f} tokens/s"
                found.append(Figure(PART, name, speed.engine / per_s, "x", least=AIM, note=note))
    for batch, outside_s in measured.outside_s.items():
        iteration_s = measured.iteration_s[batch]
        note = f"{outside_s / iteration_s:.0%} of an iteration of {iteration_s * 1e3:.1f} ms"
        found.append(Figure(PART, f"outside the model, batch {batch}", outside_s, "ms", note=note))
    found += drafting(measured)
    for beside, quantiles in measured.late_s.items():
        for share, late_s in zip(("p50", "p99"), quantiles, strict=True):
            found.append(Figure(PART, f"event loop late beside {beside}, {share}", late_s, "ms"))
    return found


def drafting(measured: EngineFigures) -> list[Figure]:
    """The cost of the draft model; for each batch the number of drafts that is best, over no drafts
    and over assisted generation; and the time outside the models.
    """
    none = {one.batch: one for one in measured.drafting if not one.budget}
    speed = "tokens/s of CPU time" if measured.device == CPU else "tokens/s"
    found = []
    step, read = fractions_of(measured.draft)
    if step:
        name = "the draft reads a prompt token, of the target's time"
        found += [
            Figure(PART, "a draft step, of the target's pass", step, "%"),
            Figure(PART, name, read, "%"),
        ]
    for batch, plain in none.items():
        every = [one for one in measured.drafting if one.batch == batch]
        best = max(every, key=lambda one: one.tokens_per_s)
        name = f"batch {batch}, best number of drafts, over none"
        note = f"{best.budget} drafts" if best.budget else "none: drafts lose"
        found.append(Figure(PART, name, best.tokens_per_s / plain.tokens_per_s, "x", note=note))
        name = f"batch {batch}, outside the models, at most"
        note = "of an iteration, with any number of drafts"
        outside = max(one.outside_s / one.iteration_s for one in every)
        aim = OUTSIDE_AIM if batch == OUTSIDE_BATCH else None
        found.append(Figure(PART, name, outside, "%", aim=aim, note=note))
    if measured.generate_assisted:
        most_per_s = max(one.tokens_per_s for one in measured.drafting if one.batch == 1)
        note = (
            f"assisted: {measured.generate_assisted:,.0f}, generate: "
            f"{measured.generate_alone:,.0f} {speed}"
        )
        name = "batch 1, best, over assisted generation"
        gain = most_per_s / measured.generate_assisted
        found.append(Figure(PART, name, gain, "x", least=AIM, note=note))
    return found
