# Sizes of tasks, src/tuning.inc, which tests change: a part of _core.pyx, which includes it.

LEVEL2_CACHE = fa_level2_cache()  # bytes of it that a core has; 0: the system does not say
fa_tune_for(LEVEL2_CACHE)

# {name: (default, least, most)}, in the order of src/tuning.inc.
SIZES = {fa_size_at(i).name.decode(): (fa_size_in(&fa_tuned, i)[0], fa_size_at(i).least, fa_size_at(i).most)
         for i in range(fa_size_count())}
cdef list _SIZES = list(SIZES)


def get_sizes():
    """{name: value} of all sizes, as plans read them."""
    return {name: fa_size_in(&fa_tuned, i)[0] for i, name in enumerate(_SIZES)}


def set_sizes(sizes):
    """Change those that {name: value} names, in their ranges."""
    for name, value in sizes.items():
        _, least, most = SIZES[name]
        if not least <= value <= most:
            raise ValueError(f"fastattn: {name} is {value}; expected {least} to {most}")
    for name, value in sizes.items():
        fa_size_in(&fa_tuned, _SIZES.index(name))[0] = value
