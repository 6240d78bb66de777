"""What Prometheus sees of the service. Counts and times only, never content."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram

from serving.engine import KvDisk, Prefill

_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_INGEST_BUCKETS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter("foreword_answers", "Answers by how their prompt was read", ["path"], registry=registry)
        self._fallbacks = Counter(
            "foreword_fallbacks", "Prompts that were to be read sparsely and were not", ["reason"], registry=registry
        )
        self._kept_pages = Counter("foreword_kept_pages", "Pages of the cache that prefill read", registry=registry)
        self._total_pages = Counter(
            "foreword_total_pages", "Pages of the cache that prefill would have read if exact", registry=registry
        )
        self._selector = Counter(
            "foreword_selector_seconds", "Time that prefill spent on choosing pages", registry=registry
        )
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
        self._warmed = Counter(
            "foreword_warmed_tokens", "Tokens that were read before anybody asked", registry=registry
        )
        self._kv_disk = Enum(
            "foreword_kv_disk_state",
            "Whether what is read early can be kept on disk",
            states=["off", "ok", "full", "unusable"],
            registry=registry,
        )
        self._kv_disk_bytes = Gauge(
            "foreword_kv_disk_bytes", "What was read early and is kept on disk", registry=registry
        )
        self._ingests = Histogram(
            "foreword_ingest_seconds", "Ingests by final status", ["status"], buckets=_INGEST_BUCKETS, registry=registry
        )

    def answered(self, prefill: Prefill, ttft: float | None, total: float) -> None:
        """Count an answer; what is not known of it counts as nothing."""
        self._answers.labels(prefill.path).inc()
        self._total.observe(total)
        if ttft is not None:
            self._ttft.labels(prefill.path).observe(ttft)
        if prefill.fallback_reason is not None:
            self._fallbacks.labels(prefill.fallback_reason).inc()
        self._kept_pages.inc(prefill.kept_pages or 0)
        self._total_pages.inc(prefill.total_pages or 0)
        self._selector.inc(prefill.selector_s or 0.0)

    def warmed(self, tokens: int) -> None:
        self._warmed.inc(tokens)

    def kept(self, disk: KvDisk | None) -> None:
        """What is kept on disk as it is now; None when nothing is to be."""
        self._kv_disk.state("off" if disk is None else disk.state)
        self._kv_disk_bytes.set(0 if disk is None else disk.bytes)

    def failed(self, type: str) -> None:
        self._failures.labels(type).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def ingested(self, status: str, seconds: float) -> None:
        self._ingests.labels(status).observe(seconds)
