"""Lets scripts of other web pages call the API (CORS), if the configuration names their origin."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

PATHS = ("/v1/", "/tokenize", "/detokenize")  # the console is for its own page only
METHODS = ("GET", "POST", "DELETE")
# of an answer, beside those that a script may read anyway
READABLE = ("retry-after", "x-request-id", "x-slackline-ignored", "x-llm-d-request-dropped-reason")


class CrossOrigin(CORSMiddleware):
    """Answers a browser's preflight, which has no key, and names the origin in each answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PATHS):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
