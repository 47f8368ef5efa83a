"""LangChain's standard tests of a chat model, for test_clients.py: the clients' own pytest runs
them. Environment: BASE_URL, MODEL, and METHOD, by which answers are held to a schema.
"""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["MODEL"],
            "base_url": os.environ["BASE_URL"],
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": os.environ["METHOD"]}

    @property
    def model_override_value(self) -> str:
        return os.environ["MODEL"]

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
