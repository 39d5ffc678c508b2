"""A language model with eleven tokens, so that each check of the homework takes milliseconds.

Nothing in this file is to be changed. All numbers are float64.
"""

import torch
import torch.nn.functional as F

TOKENS = 11


class Bigram(torch.nn.Module):
    """Predicts every token from the one before it. Like many models, it has parameters and a buffer."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(TOKENS, TOKENS, generator=generator, dtype=torch.float64)
        self.table = torch.nn.Parameter(0.5 * weights)
        self.bias = torch.nn.Parameter(torch.zeros(TOKENS, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, ids):
        """Returns the logits of the token after each token, (N, T, TOKENS)."""
        return self.scale * (self.table[ids] + self.bias)


def token_logps(model, ids):
    """Returns the log-prob of every token but the first, (N, T - 1). ids: (N, T)."""
    logps = model(ids[:, :-1]).log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None]).squeeze(-1)


def dpo_loss(log_ratio, beta: float = 0.5):
    """Returns DPO's loss, the mean over pairs.

    Args:
        log_ratio: (N, T), of every token. The first half of the rows are the better completions, the second
            half the worse ones, in the same order.
    """
    better, worse = log_ratio.sum(-1).chunk(2)
    return -F.logsigmoid(beta * (better - worse)).mean()


def make_batch(step: int):
    """Returns the tokens of four pairs, (8, 6): four better completions, then four worse ones."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (8, 6), generator=generator)
