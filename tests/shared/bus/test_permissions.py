"""Tests of the table of NATS permissions: the server allows each user just what the table says."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from loadgen.fleet.key_folder import Keys
from loadgen.fleet.nats_server import NatsServer
from shared.bus.matching import matches
from shared.bus.nats import connect
from shared.bus.nats_client import OrderedClient, trusting
from shared.bus.permissions import (
    SERVES,
    TABLE,
    Row,
    may_answer,
    may_publish,
    publishes,
    subscribes,
)
from shared.bus.users import GATEWAY, OPERATOR, Role, User, owner_of, user_named
from shared.errors import ConfigError, PeerError

USERS = [User(role) for role in Role if role not in (Role.WORKER, Role.TENANT)]
USERS += [User(Role.WORKER, "r1"), User(Role.TENANT, "acme")]


@pytest.mark.parametrize(
    ("subject", "inbox", "allowed"),
    [
        ("slo.v1.requests.acme.chat", "_INBOX.acme.x.1", True),
        ("slo.v1.requests.acme.chat", "_INBOX.acme", False),
        ("slo.v1.requests.acme.chat", "_INBOX.acme.>", False),
        ("slo.v1.requests.acme.chat", "_INBOX.acme.x.*", False),
        ("slo.v1.requests.acme.chat", "_INBOX.acme..1", False),
        ("slo.v1.requests.acme.chat", "_INBOX.other.x.1", False),
        ("slo.v1.requests.acme.chat", "_ROLE.gateway.x.1", False),
        ("slo.v1.requests.acme.chat", "$KV.requests.s.other.1", False),
        ("slo.v1.attach.acme", "_INBOX.acme.x.1", True),
        ("slo.v1.attach.acme", "_INBOX.other.x.1", False),
        ("slo.v1.over.r1", "_ROLE.worker.r1.x.1", True),
        ("slo.v1.over.r1", "_ROLE.worker.r2.x.1", False),
        ("slo.v1.over.r1", "_ROLE.worker.r1", False),
        ("slo.v1.over.r1", "_INBOX.acme.x.1", False),
        ("slo.v1.replica.r1.offer", "_ROLE.admission.x.1", True),
        ("slo.v1.replica.r1.offer", "_ROLE.relegation.x.1", True),
        ("slo.v1.replica.r1.offer", "_ROLE.worker.r1.x.1", False),
        ("slo.v1.replica.r1.hold", "_ROLE.planner.x.1", True),
        ("slo.v1.replica.r1.hold", "_ROLE.planner.x.1.2.3.4", False),
        ("slo.v1.replica.r1.holdings", "_ROLE.worker.r1.x.1", True),
        ("slo.v1.replica.r1.holdings", "_ROLE.worker.r2.x.1", False),
        ("$SRV.PING.requests", "_ROLE.gateway.x.1", True),
        ("$SRV.PING.planner", "_ROLE.gateway.x.1", False),
        ("$SRV.PING.planner", "_ROLE.operator.x.1", True),
        ("$SRV.PING", "_ROLE.nobody.x.1", False),
        ("$SRV.PING", "_ROLE", False),
        ("$SRV.PING", "", False),
    ],
)
def test_an_answer_goes_to_who_may_ask(subject: str, inbox: str, allowed: bool) -> None:
    assert may_answer(subject, inbox) is allowed


def test_the_name_of_a_user_names_it() -> None:
    for user in USERS:
        assert user_named(str(user)) == user
        for prefix in user.inboxes:
            assert "*" in prefix or owner_of(f"{prefix}.x.1") == user


@pytest.mark.parametrize("text", ["", "root", "worker", "worker.", "worker.a.b", "planner.x", "*"])
def test_a_text_that_names_no_user_is_refused(text: str) -> None:
    with pytest.raises(PeerError):
        user_named(text)


def test_nothing_is_permitted_to_all_but_to_the_operator() -> None:
    for user in USERS:
        for subject in (*publishes(user), *subscribes(user)):
            assert (subject in (">", "*")) == (user.role is Role.OPERATOR)


# ---------------------------------------------------------------- at a real server


OWN = {"{tenant}": "acme", "{replica}": "r1", "{log}": "acks-r1", "*": "x", ">": "x.y"}
STRANGERS = [User(Role.WORKER, "r2"), User(Role.TENANT, "mallory")]
# What nobody but the operator may do.
FORBIDDEN = [
    "$JS.API.STREAM.CREATE.KV_requests",
    "$JS.API.STREAM.UPDATE.KV_requests",
    "$JS.API.STREAM.DELETE.KV_requests",
    "$JS.API.STREAM.PURGE.KV_leases",
    "$JS.API.STREAM.PURGE.acks-r3",
    "$JS.API.STREAM.MSG.DELETE.KV_requests",
    "$JS.API.STREAM.MSG.GET.KV_requests",
    "$JS.API.STREAM.MSG.GET.KV_bodies",
    "$JS.API.STREAM.NAMES",
    "$JS.API.CONSUMER.CREATE.KV_requests",
    "$JS.API.CONSUMER.MSG.NEXT.KV_requests.any",
    "$JS.API.INFO",
    "$JS.ACK.KV_requests.any",
    "$JS.FC.KV_requests",
    "$SYS.REQ.USER.INFO",
    "slo.v1.replica.r3.announce",
    "slo.v1.over.r3",
    "slo.v2.requests.acme.chat",
    "anything",
]
EAVESDROPPING = [
    ">",
    "*",
    "slo.v1.>",
    "slo.v1.stream.>",
    "_INBOX.>",
    "_ROLE.>",
    "_ROLE.*.>",
    "$KV.>",
    "$KV.requests.>",
    "$KV.bodies.>",
    "$O.>",
    "$JS.>",
    "$SRV.>",
    "slo.v1.acks.*",
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys"))
    keys.add([*USERS, *STRANGERS])
    return keys


@pytest.fixture(scope="module")
def server(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the permissions of the table."""
    server = NatsServer(include=keys.server_conf)
    yield server.start(tmp_path_factory.mktemp("nats"))
    server.stop()


class Probe:
    """A connection that notes what the server refuses."""

    def __init__(self, user: User, client: OrderedClient) -> None:
        self.user, self.client = user, client
        self.refused: list[str] = []

    async def note(self, error: Exception) -> None:
        self.refused.append(str(error))

    async def publishes(self, subject: str) -> bool:
        self.refused.clear()
        await self.client.publish(subject, b"")
        await self.client.flush()
        return not self.refused

    async def subscribes(self, subject: str) -> bool:
        self.refused.clear()
        subscription = await self.client.subscribe(subject, cb=_ignore)
        await self.client.flush()
        refused = bool(self.refused)
        await subscription.unsubscribe()
        return not refused


async def _ignore(msg: Msg) -> None: ...


@contextlib.asynccontextmanager
async def probes(url: str, keys: Keys) -> AsyncIterator[list[Probe]]:
    """A connection of each user."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for user in (*USERS, *STRANGERS):
            probe = Probe(user, OrderedClient())
            await probe.client.connect(
                url,
                error_cb=probe.note,
                tls=trusting(str(keys.tls_ca(user))),
                **probe.client.log_in(str(keys.creds(user))),
            )
            stack.push_async_callback(probe.client.close)
            found.append(probe)
        yield found


def examples(row: Row) -> list[str]:
    """A subject of the row, or one for each name of a service."""
    subject = row.subject
    for placeholder, name in OWN.items():
        subject = subject.replace(placeholder, name)
    served = {name for role in (*row.publish, *row.subscribe) for name in SERVES.get(role, ())}
    if "{service}" not in subject:
        return [subject]
    return [subject.replace("{service}", name) for name in sorted(served)]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.subject)
async def test_the_server_allows_each_user_what_the_row_says_and_refuses_the_rest(
    server: str, keys: Keys, row: Row
) -> None:
    async with probes(server, keys) as connected:
        for subject in examples(row):
            for probe in connected:
                allowed = any(_fits(p, subject) for p in publishes(probe.user))
                assert await probe.publishes(subject) == allowed, (probe.user, "publishes", subject)
                allowed = any(_fits(s, subject) for s in subscribes(probe.user))
                assert await probe.subscribes(subject) == allowed, (probe.user, "subscribes")
            mine = {probe.user for probe in connected if may_publish(probe.user, subject)}
            if "{service}" not in row.subject:
                assert {user.role for user in mine} >= set(row.publish)
            if "{tenant}" in row.subject:
                assert User(Role.TENANT, "mallory") not in mine
            if "{replica}" in row.subject or "{log}" in row.subject:
                assert User(Role.WORKER, "r2") not in mine


def _fits(pattern: str, subject: str) -> bool:
    return matches(pattern.split("."), subject.split("."))


async def test_the_server_refuses_everybody_but_the_operator_what_no_row_has(
    server: str, keys: Keys
) -> None:
    async with probes(server, keys) as connected:
        for probe in connected:
            operator = probe.user == OPERATOR
            for subject in FORBIDDEN:
                assert await probe.publishes(subject) == operator, (probe.user, subject)
            for subject in EAVESDROPPING:
                assert await probe.subscribes(subject) == operator, (probe.user, subject)
            for subject in ("slo.v1.stream.other.*", "slo.v1.stream.*.*", "_INBOX.other.>"):
                speaks_for_all = probe.user in (OPERATOR, GATEWAY)
                assert await probe.subscribes(subject) == speaks_for_all, (probe.user, subject)


async def test_without_a_key_or_with_a_revoked_one_nobody_comes_in(
    server: str, keys: Keys, tmp_path: Path
) -> None:
    other = Keys(tmp_path)
    other.add([])
    for creds in ("", str(other.creds(OPERATOR))):
        with pytest.raises(ConfigError, match="Authorization"):
            async with connect(
                server, "stranger", creds=creds, tls_ca=str(keys.tls_ca(OPERATOR)), connect_s=2.0
            ):
                pass


async def test_a_server_of_another_authority_is_not_trusted(
    server: str, keys: Keys, tmp_path: Path
) -> None:
    other = Keys(tmp_path)
    other.add([])
    creds, advice = str(keys.creds(OPERATOR)), "certificate.*SLACKLINE_TLS_CA.*SLACKLINE_CREDS"
    for tls_ca in (str(other.tls_ca(OPERATOR)), ""):
        with pytest.raises(ConfigError, match=advice):
            async with connect(server, "operator", creds=creds, tls_ca=tls_ca, connect_s=2.0):
                pass
    async with connect(server, "operator", creds=creds, tls_ca=str(keys.tls_ca(OPERATOR))) as bus:
        await bus.make_streams(["r1"])
        assert await bus.requests.get("s.acme.1") is None
