"""`slackline submit`: one prompt, its answer streaming in the terminal, one line about how it went."""

import argparse
import asyncio
import sys
from typing import Any

import msgspec

from loadgen.cli import INTERRUPTED, default_url
from loadgen.tally import GOOD_ENDS
from shared.client import Client, Patience, new_request_id
from shared.clock import Clock
from shared.errors import BusError, ConfigError, NoResponders
from shared.schemas import Delta, GenerateRequest, Sampling, Verdict
from shared.subjects import ID_PATTERN

PATIENCE = Patience(submit_s=3.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--tier", default="interactive", help="the latency wanted, by name (default: interactive)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="cut to what fits the context (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, metavar="K", help="the same seed gives the same answer")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--request-id", metavar="ID", help="an id used before attaches to that request")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the end instead of streaming")
    parser.add_argument("--url", default=default_url(), help="the NATS server (default: SLACKLINE_URL, else nats://127.0.0.1:4222)")


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    request_id = args.request_id or new_request_id()
    for name, value in (("--tier", args.tier), ("--tenant", args.tenant), ("--request-id", request_id)):
        if not ID_PATTERN.fullmatch(value):
            raise ConfigError(f"{name} must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    try:
        request = GenerateRequest(request_id=request_id, tenant=args.tenant, prompt=prompt, sampling=msgspec.convert(sampling, Sampling))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return asyncio.run(_submit(request, args))


async def _submit(request: GenerateRequest, args: argparse.Namespace) -> int:
    from loadgen.commands.connection import connected

    clock = Clock()
    async with connected(args.url, "slackline-submit", clock, PATIENCE) as client:
        try:
            return await _answer(client, request, args, clock)
        except NoResponders as error:
            raise BusError(f"{args.url} answers, but no admission service is there: start a fleet with `slackline up`") from error


async def _answer(client: Client, request: GenerateRequest, args: argparse.Namespace, clock: Clock) -> int:
    begin_unix_s = clock.unix_s()
    handle = await client.submit(request, args.tier)
    texts, tokens, first_unix_s, last_unix_s = list[str](), list[int](), 0.0, 0.0
    try:
        async for event in handle:
            if isinstance(event, Delta):
                last_unix_s = clock.unix_s()
                first_unix_s = first_unix_s or last_unix_s
                tokens += event.tokens
                texts.append(event.text)
                if not args.json:
                    print(event.text, end="", flush=True)
    except asyncio.CancelledError:
        await handle.cancel()
        print("\ncancelled", file=sys.stderr)
        return INTERRUPTED
    verdict = await handle.wait()
    ttft_s = first_unix_s - begin_unix_s if tokens else None
    pace = (len(tokens) - 1) / (last_unix_s - first_unix_s) if last_unix_s > first_unix_s else None
    if args.json:
        result: dict[str, Any] = {
            "request_id": request.request_id, "tier": args.tier, "text": "".join(texts), "tokens": tokens,
            "ttft_s": ttft_s, "tokens_per_s": pace, "verdict": verdict,
        }  # fmt: skip
        print(msgspec.json.encode(result).decode())
    elif texts and not texts[-1].endswith("\n"):
        print()
    print(_summary(args.tier, verdict, ttft_s, pace), file=sys.stderr)
    return 0 if verdict.finish_reason in GOOD_ENDS else 1


def _summary(tier: str, verdict: Verdict, ttft_s: float | None, pace: float | None) -> str:
    parts = [
        tier,
        "relegated to best effort" if verdict.relegated else verdict.service_class.replace("_", " "),
        "SLO met" if verdict.slo_met else "SLO missed",
        f"TTFT {1000 * ttft_s:.0f} ms" if ttft_s is not None else "no token",
        f"{verdict.output_tokens} tokens" + (f" at {pace:.1f}/s" if pace is not None else ""),
        f"ended by {verdict.finish_reason}" + (f": {verdict.message}" if verdict.message else ""),
    ]
    return ", ".join(parts)
