"""`slackline submit`: sends one prompt, streams the answer and prints one line about it."""

import argparse
import asyncio
import sys
import time
from typing import Any

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.main import INTERRUPTED
from loadgen.cli.options.common import awaiting_admission, check_id
from loadgen.cli.options.option import add_options
from loadgen.cli.options.sampling import add_sampling_arguments, sampling_of
from loadgen.load.stream import printable, stream
from loadgen.tables import print_json
from shared.bus.users import Role, User
from shared.client.client import Client, Patience, new_request_id
from shared.clock import Clock
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import ConfigError
from shared.rules.tiers import AUTO
from shared.schemas import GenerateRequest
from shared.subjects import DEFAULT_TENANT

PATIENCE = Patience(submit_s=3.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt, or - to read it from standard input")
    add_options(
        parser,
        f"""
        --raw: continue the prompt as plain text, without the model's chat template
        --model MODEL: model or adapter that answers (default: the fleet's)
        --tier TIER = {AUTO}: tier of the request, by name (default: the fleet's)
        --tenant TENANT = {DEFAULT_TENANT}: tenant of the request
        --request-id ID: id of the request; a known id attaches to that request (default: a new id)
        --json: print one JSON object at the end instead of streaming
        """,
    )
    add_sampling_arguments(parser, temperature=1.0)
    add_access_arguments(parser, "the tenant")


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    request_id = args.request_id or new_request_id()
    check_id("--tier", args.tier)
    check_id("--tenant", args.tenant)
    check_id("--request-id", request_id)
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    request = GenerateRequest(
        request_id=request_id,
        tenant=args.tenant,
        model=args.model,
        prompt=prompt if args.raw else None,
        messages=None if args.raw else [{"role": "user", "content": prompt}],
        sampling=sampling_of(args),
    )
    return asyncio.run(_submit(request, args))


async def _submit(request: GenerateRequest, args: argparse.Namespace) -> int:
    from loadgen.load.connection import connected

    user = User(Role.TENANT, request.tenant)
    async with connected(access_of(args), "slackline-submit", user, Clock(), PATIENCE) as client:
        with awaiting_admission(args.url):
            return await _answer(client, request, args)


async def _answer(client: Client, request: GenerateRequest, args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    handle = await client.submit(request, args.tier)
    try:
        answer = await stream(handle, began_s, _quiet if args.json else _print)
    except asyncio.CancelledError:
        print("\ncancelled", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        result: dict[str, Any] = {
            "request_id": request.request_id,
            "tier": answer.tier,
            "text": answer.text,
            "tokens": answer.tokens,
            "attached": answer.attached,
            "ttft_s": answer.ttft_s,
            "tokens_per_s": answer.tokens_per_s,
            "verdict": answer.verdict,
        }
        print_json(result)
    elif answer.text and not answer.text.endswith("\n"):
        print()
    print(f"{answer.tier}, {answer.in_words}", file=sys.stderr)
    return 0 if answer.verdict.finish_reason in GOOD_ENDS else 1


def _print(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _quiet(_: str) -> None:
    pass
