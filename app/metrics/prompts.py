"""Prometheus metrics of prompts that one server of a cluster computes for another."""

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("whole", "part", "none")


class PromptMetrics:
    """What this server has asked for, and what it has computed for others, in the given registry."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._asked = Counter(
            "djinn_prompts_apart", "Prompts that another server was to compute", ["came"], registry=own
        )
        for outcome in OUTCOMES:
            self._asked.labels(outcome)
        self._asked_tokens = Counter(
            "djinn_prompt_tokens_apart", "Tokens of prompts whose KV another server has sent", registry=own
        )
        self._served = Counter("djinn_prompts_served", "Prompts computed for another server", registry=own)
        self._served_tokens = Counter(
            "djinn_prompt_tokens_served", "Tokens of prompts computed for another server", registry=own
        )

    def asked(self, *, whole: bool, tokens: int) -> None:
        """Count a prompt of which that many tokens have come."""
        self._asked.labels("whole" if whole else "part" if tokens else "none").inc()
        self._asked_tokens.inc(tokens)

    def served(self, tokens: int) -> None:
        """Count a prompt that has been sent."""
        self._served.inc()
        self._served_tokens.inc(tokens)
