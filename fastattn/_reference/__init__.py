"""The NumPy twins of the kernels: readable, and what runs where nothing was compiled."""
