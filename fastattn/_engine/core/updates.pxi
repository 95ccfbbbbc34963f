# What optimizers do to parameters: a part of _core.pyx, which includes it.

UPDATE_BLOCK = FA_UPDATE_BLOCK  # as _args/updates.py has it


cdef void *_elements(name, cnp.ndarray array, cnp.ndarray like, bint written) except? NULL:
    """The data of an array of `like`'s size and type, side by side, to be read or `written`; NULL for None."""
    if array is None:
        return NULL
    if written and not cnp.PyArray_ISWRITEABLE(array):
        raise _misfit(name, array, "a writable array")
    return _data(name, array, cnp.PyArray_SIZE(like), cnp.PyArray_TYPE(like))


def update(args):
    """Change the parameters of an UpdateArgs, or fill `args.sums`.

    It is over in milliseconds and is never interrupted: half of the parameters at another step are none.
    """
    cdef fa_update_args a
    cdef Loop loop
    cdef int64_t i, blocks = 0
    cdef fa_dtype lane = FA_F32
    cdef object parameters = args.parameters
    memory = np.zeros(max(1, len(parameters)) * sizeof(fa_parameter), np.uint8)
    cdef fa_parameter *p = <fa_parameter *>cnp.PyArray_DATA(memory)
    memset(&a, 0, sizeof(a))
    a.parameters, a.n_parameters = p, len(parameters)
    _fill_update(&a, args)
    for i, each in enumerate(parameters):
        lane = _dtype(each.grad)
        if lane != _dtype(parameters[0].grad) or (lane != FA_F32 and lane != FA_F64):
            raise _misfit("grad", each.grad, "lanes, as the others are")
        p[i].grad = _elements("grad", each.grad, each.grad, False)
        if a.kind != FA_SQUARES:
            p[i].param = _elements("param", each.param, each.grad, True)
            p[i].first = _elements("first", each.first, each.grad, True)
            p[i].second = _elements("second", each.second, each.grad, True)
            if a.kind == FA_ADAMW and (each.first is None or each.second is None):
                raise ValueError("fastattn: AdamW without moments")
        p[i].n, p[i].block = cnp.PyArray_SIZE(each.grad), blocks
        blocks += (p[i].n + FA_UPDATE_BLOCK - 1) // FA_UPDATE_BLOCK
    if a.kind == FA_SQUARES:
        a.sums = <double *>_elements("sums", args.sums, np.empty(blocks), True)
    loop.kernels, loop.args = _kernels(lane), &a
    loop.n, loop.step = blocks, max(1, fa_tuned.row_task_elements // FA_UPDATE_BLOCK)
    _start(&loop, _rows_update_task, (blocks + loop.step - 1) // loop.step,
           args.num_threads if blocks * FA_UPDATE_BLOCK >= fa_tuned.parallel_elements else 1, 0, 0)
    loop.caller = 0  # it looks for no signals
    with nogil:
        _tasks(&loop, (blocks + loop.step - 1) // loop.step)
    _end(&loop)
