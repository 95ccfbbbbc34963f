"""Modules of transformers that compute attention, with random weights, and their arrays in NumPy."""

import torch


def split(x, heads):
    """(batch, length, heads * dim) of torch as (batch, heads, length, dim) of NumPy."""
    return x.detach().numpy().reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def drawn(module):
    """The module with parameters of a standard deviation of 0.2, ready to compute."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.eval()
