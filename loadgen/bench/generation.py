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
    command = [
        sys.executable,
        "-m",
        "services.worker.bench.engine",
        "--json",
        *(["--quick"] if quick else []),
    ]
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
        found.append(
            Figure(part=PART, name=speed.name, value=speed.engine, unit="tokens/s", note=note)
        )
        others = {"generate": speed.generate, "generate_batch": speed.generate_batch}
        for name, other in others.items():
            if other is not None:
                note = f"{name}: {other:,.0f} tokens/s"
                found.append(
                    Figure(
                        part=PART,
                        name=f"{speed.name}, over {name}",
                        value=speed.engine / other,
                        unit="x",
                        least=AIM,
                        note=note,
                    )
                )
    for batch, outside_s in measured.outside_s.items():
        iteration_s = measured.iteration_s[batch]
        note = f"{outside_s / iteration_s:.0%} of an iteration of {iteration_s * 1e3:.1f} ms"
        found.append(
            Figure(
                part=PART,
                name=f"outside the model, batch {batch}",
                value=outside_s,
                unit="ms",
                note=note,
            )
        )
    found += drafting(measured)
    for name, quantiles in measured.late_s.items():
        for share, late_s in zip(("p50", "p99"), quantiles, strict=True):
            found.append(
                Figure(
                    part=PART,
                    name=f"event loop late beside {name}, {share}",
                    value=late_s,
                    unit="ms",
                )
            )
    return found


def drafting(measured: EngineFigures) -> list[Figure]:
    """The cost of the draft model; decoding with drafts, over no drafts and over assisted
    generation; for each batch the number of drafts that is best; and the time outside the models.
    """
    none = {one.batch: one for one in measured.drafting if not one.budget}
    plain = {batch: one.tokens_per_s for batch, one in none.items()}
    speed = "tokens/s of CPU time" if measured.device == CPU else "tokens/s"
    found = []
    step, read = fractions_of(measured.draft)
    if step:
        found = [
            Figure(part=PART, name="a draft step, of the target's pass", value=step, unit="%"),
            Figure(
                part=PART,
                name="the draft reads a prompt token, of the target's time",
                value=read,
                unit="%",
            ),
        ]
    for one in measured.drafting:
        note = (
            f"{one.tokens_per_s:,.0f} {speed}; {one.yielded:.2f} tokens a request in "
            f"{one.iteration_s * 1e3:.1f} ms, drafting {one.drafted_s * 1e3:.1f}, outside the "
            f"models {one.outside_s / one.iteration_s:.0%}"
        )
        if one.budget:  # as long as the tokens take without drafts, less their verification
            verified_s = one.iteration_s - one.drafted_s
            even_s = none[one.batch].iteration_s * one.yielded - verified_s
            note += f"; even if drafting took {even_s * 1e3:.1f} ms"
        name, value = f"batch {one.batch}, {one.budget} drafts", one.tokens_per_s
        name, value = f"{name}, over none", value / plain[one.batch]
        found.append(Figure(part=PART, name=name, value=value, unit="x", note=note))
    for batch, plain_per_s in plain.items():
        every = [one for one in measured.drafting if one.batch == batch]
        best = max(every, key=lambda one: one.tokens_per_s)
        outside = max(one.outside_s / one.iteration_s for one in every)
        found += [
            Figure(
                part=PART,
                name=f"batch {batch}, best number of drafts, over none",
                value=best.tokens_per_s / plain_per_s,
                unit="x",
                note=f"{best.budget} drafts" if best.budget else "none: drafts lose",
            ),
            Figure(
                part=PART,
                name=f"batch {batch}, outside the models, at most",
                value=outside,
                unit="%",
                aim=OUTSIDE_AIM if batch == OUTSIDE_BATCH else None,
                note="of an iteration, with any number of drafts",
            ),
        ]
    if measured.generate_assisted:
        most_per_s = max(one.tokens_per_s for one in measured.drafting if one.batch == 1)
        note = (
            f"assisted: {measured.generate_assisted:,.0f}, generate: "
            f"{measured.generate_alone:,.0f} {speed}"
        )
        name = "batch 1, best, over assisted generation"
        value = most_per_s / measured.generate_assisted
        found.append(Figure(part=PART, name=name, value=value, unit="x", least=AIM, note=note))
    return found
