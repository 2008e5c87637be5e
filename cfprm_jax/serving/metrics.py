"""What /metrics shows, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.serving.worker import Worker

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
      requests: by route and status.
      seconds: from the whole body to the answer, by route.
    """

    def __init__(self, scorer: PrefixScorer, worker: Worker, waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "cfprm_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "cfprm_request_seconds", "Seconds from a request's body to its answer.", ["route"], registry=self._registry
        )
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "cfprm_waiting_requests": ("Requests that are being answered.", waiting),
            "cfprm_cached_tokens": ("Tokens whose keys and values are kept.", lambda: scorer.cached_tokens),
            "cfprm_compiled_shapes": ("Batch shapes that were compiled.", lambda: len(scorer.shapes)),
            "cfprm_healthy": ("0 after an error of the device.", lambda: worker.failure is None),
        }
        for name, (meaning, function) in gauges.items():
            Gauge(name, meaning, registry=self._registry).set_function(function)
        self._registry.register(_Totals(scorer, worker))

    def text(self) -> bytes:
        """The body of /metrics."""
        return prometheus_client.generate_latest(self._registry)


class _Totals(Collector):
    """Counts that the scorer's thread keeps."""

    def __init__(self, scorer: PrefixScorer, worker: Worker) -> None:
        self._scorer, self._worker = scorer, worker

    def collect(self):
        """The metric families, for prometheus_client."""
        counts = self._scorer.counts
        tokens = CounterMetricFamily(
            "cfprm_tokens", "Tokens of requests: all, those computed, those from the cache.", labels=["kind"]
        )
        for kind in ("requested", "computed", "reused"):
            tokens.add_metric([kind], getattr(counts, kind))
        yield tokens
        yield CounterMetricFamily("cfprm_batches", "Batches that were scored.", value=self._worker.batches)
