"""Serves `/console`: the fleet at work, for its operators, and a box to try a prompt in. While the
page asks for pictures the gateway listens to the fleet.

The console shows every tenant's requests, never their text. With `console_keys` it wants one of
those keys. Without, and where callers need no keys either, it is open to a browser that names a
loopback address, which a page of another site cannot bring about. Elsewhere the console is off.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from services.gateway.config import is_loopback
from services.gateway.http.envelope import Problem, Rejected
from services.gateway.http.json_bytes import encode
from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.console.collector import Collector
from shared.console.listening import listening
from shared.console.picture import WhyPicture, why_picture
from shared.errors import BusError, PeerError
from shared.rules.http_keys import HttpKeys
from shared.rules.rules import Rules
from shared.schemas import Explain, Explanation
from shared.vocabulary import RequestKey

UNWATCHED_S = 10.0  # after the last question for a picture the gateway listens no more
WHY_S = 3.0  # the longest wait for a reason
PAGES = {"/console": "console.html", "/console/try": "try.html"}
REALM = 'Basic realm="slackline console", charset="UTF-8"'
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
PROXIED = ("forwarded", "x-forwarded-for", "via")

OFF = Problem(
    status=404,
    message="the console is off: it shows all tenants, so beside keys it wants keys of its own "
    "(SLACKLINE_GATEWAY_CONSOLE_KEYS=FILE, made by `slackline key NAME FILE`)",
    code="not_found",
)
WRONG_HOST = Problem(
    status=403,
    message="without keys of its own the console is open at a loopback address alone, such as "
    "http://127.0.0.1, and not through a proxy",
    code="permission_denied",
)
NO_KEY = Problem(
    status=401,
    message="the console wants a key of console_keys, as the password of any user, or in the "
    "header Authorization: Bearer KEY",
    code="invalid_api_key",
    challenge=REALM,
)
NO_LIFE = Problem(
    status=404,
    message="no such request is held by a replica, or ended within the last minutes",
    code="not_found",
)


class Console:
    """The routes of the console, and the listening behind them."""

    def __init__(
        self, rules: Rules, bus: Bus, clock: Clock, tasks: asyncio.TaskGroup, keys: HttpKeys | None
    ) -> None:
        """`keys`: the keys of `console_keys`; None where there are none."""
        self._rules, self._bus, self._clock, self._tasks = rules, bus, clock, tasks
        self._keys = keys
        texts = {
            path: Path(__file__).with_name(name).read_text(encoding="utf-8")
            for path, name in PAGES.items()
        }
        self._pages = {path: (text.encode(), _policy(text)) for path, text in texts.items()}
        self._asked_unix_s = 0.0
        self._listening: asyncio.Task[None] | None = None
        self._collector: asyncio.Future[Collector] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/", self.front, methods=["GET"]),
            *(Route(path, self.page, methods=["GET"]) for path in PAGES),
            Route("/console/picture", self.picture, methods=["GET"]),
            Route("/console/request", self.life, methods=["GET"]),
            Route("/console/why", self.why, methods=["GET"]),
        ]

    async def front(self, _: Request) -> Response:
        """Lead from `/` to the console; where it is off, to what there is to call."""
        return RedirectResponse("/openapi.json" if self._off else "/console")

    async def page(self, request: Request) -> Response:
        self._permit(request)
        page, policy = self._pages[request.url.path]
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def picture(self, request: Request) -> Response:
        """The fleet now; `since` leaves out the iterations up to that number."""
        self._permit(request)
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdecimal() or len(since) > 15:
            raise Rejected(
                Problem(status=400, message="since must be a number", code="invalid_value")
            )
        collector = await self._watched()
        return _json(collector.picture(self._clock.unix_s(), int(since)))

    async def life(self, request: Request) -> Response:
        """The life of one request, as far as it was heard."""
        self._permit(request)
        collector = await self._watched()
        found = collector.life(
            RequestKey(request.query_params.get("key", "")), self._clock.unix_s()
        )
        if found is None:
            raise Rejected(NO_LIFE)
        return _json(found)

    async def why(self, request: Request) -> Response:
        """Where the time of a request went, as `slackline explain` has it; or a refusal."""
        self._permit(request)
        tenant, _, request_id = request.query_params.get("key", "").partition(".")
        try:
            subject = subjects.explain(subjects.check_id(tenant, "tenant"))
            question = Explain(request_id=subjects.check_id(request_id, "request_id"))
            found = await self._bus.request(subject, question, Explanation, timeout_s=WHY_S)
        except (PeerError, BusError) as error:
            return _json(WhyPicture(answer=str(error), until_late=False, shares=[]))
        return _json(why_picture(found))

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    # ------------------------------------------------------------ listening

    async def _watched(self) -> Collector:
        """The collector, which listens from now on. Raises BusError."""
        self._asked_unix_s = self._clock.unix_s()
        if self._collector is None:
            self._collector = asyncio.get_running_loop().create_future()
            self._listening = self._tasks.create_task(
                self._listen(self._collector), name="gateway.console"
            )
        return await asyncio.shield(self._collector)

    async def _listen(self, begun: asyncio.Future[Collector]) -> None:
        """Listen until nobody has looked for UNWATCHED_S."""
        try:
            async with listening(self._bus, self._clock, self._rules.tiers) as collector:
                begun.set_result(collector)
                while (left_s := self._asked_unix_s + UNWATCHED_S - self._clock.unix_s()) > 0:
                    await asyncio.sleep(left_s)
                self._collector = None  # who looks now begins anew
        except BusError as error:
            if not begun.done():
                begun.set_exception(error)
            self._collector = None
        finally:
            begun.cancel()

    # ------------------------------------------------------------ access

    @property
    def _off(self) -> bool:
        return self._keys is None and self._rules.keys is not None

    def _permit(self, request: Request) -> None:
        """Raises Rejected unless this client may see the fleet."""
        if self._keys is not None:
            key = _key_of(request.headers)
            if key is None or self._keys.tenant_of(key) is None:
                raise Rejected(NO_KEY)
        elif self._off:
            raise Rejected(OFF)
        elif not is_loopback(_host_of(request.headers)) or any(
            name in request.headers for name in PROXIED
        ):
            raise Rejected(WRONG_HOST)


def _host_of(headers: Mapping[str, str]) -> str:
    """The host that the client named, without its port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _key_of(headers: Mapping[str, str]) -> str | None:
    """The key of the header Authorization: the password of a browser's user, or a bearer's."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return None
    with suppress(binascii.Error, UnicodeDecodeError):
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return None


def _policy(page: str) -> str:
    """A content security policy: the page runs its own script and style, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in INLINE.findall(page):
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _json(found: msgspec.Struct) -> Response:
    return Response(
        encode(found),
        media_type="application/json",
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )
