"""What the simulated engine says has the names that SGLang's sources give it. The sources are read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolloutsync.sim import SimEngine, SimFleet
from tests.sim.kit import Caller, events

from .wheel import CHUNKS, METRICS, PROTOCOL, Oracles

pytestmark = pytest.mark.slow
CHAT = [{"role": "user", "content": "Hi."}]
LOGPROBS = {"logprobs": True, "top_logprobs": 1}
# Serialised only where they were asked for.
ON_DEMAND = {
    "sglext",
    "hidden_states",
    "token_ids",
    "prompt_token_ids",
    "response_token_ids",
    "meta_info",
    "tool_calls",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    """One engine with all that it has."""
    with SimFleet(engines=1, tokens_per_second=1000.0, enable_metrics=True) as fleet:
        yield fleet.engines[0]


@pytest.fixture
def before_the_guard(engine: SimEngine, oracles: Oracles) -> None:
    """The shared engine and the files outlive a test."""


@pytest.fixture
def api(engine: SimEngine) -> Iterator[Caller]:
    """Calls the engine."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield Caller(engine, pool)


class Shapes:
    """The classes of a source file and their fields, inherited ones left out."""

    def __init__(self, source: str) -> None:
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        self._fields = {node.name: list(_fields(node)) for node in classes}

    def check(self, name: str, value: dict[str, Any]) -> None:
        """A value has the fields of a class, all of them and in their order, but for those on demand."""
        wanted = [each for each in self._fields[name] if each not in ON_DEMAND]
        assert [each for each in value if each not in ON_DEMAND] == wanted, name


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id


@pytest.fixture
def protocol(oracles: Oracles) -> Shapes:
    """The OpenAI answers."""
    return Shapes(oracles.source(PROTOCOL))


def test_completions(api: Caller, protocol: Shapes) -> None:
    """The answer, its choice, its log-probabilities, its usage."""
    answer = api.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "logprobs": 1, "return_token_ids": True}).json
    protocol.check("CompletionResponse", answer)
    protocol.check("CompletionResponseChoice", answer["choices"][0])
    protocol.check("LogProbs", answer["choices"][0]["logprobs"])
    protocol.check("UsageInfo", answer["usage"])
    assert answer["choices"][0].keys() >= {"token_ids", "prompt_token_ids"}


def test_streamed_completions(api: Caller, protocol: Shapes) -> None:
    """Every chunk has all fields, but for the usage at the end, which leaves out what is null."""
    body = {"prompt": "a", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = events(api.post("/v1/completions", body))
    for chunk in chunks:
        protocol.check("CompletionStreamResponse", chunk)
        protocol.check("CompletionResponseStreamChoice", chunk["choices"][0])
    protocol.check("CompletionStreamResponse", usage)
    assert not _nulls(usage)


def _nulls(value: Any) -> bool:
    """Whether something in it is null."""
    if isinstance(value, dict):
        return any(_nulls(each) for each in value.values())
    return value is None


def test_chats(api: Caller, protocol: Shapes) -> None:
    """The same of a chat."""
    answer = api.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, **LOGPROBS}).json
    (choice,) = answer["choices"]
    protocol.check("ChatCompletionResponse", answer)
    protocol.check("ChatCompletionResponseChoice", choice)
    protocol.check("ChatMessage", choice["message"])
    protocol.check("ChoiceLogprobs", choice["logprobs"])
    protocol.check("ChatCompletionTokenLogprob", choice["logprobs"]["content"][0])
    protocol.check("TopLogprob", choice["logprobs"]["content"][0]["top_logprobs"][0])
    protocol.check("UsageInfo", answer["usage"])


def test_streamed_chats(api: Caller, oracles: Oracles, protocol: Shapes) -> None:
    """These have classes of their own, whose defaults are left out."""
    body = {"messages": CHAT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = events(api.post("/v1/chat/completions", body))
    shapes = Shapes(oracles.source(CHUNKS))
    for chunk in chunks:
        shapes.check("StreamChunk", chunk | {"usage": None})
        shapes.check("StreamChoice", chunk["choices"][0])
        assert "reasoning_content" in chunk["choices"][0]["delta"]
    shapes.check("StreamDelta", chunks[0]["choices"][0]["delta"])
    protocol.check("ChatCompletionStreamResponse", usage)
    protocol.check("UsageInfo", usage["usage"])


def test_errors_and_models(api: Caller, protocol: Shapes) -> None:
    """The smaller answers."""
    protocol.check("ErrorResponse", api.post("/v1/completions", {"prompt": ""}).json)
    models = api.get("/v1/models").json
    protocol.check("ModelList", models)
    protocol.check("ModelCard", models["data"][0])


def test_metrics(api: Caller, oracles: Oracles) -> None:
    """Each has a name, a kind and a text that are in the real engine's collectors."""
    api.generate([5, 6], 3)
    known = {(kind, name, text) for kind, name, text in _collectors(oracles.source(METRICS))}
    families = list(text_string_to_metric_families(api.get("/metrics").text))
    told = {(family.type, family.name, family.documentation) for family in families}
    assert len(told) == len(families) > 10
    assert told <= known


def _collectors(source: str) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            values = {each.arg: each.value for each in node.keywords}
            name, text = values.get("name"), values.get("documentation")
            if isinstance(name, ast.Constant) and isinstance(text, ast.Constant):
                yield node.func.id.lower(), str(name.value).removesuffix("_total"), str(text.value)
