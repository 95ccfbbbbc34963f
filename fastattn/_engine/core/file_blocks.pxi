# Formats of blocks of files, for the kernels: a part of _core.pyx, which includes it.

cdef int _set_places(uint8_t *at, uint8_t *shift, bits, int64_t count, int64_t run, int64_t first,
                     int64_t n_bytes) except -1:
    """Where each `run` of `count` integers begins, within n_bytes from `first` on. Returns whether runs are in order.

    The integers of a run lie in bytes that follow one another, at one bit; or, in order, eight in a byte.
    """
    cdef int64_t i, size = run
    cdef int in_order = False
    places = bits.places()
    if len(places) != count or count > 16 * run:
        raise ValueError(f"fastattn: {len(places)} integers in a block; expected {count}, at most {16 * run}")
    if run > 1 and places[1][0] == places[0][0]:
        in_order, size = True, run // 8
    for i in range(count // run):
        byte, bit = places[i * run]
        expected = [(byte + j // 8, j % 8) if in_order else (byte + j, bit) for j in range(run)]
        if (places[i * run:(i + 1) * run] != expected or not first <= byte <= first + n_bytes - size
                or not 0 <= bit <= 8 - bits.width):
            raise ValueError(f"fastattn: integers of a block begin at bit {bit} of byte {byte}; expected other places")
        at[i], shift[i] = byte - first, bit
    return in_order


cdef int _set_bits(fa_bits *to, integers, int64_t count, int64_t run, int64_t first, int64_t n_bytes) except -1:
    """`count` integers of a block; see `_set_places`. Returns whether their high bits are in order."""
    to.width, to.add = integers.low.width, -integers.below
    if _set_places(to.at, to.shift, integers.low, count, run, first, n_bytes):
        raise ValueError("fastattn: low bits of a block are in order; expected high ones alone")
    if integers.high is None:
        return False
    to.high_width = integers.high.width
    return _set_places(to.high_at, to.high_shift, integers.high, count, run, first, n_bytes)


cdef dict _LAYOUTS = {}  # by their ids: layouts, and the memory of their fa_layout


cdef const fa_layout *_layout(layout) except NULL:
    """The fa_layout of a Layout, which stays."""
    cdef fa_layout *f
    cdef int64_t scales
    kept = _LAYOUTS.get(id(layout))
    if kept is not None:
        return <const fa_layout *>cnp.PyArray_DATA(<cnp.ndarray>kept[1])
    memory = np.zeros(sizeof(fa_layout), np.uint8)
    f = <fa_layout *>cnp.PyArray_DATA(memory)
    f.features, f.bytes, f.shared = layout.features, layout.nbytes, layout.shared
    f.unit, f.exponent, f.minimum = layout.unit, layout.exponent, -1 if layout.minimum is None else layout.minimum
    scales = f.features // f.shared
    if (f.features not in (32, 256) or f.shared not in (16, 32) or (layout.scales is None) != (scales == 1)
            or not 0 <= f.unit <= f.bytes - (1 if f.exponent else 2) or f.minimum > f.bytes - 2):
        raise ValueError(f"fastattn: blocks of {f.features} features in {f.bytes} bytes, {f.shared} to a scale")
    f.in_order = _set_bits(&f.codes, layout.codes, f.features, 16, 0, f.bytes)
    if layout.scales is not None:
        bits = [x for integers in (layout.scales, layout.minima) if integers is not None for x in integers[:2]]
        f.window = min(f.bytes - 16, min([run[0] for x in bits if x is not None for run in x.runs]))
        _set_bits(&f.scales, layout.scales, scales, 1, f.window, 16)
        if layout.minima is not None:
            _set_bits(&f.minima, layout.minima, scales, 1, f.window, 16)
        if f.bytes < 64 or (f.minimum >= 0) != (layout.minima is not None):
            raise ValueError(f"fastattn: scales of scales in {f.bytes} bytes, minimum {f.minimum}")
    # Of several threads that make it, all take the first one's.
    kept = _LAYOUTS.setdefault(id(layout), (layout, memory))
    return <const fa_layout *>cnp.PyArray_DATA(<cnp.ndarray>kept[1])


cdef void _set_file_blocks(fa_pack_rows *to, block, stored, int64_t k) except *:
    """Rows of a file's blocks; `stored` is what their codes become, a table or None."""
    cdef cnp.ndarray array = block.array
    to.layout = _layout(block.layout)
    if (k % to.layout.features or cnp.PyArray_TYPE(array) != cnp.NPY_UINT8
            or cnp.PyArray_DIMS(array)[1] != k // to.layout.features * to.layout.bytes
            or (k and cnp.PyArray_STRIDES(array)[1] != 1)):
        raise _misfit(block.name, array, f"bytes of blocks of {k} features, rows contiguous")
    to.table = <const int8_t *>_data("table", stored, 16, cnp.NPY_INT8)
