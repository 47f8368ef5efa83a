"""Sends planned requests over NATS. A token costs one callback and no task."""

from collections.abc import Callable
from uuid import uuid4

from loadgen.load.mix import PlannedRequest
from loadgen.load.tally import Outcome
from loadgen.load.texts.prompts import Prompts
from shared.client.client import Client, Now
from shared.errors import PeerError, SlacklineError
from shared.schemas import Delta, End, GenerateRequest, Sampling, Status, StreamEvent
from shared.vocabulary import ServiceClass


def cap_tokens(longest_output: int, context_tokens: int, prompt_tokens: int) -> int:
    """The max_tokens to send: it fits the context, and does not tell an answer's length."""
    return max(1, min(-(-longest_output // 1024) * 1024, context_tokens - prompt_tokens))


class NatsSender:
    """Sends `sampling.output_tokens`, which ends the answer where the plan says; the planner sees
    only max_tokens. `prompts` makes a request's prompt; None: prompts are random, and alike where
    the plan says so.
    """

    def __init__(
        self,
        client: Client,
        clock: Now,
        *,
        seed: int,
        longest_output: int,
        context_tokens: int,
        prompts: Callable[[PlannedRequest], list[int]] | None = None,
        model: str | None = None,
    ) -> None:
        self._client, self._model = client, model
        self._clock = clock
        self._texts = Prompts(seed)
        self._prompts = prompts or self._texts.ids
        self._longest_output = longest_output
        self._context_tokens = context_tokens
        self._run = uuid4().hex[:12]  # ids of another run must not attach to this one's

    async def send(self, outcome: Outcome) -> None:
        """Send a request, and wait until it has ended. Cancelling this call cancels the request."""
        planned = outcome.planned
        request = GenerateRequest(
            request_id=f"load-{self._run}-{planned.number}",
            tenant=planned.tenant,
            model=self._model,
            token_ids=self._prompts(planned),
            sampling=Sampling(
                max_tokens=cap_tokens(
                    self._longest_output, self._context_tokens, planned.prompt_tokens
                ),
                output_tokens=planned.output_tokens,
                thinking_tokens=planned.thinking_tokens,
                ignore_eos=True,
                temperature=0.0,
            ),
            slo=outcome.slo,
            importance=planned.importance,
            application=planned.application,
            session=planned.session,
        )
        try:
            handle = await self._client.submit(request, planned.tier, sink=self._sink(outcome))
            del request  # the prompts of thousands of running requests would fill the memory
            try:
                await handle.wait()
            except BaseException:
                await handle.cancel("the load generator stopped")
                raise
        except PeerError as error:
            outcome.refuse(error.code, error.message)
        except SlacklineError as error:
            outcome.end("error", str(error))

    def _sink(self, outcome: Outcome) -> Callable[[StreamEvent], None]:
        now = self._clock.unix_s

        def on_event(event: StreamEvent) -> None:
            if isinstance(event, Delta):
                self._texts.answered(outcome.planned, event.tokens)
                outcome.emit(len(event.tokens), now())
            elif isinstance(event, Status):
                outcome.relegated = (
                    outcome.relegated or event.service_class is ServiceClass.BEST_EFFORT
                )
            elif isinstance(event, End):
                verdict = event.verdict
                outcome.server_met = verdict.slo_met
                outcome.cached_tokens = verdict.cached_tokens
                outcome.relegated = outcome.relegated or verdict.relegated
                outcome.end(verdict.finish_reason, verdict.message)

        return on_event
