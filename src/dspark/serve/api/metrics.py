"""Figures for Prometheus: what the engine counts, read when they are asked for, and what the HTTP side counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from dspark.serve.events import EngineStats

# how a request to a generating endpoint ended
OUTCOMES = ("answered", "invalid", "overloaded", "stopping", "disconnected", "timeout", "failed")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One server's figures, in a registry of its own."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        self.requests = Counter(
            "dspark_requests", "Requests by how they ended", ["endpoint", "outcome"], registry=self.registry
        )
        self.responses = Counter("dspark_http_responses", "Responses by status", ["status"], registry=self.registry)
        self.in_flight = Gauge(
            "dspark_answers_in_flight", "Answers accepted and not finished, n counted", registry=self.registry
        )
        self.first_token = Histogram(
            "dspark_first_token_seconds",
            "From the end of a request's body to its first token",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.whole = Histogram(
            "dspark_request_seconds",
            "From the end of a request's body to the end of its answer",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "dspark_request_prompt_tokens", "Tokens of prompts, as told in replies", registry=self.registry
        )
        self.output_tokens = Counter(
            "dspark_request_output_tokens", "Tokens of answers, as told in replies", registry=self.registry
        )
        for endpoint in ("completions", "chat"):
            for outcome in OUTCOMES:
                self.requests.labels(endpoint, outcome)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's own totals, one picture per scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Nothing: the names are known once there is a picture."""
        return iter(())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """All families of one picture."""
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield _verify_lengths(stats.verify_lens)

    def _gauges(self, stats: EngineStats) -> Iterator[GaugeMetricFamily]:
        for name, help_text, value in (
            ("requests_running", "Answers with a seat", stats.running),
            ("requests_waiting", "Answers waiting for a seat", stats.waiting),
            ("seats", "Most answers that run at once", stats.seats),
            ("pages_used", "Pages of KV memory that answers hold", stats.pages_used),
            ("pages_cached", "Pages kept for their prefix alone", stats.pages_cached),
            ("pages_total", "Pages of KV memory", stats.pages_total),
        ):
            yield GaugeMetricFamily(f"dspark_{name}", help_text, value=value)
        if stats.rounds:
            yield GaugeMetricFamily(
                "dspark_acceptance_length", "Tokens per round, bonus included", value=stats.acceptance_length
            )

    def _counters(self, stats: EngineStats) -> Iterator[CounterMetricFamily]:
        for name, help_text, value in (
            ("steps", "Steps of the engine", stats.steps),
            ("drafted_steps", "Steps that drafted", stats.drafted_steps),
            ("rounds", "Rounds of single answers", stats.rounds),
            ("lookup_rounds", "Rounds with drafts from the answer's own text", stats.lookup_rounds),
            ("lookup_accepted_tokens", "Drafts committed in those rounds", stats.lookup_accepted),
            ("preemptions", "Answers that gave their pages back and were computed again", stats.preemptions),
            ("prompt_tokens", "Prompt tokens run through the target", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens taken from cached prefixes", stats.cached_tokens),
            ("output_tokens", "Tokens generated", stats.completion_tokens),
            ("drafted_tokens", "Drafts proposed", sum(stats.proposed_at)),
            ("verified_tokens", "Drafts checked by the target", sum(stats.verified_at)),
            ("accepted_tokens", "Drafts committed", sum(stats.accepted_at)),
        ):
            yield CounterMetricFamily(f"dspark_{name}", help_text, value=value)
        for name, help_text, counts in (
            ("proposed", "Rounds that proposed a draft at a position (0-based)", stats.proposed_at),
            ("verified", "Rounds that checked the draft at a position (0-based)", stats.verified_at),
            ("accepted", "Rounds that committed the draft at a position (0-based)", stats.accepted_at),
        ):
            rows: list[tuple[str, int | float]] = [(str(position), count) for position, count in enumerate(counts)]
            yield _counter(f"dspark_drafts_{name}", help_text, "position", rows)
        yield _counter("dspark_stage_seconds", "Seconds by stage", "stage", list(stats.stage_seconds.items()))
        yield _counter("dspark_engine_finished", "Answers by finish reason", "reason", list(stats.finished.items()))


def _counter(name: str, help_text: str, label: str, rows: Sequence[tuple[str, int | float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value_of_label, value in rows:
        family.add_metric([value_of_label], value)
    return family


def _verify_lengths(counts: Sequence[int]) -> HistogramMetricFamily:
    """Drafts checked per round, as a histogram with a bucket for every length."""
    family = HistogramMetricFamily("dspark_verify_length", "Drafts that a round let through")
    buckets: list[tuple[str, int | float]] = []
    total = 0
    for length, count in enumerate(counts):
        total += count
        buckets.append((str(float(length)), total))
    buckets.append(("+Inf", total))
    family.add_metric([], buckets, sum_value=sum(length * count for length, count in enumerate(counts)))
    return family
