/* What all calls have: sizes, types, arrays, and a task's question whether to give up. */
#pragma once
#include <stdint.h>

/* Sizes that are a matter of time alone. Whoever changes one does it while no plan is made. */
#define FA_SIZE(name, by_default, least, most) int64_t name;
typedef struct {
#include "tuning.inc"
} fa_tuning;
#undef FA_SIZE

/* What plans read; as for a second-level cache of 1 MB, until somebody sets it. */
extern fa_tuning fa_tuned;

/* Numbers, in NumPy float32 to int8; then what packed weights are: weights.inc.h. FA_I4 is of keys and values, too: int4.inc.h. */
typedef enum { FA_F32, FA_F64, FA_F16, FA_BF16, FA_I8, FA_I4, FA_Q8 } fa_dtype;

/* A task that may last long asks now and then whether to give up. If so, nobody reads the results of the call. */
typedef struct {
    int (*gives_up)(void *caller); /* nonzero: yes; called in any thread, again and again */
    void *caller;
    void (*pause)(int64_t times); /* for a task that waits for another one, which has paused so often; optional */
} fa_watch;

/* A strided array with its batch dimensions flattened. Strides are in bytes; 0 broadcasts. */
typedef struct {
    char *data;           /* NULL: not given */
    const int64_t *batch; /* byte offset of every batch item */
    int64_t head, row, col;
    fa_dtype dtype; /* of q, k, v, out, bias; the others have the one type said below; FA_I8, FA_I4: of k and v alone */
    /* Of k, v and their scales, optional, all the same: key j of the call is row j % block_size of block number
     * blocks[b * blocks_row + j / block_size], and blocks are `block` bytes apart. */
    const int32_t *blocks;
    int64_t block_size, blocks_row, block; /* blocks_row 0: one list of blocks, of whatever item is asked for */
} fa_array;

/* The layers' kernels. Strides of rows are in bytes; a row is contiguous. */

typedef int fa_activation; /* a constant of activations.h */
