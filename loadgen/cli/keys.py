"""`slackline keys`: makes the keys of a fleet's NATS users, their permissions and TLS material."""

import argparse
from pathlib import Path

from loadgen.cli.options.common import check_id
from loadgen.cli.options.option import add_options
from shared.bus.users import Role, User
from shared.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the keys")
    add_options(
        parser,
        """
        --workers R1,R2,... =: the replicas of the workers
        --tenants A,B,... =: the tenants
        --hosts NAME,... =: names and addresses under which the NATS server is reached, besides
            this machine's
        --revoke: take the keys of these workers, tenants and services away instead
        --services NAME,... =: with --revoke: operator, gateway, admission, planner, relegation;
            the next `slackline keys` makes new keys for them
        """,
    )


def run(args: argparse.Namespace) -> int:
    from loadgen.fleet.certificates import days_left
    from loadgen.fleet.key_folder import HOSTS, SERVICES, Keys

    keys = Keys(args.folder)
    users = [User(Role.WORKER, name) for name in names("--workers", args.workers)]
    users += [User(Role.TENANT, name) for name in names("--tenants", args.tenants)]
    services = {str(user): user for user in SERVICES}
    for name in names("--services", args.services):
        if name not in services or not args.revoke:
            raise ConfigError(f"--services {name}: with --revoke, one of {', '.join(services)}")
        users.append(services[name])
    if args.revoke:
        if not users:
            raise ConfigError("--revoke needs --workers, --tenants or --services")
        keys.revoke(users)
        print(f"revoked: {', '.join(map(str, users))}")
    else:
        made = keys.add(users, [*HOSTS, *filter(None, args.hosts.split(","))])
        print(f"new keys: {', '.join(map(str, made)) or 'none'}")
        days = days_left(keys.server_certificate.read_bytes())
        print(f"the server's certificate is valid for {days} days")
    print(f'nats-server.conf has the line: include "{keys.server_conf}"')
    print("a server that runs reads it on SIGHUP (nats-server --signal reload)")
    return 0


def names(option: str, text: str) -> list[str]:
    """The ids in a list with commas. Raises ConfigError for an invalid one."""
    found = [name for name in text.split(",") if name]
    for name in found:
        check_id(f"{option} {name}", name)
    return found
