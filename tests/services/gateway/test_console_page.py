"""Tests of the console's page in a real browser, on a real bus: what a person sees and does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.bus.nats import NatsBus, connect
from shared.columns import pack
from shared.schemas import PoolDigest, PoolLane, Roster, RosterAnswer, RosterEntry
from shared.vocabulary import ReplicaId
from tests.chromium import Page, chromium, needs_chromium
from tests.services.gateway.site import Site, site
from tests.shared.console.heard import ack, announce, digest, ended, entry, held, plan

pytestmark = needs_chromium
ATTACK = "<img src=x onerror=window.broken=1><script>window.broken=1</script>"
R1, R2 = "r1", "r2"


class Acted:
    """A fleet without services: publishes the digests, plans and acks that a test asks for."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.seq: dict[str, int] = {}
        self.rosters: dict[str, list[RosterEntry]] = {}
        self.digests: dict[str, dict[str, Any]] = {}
        self.now = time.time

    def on_roster(self, replica: str) -> Any:
        def answer(_: Roster, call: Call) -> None:
            told = RosterAnswer(entries=self.rosters.get(replica, []))
            task = asyncio.ensure_future(call.reply(told))
            task.add_done_callback(lambda _: None)

        return answer

    async def digest(self) -> None:
        for name, facts in self.digests.items():
            replica = ReplicaId(name)
            await self.bus.publish(subjects.digest(replica), digest(name, **facts))
            await self.bus.publish(subjects.announce(replica), announce(name))

    async def keep_alive(self) -> None:
        while True:
            await self.digest()
            await asyncio.sleep(0.2)

    async def run(self, name: str, did: dict[int, tuple[int, int]], **facts: Any) -> None:
        """An iteration of a replica, planned and acked."""
        seq = self.seq[name] = self.seq.get(name, 0) + 1
        replica = ReplicaId(name)
        await self.bus.publish(subjects.plan(replica), plan(seq, 0.018, name))
        await self.bus.publish(subjects.acked(replica), ack(seq, self.now(), did, name, **facts))

    async def hold(self, name: str, slot: int, key: str, **facts: Any) -> None:
        usual = {"arrived_unix_s": self.now(), "next_due_unix_s": self.now() + 60}
        self.rosters.setdefault(name, []).append(entry(slot, key, **{**usual, **facts}))
        await self.run(name, {}, held=[held(slot, key)])


@asynccontextmanager
async def acted(nats_url: str, *replicas: str) -> AsyncIterator[tuple[Site, Acted]]:
    """A gateway, and a fleet of these replicas behind it."""
    async with connect(nats_url, "fleet") as bus, site(nats_url) as at:
        fleet = Acted(bus)
        services = []
        for name in replicas:
            fleet.digests[name] = {}
            subject = subjects.roster(ReplicaId(name))
            endpoint = Endpoint("roster", subject, Roster, fleet.on_roster(name), "seat")
            services.append(await bus.serve("seat", [endpoint], {}))
        alive = asyncio.create_task(fleet.keep_alive())
        try:
            yield at, fleet
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)
            for service in services:
                await service.stop()


@asynccontextmanager
async def looking(at: Site, path: str = "/console", **facts: Any) -> AsyncIterator[Page]:
    """The console in a browser. At the end it had no error, and asked no other site."""
    async with chromium() as browser:
        page = await browser.page(at.url + path, **facts)
        await page.until("document.querySelector('#state').dataset.state === 'live'")
        yield page
        assert page.errors == []
        own = urlsplit(at.url).netloc
        assert {urlsplit(url).netloc for url in page.requests if "data:" not in url} == {own}


def row(key: str) -> str:
    return f'#list tr[data-key="{key}"]'


async def chosen(page: Page) -> Any:
    return await page.evaluate(
        "[...document.querySelectorAll('#list tr[aria-selected=true]')].map(r => r.dataset.key)"
    )


async def test_it_shows_tiers_replicas_and_requests_as_they_are_heard(nats_url: str) -> None:
    async with acted(nats_url, R1, R2) as (at, fleet), looking(at) as page:
        await page.until("document.querySelectorAll('.replica').length >= 2")
        for n in range(20):
            await fleet.bus.publish(subjects.ENDED, ended(f"acme.{n}", met=n < 15))
        await page.until("document.querySelector('#tiers').innerText.includes('75.0 %')")
        assert "5 TTFT" in await page.text("#tiers")
        await fleet.hold(R1, 0, "acme.first", tier="chat")
        await fleet.run(R1, {0: (10, 1)})
        await fleet.run(R1, {0: (1, 1)})
        await page.until(f"document.querySelector('{row('acme.first')}')")
        await page.until(
            f"document.querySelector('{row('acme.first')}').innerText.includes('2 out')"
        )
        pool = PoolDigest(
            tokens_s=1.0,
            lanes=[PoolLane(tenant="acme", importance=1.0, weight=1.0, requests=7, tokens=70)],
        )
        await fleet.bus.publish(subjects.POOL, pool)
        await page.until("document.querySelector('#totals').innerText.includes('7 in the pool')")
        # the strip is drawn: it has colours besides that of its ground
        await page.until(
            "(() => { const c = document.querySelector('.replica canvas.strip');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return new Set(d.filter((_, i) => i % 4 === 0)).size > 3; })()"
        )


async def test_names_that_clients_chose_are_shown_and_never_run(nats_url: str) -> None:
    async with acted(nats_url, R1) as (at, fleet), looking(at) as page:
        fleet.digests[R1] = {"model": ATTACK, "pool": ATTACK, "planner": ATTACK}
        await fleet.bus.publish(subjects.ENDED, ended(f"{ATTACK}.ended", tier=ATTACK[:128]))
        await fleet.hold(R1, 0, f"{ATTACK}.held", tier=ATTACK[:128])
        await fleet.run(R1, {0: (10, 1)}, preempted=pack([0]))
        await page.until("document.querySelector('#tiers').innerText.includes('<img')")
        await page.until("document.querySelector('#model').innerText.includes('<img')")
        await page.until("document.querySelectorAll('#list tbody tr').length === 1")
        assert "<img" in await page.text("#list tbody")
        await page.click("#list tbody tr")
        await page.until("document.querySelector('#facts').innerText.includes('<img')")
        await fleet.run(R1, {}, ended=[(0, ATTACK)])
        await page.until("document.querySelector('#steps').innerText.includes('<img')")
        assert ATTACK in await page.text("#who")
        assert await page.evaluate("window.broken === undefined")
        assert await page.evaluate("document.querySelectorAll('img, main script').length") == 0


async def test_a_request_is_chosen_opened_and_closed_with_the_keyboard(nats_url: str) -> None:
    async with acted(nats_url, R1, R2) as (at, fleet), looking(at) as page:
        now = time.time()
        for n, name in enumerate((R1, R1, R2)):
            await fleet.hold(name, n, f"acme.{n}", next_due_unix_s=now + 1000 * (n + 1))
        await page.until("document.querySelectorAll('#list tbody tr').length === 3")
        assert await chosen(page) == []
        await page.press("ArrowDown")
        await page.press("ArrowDown")
        [second] = await chosen(page)
        await page.press("ArrowUp")
        [first] = await chosen(page)
        assert first != second
        await page.press("Enter")
        await page.until("document.querySelector('#life').open")
        assert await page.text("#who") == first
        await page.until("document.querySelector('#facts').innerText.includes('TTFT 1.0 s')")
        await page.press("Escape")
        await page.until("!document.querySelector('#life').open")
        assert await chosen(page) == [first]
        await page.press("Escape")
        assert await chosen(page) == []
        await page.press("ArrowRight")
        await page.press("ArrowRight")

        await page.until("document.querySelector('#which').innerText.includes('Requests of r2')")
        await page.until("document.querySelectorAll('#list tbody tr').length === 1")
        await page.press("Escape")
        await page.until("document.querySelectorAll('#list tbody tr').length === 3")
        await page.press("?")
        await page.until("document.querySelector('#help').open")
        await page.press("Escape")
        await page.until("!document.querySelector('#help').open")


async def test_on_a_phone_nothing_is_cut_off(nats_url: str) -> None:
    async with (
        acted(nats_url, R1, R2) as (at, fleet),
        looking(at, width=390, height=844, phone=True) as page,
    ):
        long = "a" * 64
        await fleet.hold(R1, 0, f"{long}.{long}", tier=long)
        await fleet.bus.publish(subjects.ENDED, ended(f"{long}.b", tier=long, met=False))
        await page.until("document.querySelectorAll('#list tbody tr').length === 1")
        await page.until("document.querySelectorAll('.tier').length >= 5")
        wide = "document.documentElement.scrollWidth"
        assert await page.evaluate(wide) <= 390
        await page.click("#list tbody tr")
        await page.until("document.querySelector('#life').open")
        assert await page.evaluate(wide) <= 390


async def test_a_prompt_is_tried_in_a_tier_and_its_tokens_are_shown_with_their_deadlines(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, chromium() as browser:
        page = await browser.page(at.url + "/console/try")
        await page.until("document.querySelectorAll('#tier option').length >= 4")
        await page.evaluate("$('#tier').value = 'interactive'; choose()")
        assert "first token 500 ms, then one every 30 ms (cumulative" in await page.text("#owed")
        await page.evaluate("$('#prompt').value = 'say something'; $('#most').value = 7")
        await page.click("#send")
        await page.until("document.querySelector('#now').innerText.includes('First token')")
        titles = await page.evaluate("[...$('#answer').children].map(token => token.title)")
        assert titles[-1].startswith("token 7 after ")
        assert titles[-1].endswith(", due after 680 ms")  # 500 ms and six times 30
        assert len(at.fleet.asked) == 1
        assert set(at.fleet.tiers.values()) == {"interactive"}
        await page.evaluate("$('#prompt').value = 'refuse saturated'")
        await page.click("#send")
        await page.until("document.querySelector('#now').className === 'bad'")
        assert await page.evaluate("!$('#send').disabled")
        # a request that is refused is an error of the network to the browser, and nothing else is
        assert all("status of " in error for error in page.errors)
