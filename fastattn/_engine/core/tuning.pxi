# Sizes that a machine may choose, src/tuning.inc: a part of _core.pyx, which includes it.

LEVEL2_CACHE = fa_level2_cache()  # bytes of it that a core has; 0: the system does not say
fa_tune_for(LEVEL2_CACHE)

# {name: (unit, default, least, most)}, in the order of src/tuning.inc.
SIZES = {fa_size_at(i).name.decode(): (fa_size_at(i).unit.decode(), fa_size_in(&fa_tuned, i)[0], fa_size_at(i).least,
                                       fa_size_at(i).most) for i in range(fa_size_count())}
cdef list _SIZES = list(SIZES)
cdef object _sizes_lock = threading.RLock()
cdef object _before_next_plan = None  # behind the lock
cdef int _sizes_due = False  # atomic: whether there is one


def get_sizes():
    """{name: value} of all sizes, as plans read them."""
    return {name: fa_size_in(&fa_tuned, i)[0] for i, name in enumerate(_SIZES)}


def set_sizes(sizes):
    """Change those that {name: value} names, in their ranges."""
    for name, value in sizes.items():
        _, _, least, most = SIZES[name]
        if not least <= value <= most:
            raise ValueError(f"fastattn: {name} is {value}; expected {least} to {most}")
    for name, value in sizes.items():
        fa_size_in(&fa_tuned, _SIZES.index(name))[0] = value


def before_next_plan(function):
    """Call `function` once, before the next plan is made; None: call nothing."""
    global _before_next_plan
    with _sizes_lock:
        _before_next_plan = function
        fa_set_flag(&_sizes_due, function is not None)


cdef int _choose_sizes() except -1:
    """Run the function that the next plan, and those of other threads, wait for."""
    with _sizes_lock:
        function = _before_next_plan
        if function is not None:
            before_next_plan(None)
            function()
    return 0


cdef const fa_kernels *_kernels(fa_dtype dtype) except NULL:
    """The kernels in use for numbers of `dtype`. Every plan begins here."""
    if fa_flag(&_sizes_due):
        _choose_sizes()
    return _permitted_kernels(dtype)
