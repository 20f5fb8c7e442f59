"""What one measured client process is to do, and what an answer looks like."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

EXPERTS = 128  # of the model; the ids of routed experts are below
VOCABULARY = 30_000  # small enough for any model


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of one request and its answer.

    Attributes:
        prompt_tokens: Ids in the request.
        tokens: In the answer, each with its logprob.
        layers: That report routed experts; 0 for none.
        topk: Experts of each token in each layer.
    """

    prompt_tokens: int = 128
    tokens: int = 40
    layers: int = 0
    topk: int = 8

    @property
    def rows(self) -> int:
        """Of routed experts: one for each token but the last."""
        return self.prompt_tokens + self.tokens - 1

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of every request."""
        return {"temperature": 1.0, "max_new_tokens": self.tokens, "ignore_eos": True}

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of every request beside prompt, rid and sampling parameters."""
        wanted = {"return_logprob": True}
        return wanted | ({"return_routed_experts": True} if self.layers else {})


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one client process does.

    Attributes:
        peer: See ``benchmarks.peers``.
        urls: Engines; each request goes to the next.
        threads: Requests in flight over all engines.
        requests: Measured; at least as many as are in flight.
        seconds: Measure about this long instead, by the rate of the warm-up; 0 for ``requests``.
        warmup: Requests before; None for as many as are in flight.
        shape: Of requests and answers.
        api_key: Sent as a bearer token, if given.
        checked: Whether answers must have exactly the shape; real engines give what they give.
    """

    peer: str
    urls: list[str]
    threads: int
    requests: int
    seconds: float = 0.0
    warmup: int | None = None
    shape: Shape = Shape()
    checked: bool = True
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )

    def to_json(self) -> str:
        """For ``from_json`` in the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """What ``to_json`` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Work:
        """What ``dataclasses.asdict`` made."""
        return cls(**{**values, "shape": Shape(**values["shape"])})

    def prompts(self, count: int) -> list[list[int]]:
        """So many prompts, all different."""
        size = self.shape.prompt_tokens
        return [[(31 * number + 7 * place) % VOCABULARY + 1 for place in range(size)] for number in range(count)]
