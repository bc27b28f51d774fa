"""Filters of a sampler for one token at a time, in plain Python."""

import math


def kept_mass(logits, token, top_p=1.0, top_k=0, min_p=0.0) -> float:
    """Probability of what min-p, then top-k, then top-p leave, and of the token itself."""
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    kept = [w for w in weights if w >= min_p]  # the largest is 1
    if top_k > 0:
        last = sorted(kept)[-min(top_k, len(kept))]
        kept = [w for w in kept if w >= last]
    reached, needed = [], top_p * math.fsum(kept)
    for weight in sorted(kept, reverse=True):
        if top_p < 1.0 and math.fsum(reached) >= needed:
            break
        reached.append(weight)
    outside = 0.0 if weights[token] >= min(reached) else weights[token]
    return (math.fsum(reached) + outside) / total
