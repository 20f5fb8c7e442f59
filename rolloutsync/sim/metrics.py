"""`/metrics`: the engine's numbers under the real engine's names, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from rolloutsync.sim.engine import Engine
from rolloutsync.sim.loads import Load
from rolloutsync.sim.totals import LATENCY_BOUNDS_S, Ended

# Per rank, from its last load snapshot.
GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("num_running_reqs", "The number of running requests.", lambda load: load.running),
    ("num_queue_reqs", "The number of requests in the waiting queue.", lambda load: load.waiting),
    ("num_used_tokens", "The number of used tokens.", lambda load: load.used_tokens),
    ("gen_throughput", "The generation throughput (token/s).", lambda load: load.throughput),
    ("cache_hit_rate", "The prefix cache hit rate.", lambda load: load.hit_rate),
)


async def metrics(engine: Engine, _: Request) -> Response:
    """Answers `/metrics`."""
    return Response(exposed(EngineCollector(engine)), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def exposed(collector: Collector) -> bytes:
    """Returns what a collector yields in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


class EngineCollector(Collector):
    """Reads one engine whenever it is scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = {"model_name": engine.config.model_path, "engine_type": "unified"}

    def collect(self) -> Iterator[Metric]:
        """Yields the families, those of the scheduler first."""
        loads = self._engine.scheduler.loads()
        self._engine.tick()
        for name, words, value in GAUGES:
            yield self._gauge(name, words, [value(load) for load in loads])
        capacity = self._engine.config.max_total_tokens
        yield self._gauge("token_usage", "The token usage.", [load.used_tokens / capacity for load in loads])
        words = "Maximum total number of tokens in the KV cache pool."
        yield self._gauge("max_total_num_tokens", words, [capacity for _ in loads])
        yield from self._counters()
        yield self._latencies()

    def _gauge(self, name: str, words: str, values: list[float]) -> Metric:
        ranks = [self._rank_labels(rank) for rank in range(len(values))]
        family = GaugeMetricFamily(f"sglang:{name}", words, labels=list(ranks[0]))
        for labels, value in zip(ranks, values, strict=True):
            family.add_metric(list(labels.values()), value)
        return family

    def _rank_labels(self, rank: int) -> dict[str, str]:
        labels = self._labels | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        return labels | ({"dp_rank": str(rank)} if self._engine.config.dp_size > 1 else {})

    def _counters(self) -> Iterator[Metric]:
        totals = self._engine.totals
        yield self._by_streaming("prompt_tokens", "Number of prefill tokens processed.", lambda e: e.prompt_tokens)
        yield self._by_streaming(
            "generation_tokens", "Number of generation tokens processed.", lambda e: e.output_tokens
        )
        yield self._by_streaming("num_requests", "Number of requests processed.", lambda e: e.requests)
        words = "Number of cached prompt tokens by source (device/host/storage)."
        cached = CounterMetricFamily("sglang:cached_tokens", words, labels=[*self._labels, "cache_source"])
        if totals.cached_tokens:
            cached.add_metric([*self._labels.values(), "device"], totals.cached_tokens)
        yield cached
        words = "Number of requests aborted."
        aborted = CounterMetricFamily("sglang:num_aborted_requests", words, labels=[*self._labels])
        if totals.aborts:
            aborted.add_metric([*self._labels.values()], totals.aborts)
        yield aborted

    def _by_streaming(self, name: str, words: str, value: Callable[[Ended], float]) -> Metric:
        family = CounterMetricFamily(f"sglang:{name}", words, labels=[*self._labels, "is_streaming"])
        for labels, ended in self._ended():
            family.add_metric(labels, value(ended))
        return family

    def _latencies(self) -> Metric:
        words = "Histogram of End-to-end request latency in seconds"
        labels = [*self._labels, "is_streaming"]
        family = HistogramMetricFamily("sglang:e2e_request_latency_seconds", words, labels=labels)
        for values, ended in self._ended():
            family.add_metric(values, _cumulated(ended.by_latency), ended.latency_s)
        return family

    def _ended(self) -> Iterator[tuple[list[str], Ended]]:
        totals = self._engine.totals
        for streaming, ended in (("true", totals.streamed), ("false", totals.unstreamed)):
            if ended.requests:
                yield [*self._labels.values(), streaming], ended


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(str(float(bound)) for bound in LATENCY_BOUNDS_S), "+Inf"]
    return [(bound, float(sum(counts[: place + 1]))) for place, bound in enumerate(bounds)]
