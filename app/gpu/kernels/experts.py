"""What lies around the products of experts, by PyTorch's operators: none of them waits for the host. The same on a CPU,
by kernels of ours, is in `cpu.experts`.
"""

import torch
from torch import Tensor

BEST = 2
"""Experts whose scores are the score of their group."""
LEAST_TOTAL = 1e-20
"""Added to a sum of scores before it divides."""


def route(
    logits: Tensor,
    top_k: int,
    *,
    experts: int,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    renormalized: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose for each token which experts it visits, by the first outputs of a router, `[tokens, at least experts]`; as
    `models.feed_forward.Mixture` says, `correction` is `[experts]`. Returns their ids, `[tokens, top_k]`, and weights
    of the same shape, float32. Of experts with equal scores any is chosen.
    """
    given = logits[:, :experts].float()
    scores = given.sigmoid() if sigmoid else given.softmax(dim=-1)
    choices = scores if correction is None else scores + correction.float()
    if groups > 1:
        by_group = choices.view(len(choices), groups, -1)
        best = by_group.topk(min(BEST, by_group.shape[2]), dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(top_groups, dim=-1).indices, 1.0)
        choices = by_group.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    ids = choices.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_TOTAL)
    return ids, weights * scale


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Where each visit of `ids` `[tokens, top_k]` lies by expert, those of one in the order of their tokens, of that
    shape; and where the visits of each expert begin, and how many there are, `[experts + 1]` int32.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    each = torch.arange(experts + 1, dtype=flat.dtype, device=ids.device)
    return places.view(ids.shape), torch.searchsorted(flat[order], each).int()


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Each row of `x` `[tokens, width]` at the `places` `[tokens, top_k]` of its visits: `[tokens, top_k, width]`."""
    rows = x.repeat_interleave(places.shape[1], dim=0)
    return torch.empty_like(rows).index_copy_(0, places.flatten().long(), rows).view(*places.shape, -1)


def combine(
    visits: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Of each token the sum of its visits `[tokens, top_k, width]`, which lie at `places`, with their weights, and of
    `shared` `[tokens, width]`, if there is that, with a logistic function of the first column of `gate`. Sums are
    float32.
    """
    total, *others = (visits.flatten(0, 1)[places.long()].float() * weights[:, :, None]).unbind(dim=1)
    for each in others:  # one by one: a sum over an axis may depend on how many tokens there are
        total = total + each
    if shared is not None:
        total = total + (shared if gate is None else shared * gate[:, :1].float().sigmoid())
    return total.to(visits.dtype)
