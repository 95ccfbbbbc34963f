# Checks of arrays, and batch tables: a part of _core.pyx, which includes it.

cdef int _numbers[FA_I8]  # NumPy's of floating types; -1 before the first array of bfloat16, which ml_dtypes adds
memset(_numbers, 0xff, sizeof(_numbers))
_numbers[<int>FA_F32], _numbers[<int>FA_F64], _numbers[<int>FA_F16] = cnp.NPY_FLOAT, cnp.NPY_DOUBLE, cnp.NPY_FLOAT16


cdef fa_dtype _dtype(cnp.ndarray array) except *:
    cdef int number = cnp.PyArray_TYPE(array), dtype
    for dtype in range(<int>FA_I8):
        if _numbers[dtype] == number:
            return <fa_dtype>dtype
    dtype = _DTYPES.get(array.dtype.name, FA_I8)
    if dtype >= FA_I8:
        raise TypeError(f"no kernel reads {array.dtype}")
    _numbers[dtype] = number
    return <fa_dtype>dtype


cdef fa_dtype _lane(fa_dtype dtype) noexcept:
    """The lane type: what numbers of `dtype` are accumulated in, and their parameters are of."""
    return FA_F64 if dtype == FA_F64 else FA_F32


cdef int _lane_type(fa_dtype dtype) noexcept:
    """NumPy's number of the lane type."""
    return cnp.NPY_DOUBLE if dtype == FA_F64 else cnp.NPY_FLOAT


cdef int _type(fa_dtype dtype) noexcept:
    """NumPy's number of a type of rows; of bfloat16 once there was an array of it."""
    return _numbers[<int>dtype]


cdef object _misfit(name, array, expected):
    """The error that ends a call before C reads beyond an array.

    Callers have checked what users pass; this is about arrays that were changed since.
    """
    return ValueError(f"fastattn: {name} has shape {array.shape}, strides {array.strides} and dtype {array.dtype};"
                      f" expected {expected}")


cdef void *_data(name, cnp.ndarray array, int64_t size, int type_num) except? NULL:
    """The data of an array of `size` elements of a type, side by side; NULL for None."""
    if array is None:
        return NULL
    if not (cnp.PyArray_SIZE(array) == size and cnp.PyArray_EquivTypenums(cnp.PyArray_TYPE(array), type_num)
            and cnp.PyArray_ISCARRAY_RO(array)):
        raise _misfit(name, array, f"{size} elements of {cnp.PyArray_DescrFromType(type_num)}, side by side")
    return cnp.PyArray_DATA(array)


cdef class _Tables:
    """Memory for the batch tables of one call's operands: the byte offset of every batch item in each."""

    cdef int64_t *memory
    cdef int64_t batch, items  # of the batch, and of a table
    cdef int n, used
    cdef tuple shape  # of the batch
    cdef cnp.ndarray kept  # what was made for a table, and nobody else holds

    def __cinit__(self, tuple shape, int n, bint filled=True):
        """Room for n tables; they stay empty unless `filled`: some callers need no batch offsets."""
        self.shape, self.n, self.batch = shape, n, 1
        for size in shape:
            self.batch *= size
        self.items = self.batch if filled else 0
        if self.items < INT64_MAX // (n * <int64_t>sizeof(int64_t)) - 1:
            self.memory = <int64_t *>PyMem_RawMalloc(n * (self.items + 1) * sizeof(int64_t))
        if self.memory == NULL:
            raise MemoryError(f"fastattn: no memory for the tables of {self.batch} batch items")

    def __dealloc__(self):
        PyMem_RawFree(self.memory)

    cdef int64_t *next(self) except NULL:
        """The next table."""
        if self.used == self.n:
            raise IndexError(f"fastattn: there is room for {self.n} batch tables")
        self.used += 1
        return self.memory + (self.used - 1) * self.items

    cdef void set(self, fa_array *x, name, cnp.ndarray array, int type_num, int core, int64_t n0=1, int64_t n1=1,
                  int64_t n2=1, bint contiguous=False) except *:
        """Point `x` at `array`, whose last `core` axes are the first of (head, row, col), of n0, n1 and n2 elements.

        The axes before those are the batch's; axes of length 1 broadcast. `contiguous`: the last one has to be.
        None is an option that is off: `x` stays as it is.
        """
        if array is None:
            return
        cdef int own = cnp.PyArray_NDIM(array) - core, i, n_batch = len(self.shape)
        cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
        cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
        cdef int64_t b, rest, size, offset
        cdef int64_t *counts = [n0, n1, n2]
        cdef int64_t *step = [0, 0, 0]
        cdef bint fits = 0 <= own <= n_batch and cnp.PyArray_ISBEHAVED_RO(array)
        fits = fits and cnp.PyArray_EquivTypenums(cnp.PyArray_TYPE(array), type_num)
        for i in range(core if fits else 0):
            fits = fits and (shape[own + i] == counts[i] or shape[own + i] == 1)
            step[i] = strides[own + i] if shape[own + i] != 1 else 0
        if contiguous and fits and counts[core - 1] > 1 and cnp.PyArray_SIZE(array):
            fits = step[core - 1] == cnp.PyArray_ITEMSIZE(array)
        for i in range(own if fits else 0):
            size = self.shape[n_batch - own + i]
            fits = fits and (shape[i] == size or shape[i] == 1)
        if not fits:
            how = ", the last axis contiguous" if contiguous else ""
            raise _misfit(name, array, f"what broadcasts to {(*self.shape, *(n0, n1, n2)[:core])}{how}")
        x.data = <char *>cnp.PyArray_DATA(array)
        x.batch = self.next()
        x.head, x.row, x.col = step[0], step[1], step[2]
        for b in range(self.items):
            rest, offset = b, 0
            for i in range(own):  # from the last batch axis to the first
                size = self.shape[n_batch - 1 - i]
                if shape[own - 1 - i] != 1:
                    offset += rest % size * strides[own - 1 - i]
                rest //= size
            (<int64_t *>x.batch)[b] = offset

    cdef void begin(self, fa_array *x, const int64_t *begins) noexcept:
        """Let each item of the batch begin at its sequence's row of `x`, where that is given."""
        cdef int64_t i
        if x.data != NULL:
            for i in range(self.items):
                (<int64_t *>x.batch)[i] += begins[i] * x.row

    cdef void set_rows(self, fa_array *x, name, cnp.ndarray array, int64_t heads, int64_t length,
                       int64_t width, bint scaled=False, bint blocks=False) except *:
        """Like `set`, for an operand (..., heads, length, width) of any type that kernels read, its rows contiguous.

        With `scaled`, that is int8. With `blocks` and without scales, it may be int4, (..., heads, length, bytes).
        """
        if array is None:
            return
        if blocks and not scaled and cnp.PyArray_TYPE(array) == cnp.NPY_VOID:
            if width % 32 or array.dtype != INT4:
                raise _misfit(name, array, f"int4, {width} numbers")
            x.dtype = FA_I4
            self.set(x, name, array, cnp.NPY_VOID, 3, heads, length, columns(INT4, width), True)
            return
        if scaled and cnp.PyArray_TYPE(array) != cnp.NPY_INT8:
            raise _misfit(name, array, "int8, which has scales")
        x.dtype = FA_I8 if scaled else _dtype(array)
        self.set(x, name, array, cnp.PyArray_TYPE(array), 3, heads, length, width, True)
