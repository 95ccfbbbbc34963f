"""Arrays of a library that shares memory by DLPack alone: NumPy's asarray makes objects of them."""


class OnlyDLPack:
    dtype = "a type of theirs"

    def __init__(self, array, device=(1, 0)):
        self.array, self.shape, self.ndim, self.device = array, array.shape, array.ndim, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def wrapped(arrays):
    """Wrap every array of the dict."""
    return {name: OnlyDLPack(x) for name, x in arrays.items()}
