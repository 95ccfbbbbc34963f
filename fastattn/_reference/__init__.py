"""The NumPy twins of the kernels: the readable definition of each, and what runs without compiled kernels."""
