"""LangChain's ChatOpenAI against a running router: answers, streams, batches, log probabilities, schemas, responses.

pip install langchain-openai, then: pdserve up & python scripts/langchain_check.py http://127.0.0.1:8000/v1
"""

import sys
from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    rain: bool
    wind: bool


def main(url: str, model: str = "demo", key: str = "none") -> None:
    def chat(**settings: Any) -> ChatOpenAI:
        return ChatOpenAI(model=model, base_url=url, api_key=key, temperature=0, max_tokens=40, **settings)

    answer = chat().invoke(QUESTION)
    assert answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat(stream_usage=True).stream(QUESTION)) == answer.content
    assert [one.content for one in chat().batch([QUESTION] * 3)] == [answer.content] * 3
    told = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(told) == answer.usage_metadata["output_tokens"]
    assert isinstance(chat().with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
    responses = chat(use_responses_api=True)
    assert [part["text"] for part in responses.invoke(QUESTION).content] == [answer.content]
    pieces = [part["text"] for piece in responses.stream(QUESTION) for part in piece.content if "text" in part]
    assert "".join(pieces) == answer.content
    print("ChatOpenAI:", answer.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
