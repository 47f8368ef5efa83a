"""Tests of scripts, which give a simulated engine set answers to prompts that hold some text."""

import re
from pathlib import Path

import pytest

from services.worker.engines.sim.script import Rule, Script, load
from shared.errors import ConfigError
from shared.text.tokenizer import Tokenizer


def test_the_first_rule_counts_whose_text_is_in_the_prompt() -> None:
    script = Script([Rule(prompt="b", say="one"), Rule(prompt="a", say="two"), Rule(say="else")])
    tokenizer = Tokenizer.builtin()
    for prompt, said in (("ab", "one"), ("a", "two"), ("", "else")):
        answer = script.answer(tokenizer.encode(prompt))
        assert answer is not None
        assert bytes(answer[:-1]).decode() == said
        assert answer[-1] in tokenizer.eos_token_ids
    assert Script([Rule(prompt="b", say="one")]).answer([97]) is None


def test_a_script_that_cannot_be_read_says_how_one_looks(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('[{"sya": "x"}]')
    for path in (tmp_path / "script.json", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=re.escape('"say": "Fine."')):
            load(str(path))
