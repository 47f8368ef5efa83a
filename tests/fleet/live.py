"""Helpers for tests of a real fleet: send many requests, keep every event, compare with the log."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import uuid4

from loadgen.fleet.fleet import Fleet
from shared import subjects
from shared.bus.api import Call, RefusedError
from shared.bus.nats import NatsBus
from shared.bus.nats_client import OrderedClient, trusting
from shared.bus.users import Role, User
from shared.client.client import Client, Handle, Patience
from shared.clock import Clock
from shared.errors import BusError
from shared.schemas import (
    Attach,
    Delta,
    Digest,
    End,
    GenerateRequest,
    Replay,
    Sampling,
    Status,
    StreamEvent,
    Verdict,
)
from shared.vocabulary import Slo

PATIENCE = Patience(silence_s=1.0, submit_s=60.0)
WAIT_S = 120.0  # the longest that a busy machine may take for anything
DEFAULT = User(Role.TENANT, subjects.DEFAULT_TENANT)
HOPELESS = Slo(ttft_s=0.0001, tbt_s=1.0)  # no replica can hold it: relegated at once


def request_for(
    max_tokens: int, request_id: str | None = None, *, prompt: str = "hello", **more: Any
) -> GenerateRequest:
    """A request that gets just so many tokens, under an id of its own if none is given."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    values: dict[str, Any] = {"prompt": prompt, "sampling": sampling, **more}
    return GenerateRequest(request_id=request_id or uuid4().hex, **values)


@dataclass
class Delivered:
    """One request as a client received it."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    verdict: Verdict | None = None
    sent_s: float = 0.0  # by the loop's clock
    heard_s: list[float] = field(default_factory=list)  # when tokens came


class Wire:
    """Every event sent to one client, in the order of arrival."""

    def __init__(self) -> None:
        self.events: dict[str, list[StreamEvent]] = defaultdict(list)
        self.replaced = asyncio.Event()  # a request goes on elsewhere: its replica is lost
        self._heard = asyncio.Event()

    def receive(self, event: StreamEvent, call: Call) -> None:
        self.events[call.subject].append(event)
        self._heard.set()
        if isinstance(event, Status) and event.state == "replaced":
            self.replaced.set()

    async def until_speaking(self, requests: int) -> None:
        """Wait until tokens of so many requests came: then the log has that they are held."""

        def speaking() -> int:
            return sum(any(isinstance(e, Delta) for e in sent) for sent in self.events.values())

        async with asyncio.timeout(WAIT_S):
            while speaking() < requests:
                self._heard.clear()
                await self._heard.wait()


@asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[tuple[NatsBus, Client, Wire]]:
    """A connection of the operator, and a client that speaks for all tenants."""
    name, wire = uuid4().hex, Wire()
    async with fleet.connect("test") as bus:
        await bus.subscribe(f"_INBOX.*.{name}.*", StreamEvent, wire.receive)
        async with Client(bus, Clock(), patience=PATIENCE, client_id=name) as client:
            yield bus, client, wire


async def connect_raw(fleet: Fleet, user: User = DEFAULT) -> OrderedClient:
    """A connected client that knows nothing of ours but its key and the prefix of its inboxes."""
    access, client = fleet.access(user), OrderedClient()
    options = client.log_in(access.creds) if access.creds else {}
    if access.tls_ca:
        options["tls"] = trusting(access.tls_ca)
    await client.connect(access.url, inbox_prefix=user.inboxes[-1], **options)
    return client


async def ask(
    client: Client, request: GenerateRequest, tier: str = "chat", within_s: float = WAIT_S
) -> Delivered:
    """Run one request from its start to its end."""
    now_s = asyncio.get_running_loop().time
    delivered = Delivered(request, sent_s=now_s())
    async with asyncio.timeout(within_s):
        handle = await _submitted(client, request, tier)
        async for event in handle:
            if isinstance(event, Delta):
                assert event.offset == len(delivered.tokens)
                assert event.text_offset == len(delivered.text)
                delivered.tokens += event.tokens
                delivered.text += event.text
                delivered.heard_s.append(now_s())
        delivered.verdict = await handle.wait()
    return delivered


async def _submitted(client: Client, request: GenerateRequest, tier: str) -> Handle:
    """Submit, as often as the answer is to ask again."""
    while True:
        try:
            return await client.submit(request, tier)
        except RefusedError as error:
            if error.refused.retry_after_s is None:
                raise
            await asyncio.sleep(error.refused.retry_after_s)


async def replay_of(bus: NatsBus, request: GenerateRequest) -> Replay:
    """Read the log of a request: ask until an admission answers."""
    subject = subjects.attach(request.tenant or subjects.DEFAULT_TENANT)
    question = Attach(request_id=request.request_id)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await bus.request(subject, question, Replay, timeout_s=2.0)
            except BusError:
                await asyncio.sleep(0.1)
            except RefusedError as error:  # admission waited in vain for a store that is away
                if "did not answer" not in error.message:
                    raise
                await asyncio.sleep(0.1)


def draw_requests(
    seed: int, n: int, *, prompt: tuple[int, int], output: tuple[int, int], beginning: str = ""
) -> list[tuple[GenerateRequest, str]]:
    """Draw sampled and greedy requests of every tier, each fifth with an SLO that no replica can
    hold. `beginning`: of every other prompt.
    """
    rng = Random(seed)
    drawn = []
    for i in range(n):
        letters = "".join(rng.choices("abcdefgh ", k=rng.randint(*prompt)))
        request = GenerateRequest(
            request_id=f"load-{seed}-{i}-{uuid4().hex[:8]}",
            tenant=rng.choice(("default", "acme")),
            prompt=beginning + letters if i % 2 else letters,
            sampling=Sampling(
                max_tokens=rng.randint(*output), temperature=rng.choice((0.0, 1.0)), ignore_eos=True
            ),
            slo=HOPELESS if i % 5 == 4 else None,
        )
        drawn.append((request, rng.choice(("interactive", "chat", "summary", "batch"))))
    return drawn


async def under_load(
    client: Client,
    requests: Sequence[tuple[GenerateRequest, str]],
    during_s: float,
    disturb: Callable[[], Coroutine[Any, Any, None]],
) -> list[Delivered]:
    """Offer the requests evenly over `during_s`, begin to `disturb` half-way, and wait for every
    end.
    """
    async with asyncio.TaskGroup() as tasks:
        running = list[asyncio.Task[Delivered]]()
        for i, (request, tier) in enumerate(requests):
            if i == len(requests) // 2:
                tasks.create_task(disturb())
            running.append(tasks.create_task(ask(client, request, tier, WAIT_S)))
            await asyncio.sleep(during_s / len(requests))
    return [task.result() for task in running]


async def check(bus: NatsBus, wire: Wire, delivered: Sequence[Delivered]) -> None:
    """Check that each request ended once and well, that the client has the tokens and the text of
    the log, and that no event ever carried others.
    """
    ends: dict[str, set[str]] = defaultdict(set)
    for one in delivered:
        replay = await replay_of(bus, one.request)
        name = one.request.request_id
        assert one.tokens == replay.tokens, name
        assert one.text == replay.text, name
        assert one.verdict == replay.verdict, name
        assert replay.verdict is not None
        assert replay.verdict.finish_reason == "length", (name, replay.verdict)
        assert len(one.tokens) == one.request.sampling.max_tokens == replay.verdict.output_tokens, (
            name
        )
        for event in wire.events[replay.stream_subject]:
            if isinstance(event, Delta):
                at = event.offset
                assert event.tokens == one.tokens[at : at + len(event.tokens)], (
                    f"{name}: another text at {at}"
                )
                assert (
                    event.text == one.text[event.text_offset : event.text_offset + len(event.text)]
                ), name
            elif isinstance(event, End):
                ends[name].add(repr(event.verdict))
        assert len(ends[name]) <= 1, f"{name} ended more than once"


async def until_idle(bus: NatsBus, replicas: Sequence[str]) -> None:
    """Wait until every replica publishes that it holds no request and has all its KV."""

    def idle(digest: Digest) -> bool:
        return (
            digest.running + digest.waiting + digest.best_effort == 0
            and digest.kv_free_blocks == digest.kv_blocks
        )

    await _until_all(bus, replicas, idle)


async def until_ready(bus: NatsBus, replicas: Sequence[str]) -> None:
    """Wait until every replica publishes that it takes requests, also while the server is gone."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(BusError):
                return await _until_all(bus, replicas, lambda digest: digest.accepting)
            await asyncio.sleep(0.1)


async def until_running(bus: NatsBus, replica: str) -> None:
    """Wait until the replica publishes that it runs a request."""
    await _until_all(bus, [replica], lambda digest: digest.running > 0)


async def _until_all(
    bus: NatsBus, replicas: Sequence[str], true_of: Callable[[Digest], bool]
) -> None:
    latest: dict[str, bool] = {}
    changed = asyncio.Event()

    def receive(digest: Digest, _: Call) -> None:
        latest[digest.replica] = true_of(digest)
        changed.set()

    digests = await bus.subscribe(subjects.DIGESTS, Digest, receive)
    async with asyncio.timeout(WAIT_S):
        while not all(latest.get(replica) for replica in replicas):
            changed.clear()
            await changed.wait()
    await digests.stop()
