"""vLLM's `/metrics`: what the last step of each rank reported, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.metrics import exposed
from rolloutsync.sim.vllm_engine import VllmEngine

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


async def metrics(engine: VllmEngine, _: Request) -> Response:
    """Answers `/metrics`; stands still while the core is paused or hangs."""
    return Response(exposed(VllmCollector(engine)), headers={"content-type": CONTENT_TYPE})


class VllmCollector(Collector):
    """Reads one engine whenever it is scraped."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the families."""
        engine = self._engine
        loads = engine.scheduler.loads()
        engine.tick()
        stuck, capacity = engine.faults.has("stuck_load"), engine.config.max_total_tokens
        running = [max(load.running + load.prefilling, int(stuck)) for load in loads]
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", running)
        waiting = [load.waiting for load in loads]
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        used = [load.used_tokens / capacity for load in loads]
        words = "KV-cache usage. 1 means 100 percent usage."
        yield self._gauge("kv_cache_usage_perc", words, used)
        retracted = [load.retracted for load in loads]
        words = "Cumulative number of preemption from the engine."
        yield self._counter("num_preemptions", words, retracted)
        yield from self._totals()

    def _totals(self) -> Iterator[Metric]:
        ended = (self._engine.totals.streamed, self._engine.totals.unstreamed)
        rest = [0] * (self._engine.config.dp_size - 1)
        prompt, output = sum(each.prompt_tokens for each in ended), sum(each.output_tokens for each in ended)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", [prompt, *rest])
        yield self._counter("generation_tokens", "Number of generation tokens processed.", [output, *rest])

    def _gauge(self, name: str, words: str, values: Sequence[float]) -> Metric:
        return self._filled(GaugeMetricFamily, name, words, values)

    def _counter(self, name: str, words: str, values: Sequence[float]) -> Metric:
        return self._filled(CounterMetricFamily, name, words, values)

    def _filled(self, kind: Callable[..., Metric], name: str, words: str, values: Sequence[float]) -> Metric:
        family = kind(f"vllm:{name}", words, labels=["engine", "model_name"])
        for rank, value in enumerate(values):
            family.add_metric([str(rank), self._engine.config.model_path], value)  # type: ignore[attr-defined]
        return family
