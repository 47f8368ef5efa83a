"""The users of the bus: roles of services and clients, and their inboxes. A tenant's inbox is
`_INBOX.<tenant>`, a service's `_ROLE.<role>` (`_ROLE.worker.<replica>`). NATS holds each user to
its prefix, and a service answers only users that may ask (shared/bus/permissions.py).
"""

from dataclasses import dataclass
from enum import StrEnum

from shared import subjects
from shared.errors import PeerError
from shared.subjects import check_id


class Role(StrEnum):
    OPERATOR = "operator"
    GATEWAY = "gateway"
    ADMISSION = "admission"
    PLANNER = "planner"
    RELEGATION = "relegation"
    WORKER = "worker"
    TENANT = "tenant"


NAMED = (Role.WORKER, Role.TENANT)  # roles with many users, each of which has a name


@dataclass(frozen=True, slots=True)
class User:
    """One user. `name` is the replica of a worker, the id of a tenant, and empty for the others."""

    role: Role
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role}.{self.name}" if self.name else str(self.role)

    @property
    def tenants(self) -> str:
        """The tenant that the user speaks for; `*` for all of them, empty for none."""
        if self.role is Role.TENANT:
            return self.name
        return subjects.EVERY if self.role in (Role.OPERATOR, Role.GATEWAY) else ""

    @property
    def inboxes(self) -> list[str]:
        """The prefixes of the user's inboxes."""
        found = [subjects.inbox(self.tenants)] if self.tenants else []
        return found if self.role is Role.TENANT else [*found, f"_ROLE.{self}"]

    def inbox_of(self, subject: str) -> str:
        """The prefix of the inbox at which the user is answered when it asks on this subject."""
        tenant = subjects.tenant_in(subject)
        return self.inboxes[-1] if tenant is None else subjects.inbox(tenant)


OPERATOR = User(Role.OPERATOR)
GATEWAY = User(Role.GATEWAY)


def user_named(text: str) -> User:
    """The user of a text that `str(user)` made. Raises PeerError for any other text."""
    role, dot, name = text.partition(".")
    if role not in set(Role) or (Role(role) in NAMED) != bool(dot):
        raise PeerError(f"{text!r} is no user", code="invalid_id")
    return User(Role(role), check_id(name, role) if dot else "")


def owner_of(inbox: str) -> User | None:
    """The user whose inbox it is; None for a subject that is no inbox."""
    root, *tokens = inbox.split(".")
    if not all(map(subjects.ID_PATTERN.fullmatch, tokens)):
        return None
    if root == "_INBOX":
        owner, rest = User(Role.TENANT, tokens[0] if tokens else ""), tokens[1:]
    elif root == "_ROLE" and tokens and tokens[0] in set(Role):
        named = Role(tokens[0]) in NAMED
        owner = User(Role(tokens[0]), tokens[1] if named and len(tokens) > 1 else "")
        rest = tokens[2:] if named else tokens[1:]
    else:
        return None
    return owner if 0 < len(rest) <= subjects.INBOX_TOKENS else None
