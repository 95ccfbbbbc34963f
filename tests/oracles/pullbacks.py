"""Gradients of a function in one call."""

from fastattn.grad import vjp


def gradients(function, dout, *arrays, need=None, dmore=None, **options):
    """The gradients `need` of ``function(*arrays, **options)``, by default those of `arrays`."""
    if dmore is not None:
        options["return_state"] = True
    return vjp(function, *arrays, **options)[1](dout, dmore, need=need)
