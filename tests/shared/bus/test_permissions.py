"""The table of permissions, and the answers that it allows."""

import pytest

from shared.bus.permissions import may_answer, publishes, subscribes
from shared.bus.users import Role, User, owner_of, user_named
from shared.errors import PeerError

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
