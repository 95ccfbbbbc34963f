"""Optimizers by their definitions, in float64: Loshchilov & Hutter 2019, algorithm 2, and torch's SGD."""

import numpy as np


class AdamW:
    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.m = self.v = self.t = 0

    def step(self, x, grad):
        self.t += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * grad
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * grad**2
        m, v = (x / (1 - beta**self.t) for x, beta in zip((self.m, self.v), self.betas, strict=True))
        return x - self.lr * (m / (np.sqrt(v) + self.eps) + self.weight_decay * x)


class SGD:
    def __init__(self, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.buffer = 0

    def step(self, x, grad):
        grad = grad + self.weight_decay * x
        self.buffer = self.momentum * self.buffer + grad
        return x - self.lr * (grad + self.momentum * self.buffer if self.nesterov else self.buffer)
