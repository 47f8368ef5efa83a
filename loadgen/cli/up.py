"""`slackline up`: runs a fleet on this machine until Ctrl-C."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from loadgen.access import DEFAULT_URL
from loadgen.cli.options.common import parse_pairs, parse_roles
from loadgen.cli.options.option import add_options
from loadgen.cli.options.trial import add_draft_arguments, add_policy_arguments, draft_of
from loadgen.fleet.fleet import METRICS_PORT, Fleet, FleetSpec
from loadgen.fleet.gpus import torch_replicas
from loadgen.fleet.metrics_page import listen, metrics_page
from loadgen.fleet.ports import HOST, is_free
from loadgen.load.connection import quiet_logs
from shared.bus.users import Role, User
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.process import configuration
from shared.process.configuration import PREFIX
from shared.rules.rules import TenantSource, TierSource, read_rules, read_tenants
from shared.rules.tenants import OTHERS
from shared.rules.tiers import load_tiers
from shared.subjects import DEFAULT_TENANT

KEY_HEADER = '-H "Authorization: Bearer KEY" '
AWAITED_S = 2.0  # between two lines about what a start waits for
# the ports that clients use by default
NATS_PORT, HTTP_PORT = int(DEFAULT_URL.rpartition(":")[2]), 8080


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_policy_arguments(parser, default="")
    add_draft_arguments(parser)
    add_options(
        parser,
        f"""
        --replicas N|N..M: number of workers, each with an engine; with several models, of each
            (default: 2 with sim, 1 with vllm; with torch one per GPU, or per two cores without).
            N..M: from N to M, as many as the SLOs need
        --roles ROLE,... =: of the replicas in turn, the last one of the rest: both, prefill,
            decode or auto, as prefill,both; KV moves between them then
        --warm-up S (float): N..M: seconds that a replica takes to start (default: 120, or what
            the configuration says)
        --engine torch|vllm|sim = torch: torch and vllm run a real model; sim has the timing of a
            GPU and answers nonsense
        --model [NAME=]FOLDER (repeated): torch, vllm: a shipped model, or a folder in Hugging Face
            format (default: {models.DEFAULT}); sim: NAME=PROFILE. May be repeated, for several
            models in one fleet; NAME is what clients call it
        --vllm NAME=VALUE (repeated): vllm: an argument of its engine, with the value in JSON; may
            be repeated
        --adapter NAME=FOLDER (repeated): vllm: a LoRA adapter; may be repeated
        --draft-model NAME|FOLDER =: torch: the draft model beside it, a shipped one or a folder;
            none: no drafts (default: {models.DRAFTS[models.DEFAULT]} beside {models.DEFAULT}, else
            none)
        --profile NAME =: iteration-time model of the engine: a shipped profile or a .json file
            (default: sim has one built in, the others measure theirs)
        --pace X = 1.0: sim: seconds of wall clock per second of the profile
        --tiers NAME|FILE =: tiers and their SLOs: a built-in set, or a file: a configuration, or a
            set in TOML or JSON
        --config FILE: configuration of all services, in TOML; `slackline config check FILE`
            explains it. Other options here win over it
        --planners N = 1: number of planners
        --admissions N = 1: number of admission services
        --port P (int): port of NATS; 0: any free port (default: {NATS_PORT} if free, else any)
        --http-port P (int): port of the gateway; 0: any free port (default: {HTTP_PORT} if free,
            else any)
        --store DIR: keep the data of NATS (requests, logs of acks) in DIR (default: a temporary
            folder)
        --metrics-port P (int): port of the page with the metrics of all processes (default:
            {METRICS_PORT}, else any free one)
        --no-gateway: start no gateway: NATS only
        """,
    )


def run(args: argparse.Namespace) -> int:
    quiet_logs()
    with listen(HOST, _metrics_port(args.metrics_port)) as listener:
        return asyncio.run(_up(make_spec(args), listener))


def _metrics_port(requested: int | None) -> int:
    """The port to ask for; 0: any free one. Raises ConfigError for an invalid number."""
    text = os.environ.get(METRICS_PORT, "0") if requested is None else str(requested)
    if not text.isdecimal() or int(text) > 65535:
        option = METRICS_PORT if requested is None else "--metrics-port"
        raise ConfigError(f"{option} {text}: a port is 0 to 65535, and 0 takes any free one")
    return int(text)


def make_spec(args: argparse.Namespace) -> FleetSpec:
    """The fleet of these arguments. Raises ConfigError for errors that show before the start."""
    settings, adapters = parse_pairs("--set", args.set), parse_pairs("--adapter", args.adapter)
    vllm = {name: _json_or_text(text) for name, text in parse_pairs("--vllm", args.vllm).items()}
    if args.policy or settings:
        registry.make(args.policy or registry.DEFAULT, settings)
    if args.tiers:
        load_tiers(args.tiers)
    if args.pace <= 0:
        raise ConfigError("--pace must be above 0")
    served = served_models(args.model, args.engine)
    if args.engine != "sim":
        for folder in served.values():
            _check_model("--model", models.folder(folder), ("tokenizer.json",))
    if len(served) > 1 and (args.draft_model or adapters):
        raise ConfigError("--draft-model and --adapter are for a fleet with one model")
    model = next(iter(served.values()), models.DEFAULT)
    if args.draft_model and args.engine != "torch":
        raise ConfigError(
            "--draft-model needs the torch engine; vllm: --vllm speculative_config=..."
        )
    draft = models.draft_folder(args.draft_model, model)
    if draft is not None:
        _check_model("--draft-model", draft)
    if (vllm or adapters) and args.engine != "vllm":
        raise ConfigError("--vllm and --adapter need the vllm engine: add --engine vllm")
    if args.profile:
        profiles.read(args.profile)
    fewest, most = replicas_of(args.replicas)
    environment = configured(args.config)
    if args.warm_up is not None:
        if args.warm_up < 0 or not most:
            raise ConfigError("--warm-up needs --replicas N..M, and is not below 0")
        environment["SLACKLINE_RELEGATION_WARM_UP_S"] = str(args.warm_up)
    try:
        tenants = _tenants(environment)
    except ConfigError as error:
        if args.config is None:
            raise
        hint = f"`slackline config check {args.config}` tells all that is wrong"
        raise ConfigError(f"{error}; {hint}") from error
    spec = FleetSpec(
        environment=environment,
        tenants=tenants,
        noted=True,
        replicas=fewest
        if fewest is not None
        else {"sim": 2, "vllm": 1}.get(args.engine)
        or max(torch_replicas() // max(len(served), 1), 1),
        most=most,
        roles=parse_roles(args.roles),
        policy=args.policy,
        settings=settings,
        engine=args.engine,
        model=model,
        models=served if any("=" in each for each in args.model) or len(served) > 1 else {},
        draft_model=args.draft_model,
        profile=args.profile,
        pace=args.pace,
        draft=draft_of(args, None),
        acceptance=args.acceptance,
        vllm=vllm,
        adapters=adapters,
        tiers=args.tiers,
        planners=args.planners,
        admissions=args.admissions,
        gateway=not args.no_gateway,
        metrics=True,
        port=_port("--port", args.port, NATS_PORT),
        http_port=_port("--http-port", args.http_port, HTTP_PORT),
        store=args.store,
    )
    spec.check()
    return spec


def served_models(written: Sequence[str], engine: str) -> dict[str, str]:
    """The models of --model: by name the folder, or for sim the profile. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in written:
        name, _, where = text.rpartition("=")
        if engine == "sim":
            if not name:
                raise ConfigError(
                    f"--model {text}: for sim write NAME=PROFILE; a model needs a "
                    "real engine: --engine torch, or vllm"
                )
            profiles.read(where)
        else:
            name = name or models.folder(where).resolve().name
        if name in found:
            raise ConfigError(f"--model {text}: there are two models {name}")
        found[name] = where
    return found


def replicas_of(text: str | None) -> tuple[int | None, int]:
    """The fewest and the most replicas: `4` is always four, the most is 0 then; `1..8` is one to
    eight. Raises ConfigError.
    """
    if text is None:
        return None, 0
    fewest, dots, most = text.partition("..")
    if not fewest.isdecimal() or (dots and not most.isdecimal()):
        raise ConfigError(f"--replicas {text}: write a number, or the fewest and the most as 1..8")
    return int(fewest), int(most) if dots else 0


def _check_model(option: str, folder: Path, more: Sequence[str] = ()) -> None:
    """Raises ConfigError for a folder without the files that every model has, and `more`."""
    for name in ("config.json", *more):
        if not (folder / name).is_file():
            raise ConfigError(f"{option} {folder}: there is no {name} in it, so it is no model")


class Rules(Struct, frozen=True):
    """The rules, as admission and gateway read them."""

    tiers: TierSource = ""
    default_tier: str = ""
    tenants: TenantSource = ""


def configured(path: Path | None) -> dict[str, str]:
    """The environment that names a configuration file. Raises ConfigError if there is none."""
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigError(f"--config {path}: there is no such file")
    return {f"{PREFIX}CONFIG": str(path.resolve())}


def _rules(environment: Mapping[str, str]) -> Rules:
    return configuration.load(Rules, "fleet", {**os.environ, **environment})


def _tenants(environment: Mapping[str, str]) -> list[str]:
    """The tenants that get a key at NATS. Raises ConfigError."""
    named = read_tenants(_rules(environment).tenants).tenants
    return list(dict.fromkeys((DEFAULT_TENANT, *(name for name in named if name != OTHERS))))


def _json_or_text(text: str) -> Any:
    """The value of JSON, or else the text itself: --vllm quantization=fp8 needs no quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _port(option: str, requested: int | None, default: int) -> int:
    """The port to ask for; 0: any free one. ConfigError: the number is invalid, or not free."""
    if requested is None:
        return default if is_free(default) else 0
    if not 0 <= requested <= 65535:
        raise ConfigError(f"{option} {requested}: a port is 0 to 65535, and 0 takes any free one")
    if requested and not is_free(requested):
        raise ConfigError(f"{option} {requested}: the port is not free; 0 takes any free port")
    return requested


async def _up(spec: FleetSpec, listener: socket.socket) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    fleet = Fleet(spec, _say)
    starting = asyncio.ensure_future(fleet.__aenter__())
    telling = asyncio.ensure_future(_tell_awaited(fleet))
    starting.add_done_callback(lambda _: telling.cancel())
    ending: asyncio.Future[None] | None = None
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        telling.cancel()
        if signals == 1 and not starting.done():
            _say("stopping before the fleet is ready (Ctrl-C again stops at once)")
        if signals <= 2:  # a third would only break off the cleaning up
            starting.cancel()
            if ending is not None:
                ending.cancel()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)  # the terminal was closed
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    engine = " and ".join(spec.models) if spec.models else spec.model
    if spec.engine == "sim":
        names = f"{engine}, " if spec.models else ""
        engine = f"{names}simulated, with the timing of a GPU and nonsense for answers"
    if spec.engine == "vllm":
        engine += " in vLLM, which may take minutes"
    print(
        f"starting {spec.workers} replica{'s' if spec.workers > 1 else ''}"
        f"{f', up to {spec.most} as needed' if spec.most else ''}: {engine}",
        flush=True,
    )
    try:
        await starting
    except asyncio.CancelledError:
        print("stopped before the fleet was ready", flush=True)
        return 0
    try:
        async with metrics_page(listener, fleet.metrics) as metrics:
            print(await _welcome(fleet, metrics), flush=True)
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait((stopping, fleet.failed), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            _say(
                "stopping: workers hand their requests back, then NATS stops "
                "(Ctrl-C again stops at once)"
            )
        else:
            stopping.cancel()
            fleet.failed.result()
    finally:
        ending = asyncio.ensure_future(fleet.__aexit__(None, None, None))
        await asyncio.wait((ending,))
    if ending.cancelled():
        _say("stopped at once: every process was killed")
        return 0
    ending.result()
    _say("stopped")
    return 0


async def _tell_awaited(fleet: Fleet) -> None:
    """Say which processes a start waits for, whenever they change and take a while."""
    told: list[str] = []
    while True:
        await asyncio.sleep(AWAITED_S)
        if fleet.awaited != told:
            told = fleet.awaited
            _say(f"waiting for {', '.join(told)}")


def _say(line: str) -> None:
    """Tell the user. A fleet does not end because its output can be written nowhere."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


async def _welcome(fleet: Fleet, metrics: str) -> str:
    url = "" if fleet.url == DEFAULT_URL else f" --url {fleet.url}"
    chosen = _rules(fleet.spec.environment)
    rules = read_rules(fleet.spec.tiers or chosen.tiers, chosen.default_tier, chosen.tenants)
    tier = next(iter(rules.tiers.tiers))
    lines = [f"ready   NATS  {fleet.url}"]
    with_key = False
    if fleet.http_url:
        with_key = await _status(f"{fleet.http_url}/v1/models") == HTTPStatus.UNAUTHORIZED
        off = await _status(f"{fleet.http_url}/console") == HTTPStatus.NOT_FOUND
        lines.append(f"        HTTP  {fleet.http_url}")
        lines.append(
            "        console off: it needs console_keys of its own"
            if off
            else f"        console {fleet.http_url}/console"
        )
    lines.append(f"        logs  {fleet.folder / 'logs'}")
    lines.append(f"        metrics {metrics}")
    if any(fleet.pools.values()):
        lines.append(
            "        pools "
            + ", ".join(f"{replica} {pool}" for replica, pool in fleet.pools.items())
        )
    tenant = fleet.access(User(Role.TENANT, fleet.spec.tenants[0]))
    lines.append(f"keys    SLACKLINE_CREDS={tenant.creds} SLACKLINE_TLS_CA={tenant.tls_ca}")
    lines.append("        (for other users and programs; your `slackline` commands need none)")
    me, named, in_body = sys.argv[0], "", ""
    if len(fleet.spec.models) > 1:
        model = next(iter(fleet.spec.models))
        named, in_body = f" --model {model}", f'"model": "{model}", '
    lines.append(
        f'try     {me} submit "What is a river?" --tier {tier} --max-tokens 64{named}{url}'
    )
    lines.append(f"        {me} chat{named}{url}")
    if fleet.http_url:
        lines.append(
            f"        curl -N {fleet.http_url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' {KEY_HEADER if with_key else ''}"
            f"-d '{{{in_body}"
            '"messages": [{"role": "user", "content": "What is a river?"}], '
            '"max_tokens": 64, "stream": true}\''
        )
    lines.append("stop    Ctrl-C")
    return "\n".join(lines)


async def _status(url: str) -> int:
    """The status that our own gateway answers, whatever its certificate says; 0: no answer."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        try:
            return (await http.get(url)).status_code
        except httpx.HTTPError:
            return 0
