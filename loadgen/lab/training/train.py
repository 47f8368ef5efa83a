"""One training run on a CPU. It can be interrupted and resumed.

The learning rate warms up, stays constant, and then falls linearly to zero. The progress of a run
is the larger of its share of the steps and its share of the minutes, so that a run that is cut
short by time still ends with the fall. The last part of a run learns from long rows.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

Batches = Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]  # rows, tokens of a row, seed
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one run. `minutes` is training time over all resumptions."""

    steps: int
    minutes: float
    peak: float  # learning rate
    batch_tokens: int = 8192
    row_tokens: int = 256
    long_row_tokens: int = 1024
    long_from: float = 0.9  # share of the run
    warm_until: float = 0.02
    fall_from: float = 0.5
    seed: int = 1  # seeds of the texts are this modulo 1000; measurements take other seeds
    checkpoint_s: float = 60.0
    say_s: float = 10.0  # between two lines of progress

    def rate(self, done: float) -> float:
        """The learning rate at this progress."""
        if done < self.warm_until:
            return self.peak * max(done, 1e-4) / self.warm_until
        return self.peak * min(1.0, max(0.0, (1 - done) / (1 - self.fall_from)))


@dataclass(slots=True)
class Progress:
    step: int = 0
    tokens: int = 0
    spent_s: float = 0.0
    loss: float = float("nan")  # smoothed over about a hundred steps; nats per token
    long: bool = False

    def done(self, plan: Plan) -> float:
        return min(1.0, max(self.step / plan.steps, self.spent_s / (60 * plan.minutes)))


class Run:
    """One run. It trains the model in place.

    The checkpoint includes the optimizer, so that a resumed run continues unchanged.
    """

    def __init__(
        self, model: Any, loss: Loss, batches: Batches, plan: Plan, checkpoint: Path
    ) -> None:
        self._model, self._loss, self._batches, self._plan, self._checkpoint = (
            model,
            loss,
            batches,
            plan,
            checkpoint,
        )
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=plan.peak, betas=(0.9, 0.95), fused=True)
        self.progress = Progress()
        self._stopping = False

    def restore(self) -> bool:
        """Loads the checkpoint; False if there is none."""
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True

    def save(self) -> None:
        fields = {name: getattr(self.progress, name) for name in Progress.__dataclass_fields__}
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": fields,
        }
        partial = self._checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def train(self, say: Callable[[str], None]) -> bool:
        """Trains until the plan is fulfilled (True) or the run is interrupted (False).

        The checkpoint is written in either case.
        """
        plan, progress = self._plan, self.progress
        before = signal.signal(signal.SIGINT, self._stop)
        saved_s = said_s = time.monotonic()
        said_tokens = progress.tokens
        feed = self._feed()
        try:
            while (done := progress.done(plan)) < 1 and not self._stopping:
                began_s = time.monotonic()
                # A finished run that is given more time goes back to short rows.
                if progress.long != (done >= plan.long_from):
                    progress.long = not progress.long
                    feed = self._feed()
                self._step(*next(feed), plan.rate(done))
                now_s = time.monotonic()
                progress.spent_s += now_s - began_s
                if now_s - said_s >= plan.say_s:
                    say(self._line((progress.tokens - said_tokens) / (now_s - said_s)))
                    said_s, said_tokens = now_s, progress.tokens
                if now_s - saved_s >= plan.checkpoint_s:
                    self.save()
                    saved_s = now_s
        finally:
            signal.signal(signal.SIGINT, before)
            self.save()
        return not self._stopping

    def _feed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from here on. A resumed run has another seed, so it repeats no text."""
        plan = self._plan
        row = plan.long_row_tokens if self.progress.long else plan.row_tokens
        return self._batches(
            max(1, plan.batch_tokens // row), row, plan.seed + 1000 * self.progress.step
        )

    def _step(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self._loss(inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        progress, value = self.progress, float(loss.detach())
        progress.step += 1
        progress.tokens += inputs.numel()
        progress.loss = (
            value
            if progress.step == 1
            else progress.loss + (value - progress.loss) / min(progress.step, 100)
        )

    def _line(self, tokens_per_s: float) -> str:
        progress = self.progress
        done = progress.done(self._plan)
        left_s = progress.spent_s * (1 - done) / done
        return (
            f"step {progress.step}  loss {progress.loss:.3f}  {tokens_per_s:.0f} tokens/s  "
            f"{progress.tokens / 1e6:.1f} M tokens  {done:.1%} done, {left_s / 60:.0f} min left"
        )

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-C: the run stops after this step."""
        self._stopping = True
