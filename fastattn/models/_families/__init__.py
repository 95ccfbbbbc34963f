"""Families of models: each has a table of the names of its tensors, and a function that builds it."""
