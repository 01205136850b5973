"""Learning rate by step: linear warmup from 0, then half a cosine."""

import math

from delta_trn.train.settings.schema import RunConfig


def learning_rate(config: RunConfig, finished: int) -> float:
    """The rate for the step after `finished` steps, before a parameter's own factor.

        i < w     lr(i) = lr i / w
        i >= w    lr(i) = min_lr + (1 + cos(pi r)) / 2 (lr - min_lr),    r = min(1, (i - w) / (e - w))
    with i = finished, w = schedule.warmup, e = schedule.decay_steps or steps (arXiv:2606.04048, section 6.1).
    """
    peak, warmup, low = config.optimizer.lr, config.schedule.warmup, config.schedule.min_lr
    if finished < warmup:
        return peak * finished / warmup
    end = config.schedule.decay_steps or config.steps
    if finished >= end:
        return low
    r = (finished - warmup) / (end - warmup)
    return low + 0.5 * (1 + math.cos(math.pi * r)) * (peak - low)
