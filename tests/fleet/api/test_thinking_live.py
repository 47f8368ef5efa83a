"""Test of thinking apart from the answer, on a fleet whose model has a template that opens it."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.models import shipped
from tests.fleet.live import WAIT_S

# special tokens of the shipped model that take the names of the marks
MARKS = {"<|bos|>": "<think>", "<|pad|>": "</think>"}
OPENS = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a river?"}],
    "max_tokens": 8,
    "temperature": 0,
}


def thinker(folder: Path) -> Path:
    """The shipped model with tokens and a template for thinking."""
    shutil.copytree(Path(shipped.__file__).parent / shipped.DEFAULT, folder)
    read = json.loads((folder / "tokenizer.json").read_text())
    for token in read["added_tokens"]:
        if (mark := MARKS.get(token["content"])) is not None:
            token.update(content=mark, special=False)
    vocabulary = read["model"]["vocab"]
    read["model"]["vocab"] = {MARKS.get(name, name): at for name, at in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(read))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": None, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + OPENS)
    return folder


@pytest.mark.slow
async def test_an_answer_whose_template_opens_thinking_is_thinking_until_its_mark(
    tmp_path: Path,
) -> None:
    model = str(thinker(tmp_path / "thinker"))
    spec = FleetSpec(engine="torch", replicas=1, model=model, drain_s=2.0)
    async with Fleet(spec) as fleet, httpx.AsyncClient(timeout=WAIT_S) as http:

        async def ask(path: str, **more: Any) -> Any:
            key = {"idempotency-key": more.pop("key", path.replace("/", "-"))}
            answer = await http.post(f"{fleet.http_url}/v1/{path}", json=ASKED | more, headers=key)
            assert answer.status_code == 200, answer.text
            return answer.json()

        thinks = (await ask("chat/completions"))["choices"][0]["message"]
        assert thinks["reasoning_content"] and not thinks["content"]
        plain = {"chat_template_kwargs": {"enable_thinking": False}}
        answers = (await ask("chat/completions", key="plain", **plain))["choices"][0]["message"]
        assert answers["content"] and "reasoning_content" not in answers
        for _ in range(2):  # the second one attaches
            (block,) = (await ask("messages"))["content"]
            assert block["thinking"] == thinks["reasoning_content"]
