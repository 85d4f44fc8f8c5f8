"""Log-probabilities of tokens: computed on the device, told as numbers once they have arrived."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from app.domain.values import TokenLogprobs
from app.gpu.device.staging import Download

ALIGNED = 4
"""Float32 numbers in 16 bytes."""


class Report:
    """The log-probabilities of one token in each row of `raw` `[rows, vocab_size]`, and the best `tops[i]` of row i.

    `token_ids` is `[rows]` int64 on the device. To be read when what `download` fetches has arrived.
    """

    def __init__(self, raw: Tensor, token_ids: Tensor, tops: Sequence[int], download: Download) -> None:
        values, ids = raw.topk(max(tops))
        self._tops = tops
        self._token_ids = download.fetch(token_ids)
        self._logprobs = download.fetch(raw.gather(1, token_ids[:, None])[:, 0])
        self._values, self._ids = download.fetch(values), download.fetch(ids)

    def read(self) -> list[TokenLogprobs]:
        """One entry per row."""
        rows = zip(
            self._token_ids.tolist(),
            self._logprobs.tolist(),
            self._ids.tolist(),
            self._values.tolist(),
            self._tops,
            strict=True,
        )
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, logprob, ids, values, top in rows
        ]


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural logarithms of the softmax, `[rows, vocab_size]`, in a tensor of their own.

    PyTorch's kernel on CUDA sums a row in an order that depends on how far the row begins from a multiple of 16 bytes.
    It takes dense rows only, so each is filled up with logits that add nothing.
    """
    vocab_size = logits.shape[1]
    if logits.is_cuda and vocab_size % ALIGNED:
        logits = F.pad(logits, (0, -vocab_size % ALIGNED), value=-torch.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab_size]
