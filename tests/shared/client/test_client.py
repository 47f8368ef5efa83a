"""Every token once and in order, whatever the network does to the events; bounded waits."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.client.assemble import Assembler
from shared.client.client import COPIES_FOR_S, Client, Handle, Patience
from shared.errors import BusTimeout, NoResponders, PeerError
from shared.schemas import (
    Attach,
    Cancel,
    Delta,
    End,
    GenerateRequest,
    Received,
    Refused,
    Replay,
    Status,
    StreamEvent,
    Verdict,
)
from shared.vocabulary import FinishReason, ServiceClass
from tests.simulated.broker import Faults
from tests.simulated.bus import SimBus, SimNet
from tests.simulated.process import VirtualClock, virtual_loop
from tests.simulated.virtual_loop import run_virtual


def verdict(tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Verdict:
    return Verdict(
        finish_reason=reason,
        slo_met=True,
        relegated=False,
        service_class=ServiceClass.STANDARD,
        prompt_tokens=1,
        output_tokens=tokens,
        attempts=1,
        ttft_s=None,
        worst_tbt_s=None,
        mean_tpot_s=None,
        ttlt_s=None,
        ended_unix_s=0.0,
    )


@dataclass
class Log:
    """The output of one request: entries of tokens and text. Either may be empty (text is held back
    for stop strings).
    """

    entries: list[tuple[list[int], str]]

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.entries for token in tokens]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.entries)

    def deltas(self) -> list[Delta]:
        out, offset, text_offset = [], 0, 0
        for number, (tokens, text) in enumerate(self.entries):
            last = number == len(self.entries) - 1
            out.append(
                Delta(
                    attempt=1,
                    offset=offset,
                    tokens=tokens,
                    text=text,
                    text_offset=text_offset,
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            offset, text_offset = offset + len(tokens), text_offset + len(text)
        return out

    def replay(self, from_token: int, made: int, ended: Verdict | None) -> Replay:
        """The truth about the first `made` entries, with as little text before token `from_token`
        as can be: from 0 on it is all.
        """
        known = Log(self.entries[:made])
        text_offset, seen = 0, 0
        for tokens, text in known.entries:
            if from_token == 0 or seen + len(tokens) > from_token:
                break
            seen += len(tokens)
            text_offset += len(text)
        return Replay(
            stream_subject="_INBOX.c.1",
            offset=min(from_token, len(known.tokens)),
            tokens=known.tokens[from_token:],
            text=known.text[text_offset:],
            text_offset=text_offset,
            verdict=ended,
        )


@st.composite
def logs(draw: st.DrawFn) -> Log:
    counter = iter(range(10_000))
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=15))
    sizes[0] = (max(1, sizes[0][0]), sizes[0][1])  # no text without a token
    return Log(
        [
            (
                [next(counter) for _ in range(n)],
                "".join(chr(97 + next(counter) % 26) for _ in range(m)),
            )
            for n, m in sizes
        ]
    )


class Reader:
    """The output that a client would show, checked at every step against the log."""

    def __init__(self, log: Log) -> None:
        self.log, self.tokens, self.text, self.ends = log, list[int](), "", 0

    def show(self, events: list[StreamEvent]) -> None:
        for event in events:
            assert self.ends == 0, "nothing comes after the end"
            if isinstance(event, Delta):
                assert (event.offset, event.text_offset) == (len(self.tokens), len(self.text))
                self.tokens += event.tokens
                self.text += event.text
            elif isinstance(event, End):
                self.ends += 1
        assert self.tokens == self.log.tokens[: len(self.tokens)]
        assert self.text == self.log.text[: len(self.text)]


@given(logs(), st.data())
def test_whatever_is_lost_doubled_or_reordered_the_tokens_shown_are_those_of_the_log(
    log: Log, data: st.DataObject
) -> None:
    end = verdict(len(log.tokens))
    events: list[StreamEvent] = [*log.deltas(), End(verdict=end)]
    arriving = data.draw(st.lists(st.sampled_from(range(len(events))), max_size=2 * len(events)))
    assembler, reader = Assembler(), Reader(log)
    made = 0
    for number in arriving:
        made = max(made, min(number + 1, len(log.entries)))  # what was sent is in the log
        reader.show(assembler.take(events[number]))
        if data.draw(st.booleans()):
            over = made == len(log.entries) and data.draw(st.booleans())
            reader.show(assembler.fill(log.replay(assembler.ask(), made, end if over else None)))
    for _ in range(3):
        reader.show(assembler.fill(log.replay(assembler.ask(), len(log.entries), end)))
    assert (reader.tokens, reader.text, reader.ends) == (log.tokens, log.text, 1)
    assert assembler.ended
    assert not assembler.missing


@given(logs(), st.randoms())
def test_events_that_all_come_in_order_need_no_question_to_the_log(
    log: Log, rng: random.Random
) -> None:
    assembler, reader = Assembler(), Reader(log)
    for event in [*log.deltas(), End(verdict=verdict(len(log.tokens)))]:
        for _ in range(rng.choice((1, 1, 2))):
            reader.show(assembler.take(event))
            assert not assembler.missing
    assert (reader.tokens, reader.text, reader.ends) == (log.tokens, log.text, 1)


def test_a_status_of_a_past_attempt_is_not_shown() -> None:
    assembler = Assembler()
    new = Status(state="replaced", service_class=ServiceClass.STANDARD, attempt=2)
    old = Status(state="accepted", service_class=ServiceClass.STANDARD, attempt=1)
    assert assembler.take(new) == [new]
    assert assembler.take(old) == []


def test_a_request_that_made_nothing_ends_at_once() -> None:
    end = End(verdict=verdict(0, FinishReason.REFUSED))
    assert Assembler().take(end) == [end]


# ---------------------------------------------------------------- the client, on a simulated networ


@dataclass
class Server:
    """Admission and worker in one: streams a log of its own for every request, and tells the truth
    when asked.
    """

    bus: SimBus
    log: Log
    pause_s: float = 0.02
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    cancelled: Counter[str] = field(default_factory=Counter)
    deaf: int = 0  # requests that are not answered
    attaches: int = 0
    hang: bool = False
    refuse: bool = False
    storeless: int = 0  # attaches that are refused because the store does not answer
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        await self.bus.serve(
            "admission",
            [
                Endpoint("requests", subjects.REQUESTS, GenerateRequest, self.on_request, "q"),
                Endpoint("attach", subjects.ATTACHES, Attach, self.on_attach, "q"),
            ],
            {},
        )
        await self.bus.subscribe(subjects.CANCELS, Cancel, self.on_cancel)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_request(self, request: GenerateRequest, call: Call) -> None:
        if self.deaf:
            self.deaf -= 1
            return
        if self.refuse:
            self.spawn(call.reply(Refused(code="slow_down", message="no room")))
            return
        key = f"{request.tenant}.{request.request_id}"
        attached = key in self.asked
        if not attached:
            self.asked[key] = request
            self.subjects[key] = request.inbox or subjects.stream(
                subjects.request_key(request.tenant, request.request_id)
            )
            self.made[key] = 0
            self.spawn(self.generate(key))
        received = Received(
            request_id=request.request_id,
            stream_subject=self.subjects[key],
            arrived_unix_s=0.0,
            prompt_tokens=1,
            attached=attached,
        )
        self.spawn(call.reply(received))

    async def generate(self, key: str) -> None:
        status = Status(state="accepted", service_class=ServiceClass.STANDARD, attempt=1)
        await self.bus.publish(self.subjects[key], status)
        for delta in self.log.deltas():
            if self.hang:
                return
            self.made[key] += 1
            await self.bus.publish(self.subjects[key], delta)
            await asyncio.sleep(self.pause_s)
        await self.bus.publish(self.subjects[key], End(verdict=verdict(len(self.log.tokens))))

    def on_attach(self, attach: Attach, call: Call) -> None:
        self.attaches += 1
        key = f"{attach.tenant}.{attach.request_id}"
        if self.attaches <= self.storeless:
            message = "the store did not answer"
            self.spawn(call.reply(Refused(code="server_is_overloaded", message=message)))
            return
        if key not in self.asked:
            self.spawn(call.reply(Refused(code="not_found", message="no such request")))
            return
        made = self.made[key]
        ended = verdict(len(self.log.tokens)) if made == len(self.log.entries) else None
        self.spawn(call.reply(self.log.replay(attach.from_token, made, ended)))

    def on_cancel(self, cancel: Cancel, call: Call) -> None:
        key = call.subject.removeprefix("slo.v1.cancel.")
        self.cancelled[key] += 1
        if self.hang:
            self.spawn(
                self.bus.publish(
                    self.subjects[key], End(verdict=verdict(0, FinishReason.CANCELLED))
                )
            )


LOG = Log([([2 * i, 2 * i + 1], f"word{i} ") for i in range(40)])


async def read(handle: Handle, log: Log) -> Reader:
    reader = Reader(log)
    async for event in handle:
        reader.show([event])
    return reader


@pytest.mark.parametrize("seed", range(25))
def test_on_a_bad_network_every_request_gives_exactly_its_tokens(seed: int) -> None:
    async def main() -> None:
        faults = Faults(loss=0.08, duplicate=0.05, reorder=0.2, reorder_s=0.1)
        net = SimNet(random.Random(seed), faults)
        server = Server(net.connect("server"), LOG)
        await server.start()
        async with Client(net.connect("client"), VirtualClock(virtual_loop())) as client:
            handles = [
                await client.submit(
                    GenerateRequest(request_id=f"r{i}", prompt="x"), "chat", derived=i % 2 == 0
                )
                for i in range(4)
            ]
            for reader in await asyncio.gather(*(read(handle, LOG) for handle in handles)):
                assert (reader.tokens, reader.text, reader.ends) == (LOG.tokens, LOG.text, 1)
            assert len(server.asked) == 4
        for task in tuple(server.tasks):
            await task

    print(f"seed {seed}")
    run_virtual(main())


Body = Callable[[SimNet, Server, Client], Coroutine[Any, Any, None]]


def on_a_good_network(body: Body, patience: Patience | None = None) -> None:
    async def main() -> None:
        net = SimNet(random.Random(0))
        server = Server(net.connect("server"), LOG)
        await server.start()
        async with Client(
            net.connect("client"), VirtualClock(virtual_loop()), patience=patience
        ) as client:
            await body(net, server, client)

    run_virtual(main())


def test_on_a_good_network_nothing_is_asked_of_the_log() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        assert (await read(handle, LOG)).ends == 1
        assert handle.verdict == await handle.wait()
        assert server.attaches == 0

    on_a_good_network(body)


def test_a_second_client_with_the_same_id_sees_the_whole_answer_and_starts_nothing() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        first = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(0.3)
        async with Client(net.connect("other"), VirtualClock(virtual_loop())) as other:
            second = await other.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
            third = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
            assert second.received is not None
            assert second.received.attached
            for handle in (first, second, third):
                assert (await read(handle, LOG)).tokens == LOG.tokens
        assert len(server.asked) == 1

    on_a_good_network(body)


def test_several_requests_are_read_together_by_one_wake() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        wake = asyncio.Event()
        handles = [
            await client.submit(GenerateRequest(request_id=f"r{i}", prompt="x"), "chat")
            for i in range(3)
        ]
        for handle in handles:
            handle.wake = wake
        readers = [Reader(LOG) for _ in handles]
        while not all(reader.ends for reader in readers):
            took = [
                (reader, event)
                for reader, handle in zip(readers, handles, strict=True)
                if (event := handle.take()) is not None
            ]
            for reader, event in took:
                reader.show([event])
            if not took:
                wake.clear()
                await wake.wait()
        assert all(reader.tokens == LOG.tokens and reader.text == LOG.text for reader in readers)
        assert [handle.take() for handle in handles] == [None] * 3

    on_a_good_network(body)


def test_what_went_wrong_is_raised_after_all_that_came_before_it() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(0.3)
        handle.close()
        assert [type(handle.take()) for _ in range(3)] == [Status, Delta, Delta]
        with pytest.raises(BusTimeout):
            _ = [event async for event in handle]

    on_a_good_network(body)


def test_a_reader_that_sleeps_loses_nothing() -> None:
    long = Log([([i], "x") for i in range(3000)])

    async def body(net: SimNet, server: Server, client: Client) -> None:
        server.log, server.pause_s = long, 0.001
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(200)
        assert (await read(handle, long)).tokens == long.tokens

    on_a_good_network(body)


def test_a_cancel_ends_the_request() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        server.hang = True
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await handle.cancel()
        assert (await handle.wait()).finish_reason is FinishReason.CANCELLED

    on_a_good_network(body)


def test_a_cancel_that_is_lost_is_said_again() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        server.hang = True
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        net.faults = Faults(loss=1.0)
        await handle.cancel()
        await asyncio.sleep(0.5)
        assert not server.cancelled
        net.faults = Faults()
        assert (await handle.wait()).finish_reason is FinishReason.CANCELLED

    on_a_good_network(body)


def test_a_refusal_reaches_the_caller_in_its_own_words() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        server.refuse = True
        with pytest.raises(PeerError, match="no room") as refused:
            await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        assert refused.value.code == "slow_down"

    on_a_good_network(body)


async def refused_after_an_answer_was_lost(server: Server, client: Client) -> None:
    server.deaf, server.refuse = 1, True
    with pytest.raises(PeerError, match="no room"):
        await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
    server.refuse = False


def test_what_is_refused_after_an_answer_was_lost_is_withdrawn_wherever_it_may_run() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        await refused_after_an_answer_was_lost(server, client)
        await asyncio.sleep(30.0)
        assert server.cancelled == {"default.r": COPIES_FOR_S}

    on_a_good_network(body)


@pytest.mark.parametrize("after_s", [0.01, 0.5, 5.0, 30.0])
def test_a_refused_request_that_comes_back_under_its_id_runs_to_its_end(after_s: float) -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        await refused_after_an_answer_was_lost(server, client)
        await asyncio.sleep(after_s)
        before = server.cancelled.total()
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        assert (await read(handle, LOG)).tokens == LOG.tokens
        await asyncio.sleep(30.0)
        assert server.cancelled.total() == before

    on_a_good_network(body)


def test_with_nobody_serving_a_submit_gives_up_in_time() -> None:
    async def main() -> None:
        net, clock = SimNet(random.Random(0)), VirtualClock(virtual_loop())
        async with Client(net.connect("client"), clock, patience=Patience(submit_s=3.0)) as client:
            begin_unix_s = clock.unix_s()
            with pytest.raises(NoResponders):
                await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
            assert clock.unix_s() - begin_unix_s <= 3.0

    run_virtual(main())


def test_a_stream_nobody_answers_for_any_more_raises_in_time() -> None:
    patience = Patience(silence_s=1.0, silence_limit_s=4.0, give_up_s=10.0)

    async def body(net: SimNet, server: Server, client: Client) -> None:
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(0.1)
        net.faults = Faults(loss=1.0)
        begin_s = virtual_loop().time()
        with pytest.raises(BusTimeout):
            await read(handle, LOG)
        assert 10.0 <= virtual_loop().time() - begin_s <= 20.0
        net.faults = Faults()

    on_a_good_network(body, patience)


def test_an_admission_without_its_store_is_asked_again_and_not_believed() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        server.storeless = 10
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(0.1)
        net.faults = Faults(loss=1.0)
        await asyncio.sleep(2.0)  # its end is lost
        net.faults = Faults()
        reader = await read(handle, LOG)
        assert reader.tokens == LOG.tokens
        assert server.attaches > server.storeless

    on_a_good_network(body, Patience(silence_s=1.0, silence_limit_s=4.0))


def test_a_lost_end_is_asked_for_after_a_silence() -> None:
    async def body(net: SimNet, server: Server, client: Client) -> None:
        handle = await client.submit(GenerateRequest(request_id="r", prompt="x"), "chat")
        await asyncio.sleep(0.3)
        net.faults = Faults(loss=1.0)
        await asyncio.sleep(1.0)
        net.faults = Faults()
        begin_s = virtual_loop().time()
        assert (await read(handle, LOG)).tokens == LOG.tokens
        assert virtual_loop().time() - begin_s <= 6.0

    on_a_good_network(body)
