"""What one more token costs a step: a line through the times of steps that were measured."""

_SHARE = 0.18
"""Time of one more token over that of a step of one, where nothing has been measured yet: the products of a 135M Llama
in 4-bit blocks take 9 ms for one row and 23 ms for eight; in float32 25 and 40."""
_PRIOR_WEIGHT = 0.5
"""Of that, against the variance of the tokens in the steps that were measured."""
_KEPT = 0.97
"""Weight of all earlier steps when one more is noted: about 30 of them count."""


class StepCosts:
    """Seconds of a step as `base + per_token * tokens`: weighted least squares over the last steps, held near a prior
    as long as they are all of one size.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens, self._seconds = 1.0, 1.0
        """Means."""
        self._variance = self._covariance = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._weight = _KEPT * self._weight + 1
        share = 1 / self._weight
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off_tokens
        self._seconds += share * off_seconds
        self._variance = (1 - share) * (self._variance + share * off_tokens**2)
        self._covariance = (1 - share) * (self._covariance + share * off_tokens * off_seconds)

    @property
    def per_token(self) -> float:
        """Seconds of one more token: never less than none, nor so much that a step without tokens would take less."""
        expected = _SHARE * self._seconds / (1 + _SHARE * (self._tokens - 1))
        slope = (self._covariance + _PRIOR_WEIGHT * expected) / (self._variance + _PRIOR_WEIGHT)
        return min(max(slope, 0.0), self._seconds / self._tokens)

    def seconds(self, tokens: int) -> float:
        """Of a step of so many tokens."""
        return self._seconds + self.per_token * (tokens - self._tokens)
