"""What Prometheus sees of the service. Counts and times only, never content."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_INGEST_BUCKETS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter("foreword_answers", "Answers by how their prompt was read", ["path"], registry=registry)
        self._failures = Counter(
            "foreword_failures", "Requests that failed, by error type", ["type"], registry=registry
        )
        self._cancelled = Counter("foreword_cancelled", "Questions whose client left", registry=registry)
        self._ttft = Histogram(
            "foreword_ttft_seconds", "Arrival to first text", ["path"], buckets=_TTFT_BUCKETS, registry=registry
        )
        self._total = Histogram(
            "foreword_answer_seconds", "Arrival to end of answer", buckets=_TTFT_BUCKETS, registry=registry
        )
        self._ingests = Histogram(
            "foreword_ingest_seconds", "Ingests by final status", ["status"], buckets=_INGEST_BUCKETS, registry=registry
        )

    def answered(self, path: str, ttft: float | None, total: float) -> None:
        self._answers.labels(path).inc()
        self._total.observe(total)
        if ttft is not None:
            self._ttft.labels(path).observe(ttft)

    def failed(self, type: str) -> None:
        self._failures.labels(type).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def ingested(self, status: str, seconds: float) -> None:
        self._ingests.labels(status).observe(seconds)
