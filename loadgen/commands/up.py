"""`slackline up`: a fleet on this machine until Ctrl-C."""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from loadgen.cli import DEFAULT_URL
from loadgen.commands.trial_arguments import add_draft_arguments, check_draft
from loadgen.fleet.fleet import Fleet, FleetSpec, is_free, torch_replicas
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.tiers import load_tiers

# where clients look unless told otherwise
NATS_PORT, HTTP_PORT = int(DEFAULT_URL.rpartition(":")[2]), 8080


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="workers, each with an engine (default: sim 2, torch one per two cores, vllm 1)",
    )
    parser.add_argument(
        "--policy",
        default="",
        metavar="NAME",
        help=f"{', '.join(registry.names())} (default: qoserve)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the policy; may be repeated",
    )
    parser.add_argument(
        "--engine",
        default="torch",
        choices=("torch", "vllm", "sim"),
        help="a real model, the same in vLLM, or the timing of a GPU and nonsense (default: torch)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FOLDER",
        help=f"not sim: a shipped model, or a folder in Hugging Face format (default: {models.DEFAULT})",
    )
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vLLM's engine, its value in JSON; may be repeated",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="vllm: a LoRA adapter; may be repeated",
    )
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME",
        help="the engine's iteration-time model: a shipped one, or a file",
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=1.0,
        metavar="X",
        help="sim: seconds per second of the profile (default: 1)",
    )
    add_draft_arguments(parser)
    parser.add_argument("--tiers", default="", metavar="NAME|FILE", help="the SLOs that have names")
    parser.add_argument("--planners", type=int, default=1, metavar="N")
    parser.add_argument("--admissions", type=int, default=1, metavar="N")
    parser.add_argument(
        "--port",
        type=int,
        metavar="P",
        help=f"of NATS; 0: any (default: {NATS_PORT} if free, else any)",
    )
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="P",
        help=f"of the gateway; 0: any (default: {HTTP_PORT} if free, else any)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="keep requests and logs there (default: nothing is kept)",
    )
    parser.add_argument("--no-gateway", action="store_true", help="NATS only")


def run(args: argparse.Namespace) -> int:
    # Ours are words for a person; of the bus, only what went wrong is of interest.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return asyncio.run(_up(make_spec(args)))


def make_spec(args: argparse.Namespace) -> FleetSpec:
    """Raises ConfigError for what can be seen before anything is started."""
    settings, adapters = pairs_of("--set", args.set), pairs_of("--adapter", args.adapter)
    vllm = {name: _plain(text) for name, text in pairs_of("--vllm", args.vllm).items()}
    if args.policy or settings:
        registry.make(args.policy or "qoserve", settings)
    if args.tiers:
        load_tiers(args.tiers)
    if args.pace <= 0:
        raise ConfigError("--pace must be above 0")
    check_draft(args)
    if args.model and args.engine == "sim":
        raise ConfigError("--model is of a real engine: add --engine torch, or vllm")
    if args.engine != "sim":
        models.folder(args.model or models.DEFAULT)
    if (vllm or adapters) and args.engine != "vllm":
        raise ConfigError("--vllm and --adapter are of the vllm engine: add --engine vllm")
    if args.profile:
        profiles.read(args.profile)
    return FleetSpec(
        replicas=args.replicas
        if args.replicas is not None
        else {"sim": 2, "vllm": 1}.get(args.engine) or torch_replicas(),
        policy=args.policy,
        settings=settings,
        engine=args.engine,
        model=args.model or models.DEFAULT,
        profile=args.profile,
        pace=args.pace,
        draft=args.draft,
        acceptance=args.acceptance,
        vllm=vllm,
        adapters=adapters,
        tiers=args.tiers,
        planners=args.planners,
        admissions=args.admissions,
        gateway=not args.no_gateway,
        port=_port(args.port, NATS_PORT),
        http_port=_port(args.http_port, HTTP_PORT),
        store=args.store,
    )


def pairs_of(option: str, given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, so often. Raises ConfigError."""
    found = dict[str, str]()
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{option} {pair}: write NAME=VALUE")
        found[name] = value
    return found


def _plain(text: str) -> Any:
    """JSON, or else the text as it is: --vllm quantization=fp8 wants no quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _port(wanted: int | None, usual: int) -> int:
    if wanted is None:
        return usual if is_free(usual) else 0
    if not 0 <= wanted <= 65535 or (wanted and not is_free(wanted)):
        raise ConfigError(f"port {wanted} is not free; 0 takes any that is")
    return wanted


async def _up(spec: FleetSpec) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    fleet = Fleet(spec, _say)
    starting = asyncio.ensure_future(fleet.__aenter__())

    def on_signal() -> None:
        if stop.is_set():
            fleet.abandon()
        stop.set()
        starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    by = " in vLLM, which may take minutes" if spec.engine == "vllm" else ""
    what = (
        "that have the timing of a GPU and speak nonsense"
        if spec.engine == "sim"
        else f"of {spec.model}{by}"
    )
    print(f"starting {spec.replicas} replica{'s' if spec.replicas > 1 else ''} {what}", flush=True)
    try:
        await starting
    except asyncio.CancelledError:
        print("stopped before it was ready", flush=True)
        return 0
    try:
        print(_welcome(fleet), flush=True)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopping, fleet.failed), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            print(
                "stopping: running requests are put back, NATS last (Ctrl-C again: at once)",
                flush=True,
            )
        else:
            stopping.cancel()
            fleet.failed.result()
    finally:
        await fleet.__aexit__(None, None, None)
    print("stopped", flush=True)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _welcome(fleet: Fleet) -> str:
    at = "" if fleet.url == DEFAULT_URL else f" --url {fleet.url}"
    tier = load_tiers(fleet.spec.tiers or "default")
    lines = [f"ready   NATS  {fleet.url}"]
    if fleet.http_url:
        lines.append(f"        HTTP  {fleet.http_url}")
    lines.append(f"        logs  {fleet.folder / 'logs'}")
    if any(fleet.pools.values()):
        lines.append(
            "        pools "
            + ", ".join(f"{replica} {pool}" for replica, pool in fleet.pools.items())
        )
    lines += [
        "try     " + f'{sys.argv[0]} submit "What is a river?" --tier {next(iter(tier.tiers))}{at}'
    ]
    lines.append(f"        {sys.argv[0]} chat{at}")
    if fleet.http_url:
        lines.append(
            f"        curl -N {fleet.http_url}/v1/chat/completions -H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "user", "content": "What is a river?"}], "stream": true}\''
        )
    lines.append("stop    Ctrl-C")
    return "\n".join(lines)
