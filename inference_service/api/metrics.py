"""Prometheus metrics of an instance, under vLLM's names where vLLM has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_service.engine_interface import Engine

DURATION_BUCKETS_S = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class EngineCollector(Collector):
    """Reads the engine's counters at every scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "vllm:num_requests_running": ("Responses being generated.", stats.num_running),
            "vllm:num_requests_waiting": ("Responses waiting for a place, or for /resume.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of the KV cache in use; 1 is full.", stats.cache_usage),
        }
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens of accepted requests.", stats.prompt_tokens),
            "vllm:generation_tokens": ("Sampled tokens.", stats.generation_tokens),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the KV cache.", stats.cache_queries),
            "vllm:prefix_cache_hits": ("Those of them that were in it.", stats.cache_hits),
        }
        for name, (help_text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (help_text, value) in counters.items():
            counter = CounterMetricFamily(name, help_text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished responses.", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            finished.add_metric([self._model_name, reason], stats.finished.get(reason, 0))
        yield finished


class Metrics:
    """One registry per server."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name))
        self._weight_duration = Histogram(
            "vllm:rl_weight_update_operation_duration_seconds",
            "Duration of one weight-transfer operation.",
            ["operation"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._weight_in_flight = Gauge(
            "vllm:rl_weight_update_operations_in_flight",
            "Weight-transfer operations going on.",
            ["operation"],
            registry=self._registry,
        )

    @contextmanager
    def weight_operation(self, operation: str) -> Iterator[None]:
        started = perf_counter()
        with self._weight_in_flight.labels(operation).track_inprogress():
            try:
                yield
            finally:
                self._weight_duration.labels(operation).observe(perf_counter() - started)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
