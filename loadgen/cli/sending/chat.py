"""`slackline chat`: a conversation in the terminal. Each answer shows its TTFT, pace and tier."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from loadgen.access import Access, access_of, add_access_arguments
from loadgen.cli.options.common import awaiting_admission, check_id
from loadgen.cli.options.option import add_options
from loadgen.cli.options.sampling import add_sampling_arguments, sampling_of
from loadgen.load.stream import Streamed, printable, stream
from shared.bus.users import Role, User
from shared.client.client import Patience, new_request_id
from shared.clock import Clock
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import PeerError, SlacklineError
from shared.rules.tiers import AUTO
from shared.schemas import GenerateRequest, Sampling
from shared.subjects import DEFAULT_TENANT, ID_PATTERN
from shared.vocabulary import FinishReason

PATIENCE = Patience(submit_s=3.0)
TENANT = User(Role.TENANT, DEFAULT_TENANT)
HELP = """\
/tier NAME    use this tier from now on
/system TEXT  set the system prompt (without TEXT: none)
/again        ask the last question again
/reset        forget the conversation
/quit         leave, as Ctrl-D does; Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --model MODEL: model or adapter that answers (default: the fleet's)
        --tier TIER = {AUTO}: tier of the requests, by name (default: the fleet's)
        --system TEXT =: system prompt
        """,
    )
    add_sampling_arguments(parser, temperature=0.7)
    add_access_arguments(parser, "the tenant `default`")


def run(args: argparse.Namespace) -> int:
    """Reads lines from a terminal or a pipe. Answers go to stdout, notes to stderr."""
    check_id("--tier", args.tier)
    sampling = sampling_of(args)
    with suppress(ImportError):
        import readline  # noqa: F401  editing and history for input()
    chat = Chat(access_of(args), args.tier, args.system, sampling, args.model)
    terminal = sys.stdin.isatty()
    if terminal:
        _note("Type a question. /help lists the commands, Ctrl-D leaves.")
    failed = False
    while (line := _line(terminal)) is not None:
        word, _, rest = line.partition(" ")
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                break
            case "/help":
                _note(HELP)
            case "/tier" if ID_PATTERN.fullmatch(rest):
                chat.take_tier(rest)
            case "/system":
                chat.system = rest
            case "/reset":
                chat.turns.clear()
            case "/again" if chat.turns:
                failed = not chat.again()
            case _ if word.startswith("/"):
                _note(f"{line}: no such command, or not possible now; see /help")
            case _:
                failed = not chat.say(line)
    return 1 if failed and not terminal else 0


class Chat:
    """A conversation. Each answer has its own connection: the user may think for long."""

    def __init__(
        self, access: Access, tier: str, system: str, sampling: Sampling, model: str | None = None
    ) -> None:
        self.tier, self._model = tier, model
        self.system = system
        self.turns: list[tuple[str, str]] = []  # (question, answer)
        self._access = access
        self._sampling = sampling
        self._answers = 0
        self._session = new_request_id()

    def say(self, text: str) -> bool:
        """Asks, shows the answer and keeps both. False: the answer ended badly; nothing is kept."""
        try:
            answer = asyncio.run(self._ask(text, _show))
        except KeyboardInterrupt:
            _note("\nstopped")
            return False
        except SlacklineError as error:
            _note(str(error))
            return False
        print()
        _note(f"[{answer.tier}: {answer.in_words}]")
        good = answer.verdict.finish_reason in GOOD_ENDS
        if good:
            self.turns.append((text, answer.text))
        if (
            answer.verdict.finish_reason is FinishReason.LENGTH
            and answer.verdict.output_tokens < self._sampling.max_tokens
        ):
            self._forget_oldest()
        return good

    def take_tier(self, name: str) -> None:
        """Use this tier from now on, unless the fleet has none of this name."""
        try:
            asyncio.run(self._try_tier(name))
        except SlacklineError as error:
            _note(str(error))
        else:
            self.tier = name
            _note(f"(tier {name} from now on)")

    async def _try_tier(self, name: str) -> None:
        """Raises PeerError for a tier that the fleet does not have. The request that asks has no
        prompt, so a tier that there is refuses it for that.
        """
        from loadgen.load.connection import connected

        request = GenerateRequest(request_id=new_request_id(), prompt="")
        async with connected(self._access, "slackline-chat", TENANT, Clock(), PATIENCE) as client:
            try:
                with awaiting_admission(self._access.url):
                    await client.submit(request, name)
            except PeerError as error:
                if error.param == "tier":
                    raise

    def again(self) -> bool:
        """Asks the last question again. The old answer stays if the new one does not end well."""
        last = self.turns.pop()
        good = self.say(last[0])
        if not good:
            self.turns.append(last)
        return good

    def _forget_oldest(self) -> None:
        del self.turns[:1]
        _note("(the conversation fills the model's context: its oldest turn is forgotten)")

    async def _ask(self, text: str, show: Callable[[str], None]) -> Streamed:
        from loadgen.load.connection import connected

        self._answers += 1
        seed = self._sampling.seed
        sampling = (
            self._sampling
            if seed is None
            else msgspec.structs.replace(self._sampling, seed=seed + self._answers)
        )
        async with connected(self._access, "slackline-chat", TENANT, Clock(), PATIENCE) as client:
            while True:
                request = GenerateRequest(
                    request_id=new_request_id(),
                    model=self._model,
                    messages=self._messages(text),
                    sampling=sampling,
                    session=self._session,
                )
                began_s = time.monotonic()
                try:
                    with awaiting_admission(self._access.url):
                        return await stream(await client.submit(request, self.tier), began_s, show)
                except PeerError as error:
                    if error.code != "context_length_exceeded" or not self.turns:
                        raise
                    self._forget_oldest()

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*system, *turns, {"role": "user", "content": text}]


def _line(terminal: bool) -> str | None:
    """The next line, stripped; None at the end of the input."""
    try:
        return input("\n> " if terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _show(text: str) -> None:
    print(printable(text), end="", flush=True)


def _note(text: str) -> None:
    """Prints a note to standard error, dim in a terminal."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)
