"""The task ``reverse_digits``: given ``314=``, answer ``413`` and stop."""

from __future__ import annotations

import random

from refit_transport.rl.data import Example


def examples(count: int, seed: int, num_digits: int = 3) -> list[Example]:
    """``count`` random prompts with their answers; the same for equal arguments. With as many new tokens allowed as the
    answer and its stop token need, an answer that does not stop is one character too long, so ``exact_match`` gives it
    nothing."""
    rng = random.Random(seed)
    drawn = ("".join(rng.choices("0123456789", k=num_digits)) for _ in range(count))
    return [Example(f"{digits}=", digits[::-1], {"prompt": f"{digits}=", "answer": digits[::-1]}) for digits in drawn]
