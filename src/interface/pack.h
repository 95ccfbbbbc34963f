/* Weights of linear maps, packed into panels. */
#pragma once
#include "arrays.h"

/* Integers in a block of a file: number i has `width` bits of byte at[i], from bit shift[i] up, and above these, if
 * high_width is not 0, so many of another one. Of 8 bits, they have a sign. */
typedef struct {
    uint8_t at[16], shift[16], high_at[16], high_shift[16];
    int width, high_width, add; /* add: to each number; to codes, what fa_pack_rows says */
} fa_bits;

/* A block of a file, as _args/coded.py has it: numbers are a unit times a scale times a code, plus a minimum. */
typedef struct {
    fa_bits codes; /* i counts runs of sixteen codes, whose bytes follow one another */
    fa_bits scales,
        minima; /* width 0: scales are the unit, minima the float16 at `minimum`; else its negative times these */
    int features, bytes; /* of a block; features of 32 or 256, a multiple of `shared` */
    int shared;          /* features that share a scale, 16 or 32 */
    int unit, minimum;   /* bytes where a float16 is; minimum: -1 if there is none */
    int window;          /* scales and minima count sixteen bytes from this one on */
    int exponent;        /* the unit is a byte e, and means 2^(e - 128) */
    int in_order;        /* the high bits of sixteen codes are two bytes, from the lowest bit up */
} fa_layout;

/* Rows of one of the maps that are packed: their output features are begin .. end - 1 of the map's. */
typedef struct {
    const char *data; /* (end - begin, k), or bytes of blocks, side by side in a row */
    int64_t row, col; /* strides in bytes */
    int64_t begin, end;
    fa_dtype dtype;          /* any floating one; of bytes FA_I8 */
    int map;                 /* a gated pair's gate is map 0, the other 1 */
    const fa_layout *layout; /* of blocks of a file, else NULL: all rows of a call are such, or none */
    const int8_t *table;     /* (16), optional: what codes become; else `add` is added */
    int add;
} fa_pack_rows;

/* Weights of one map or two, k input features each, into panels, as _args/packed.py says. Rows in no block are 0. Blocks
 * of a file keep their codes: FA_I4 or FA_Q8. */
typedef struct {
    const fa_pack_rows *blocks;
    unsigned char *bad;           /* (n_blocks), 0: those that have a magnitude of `beyond` or more, or NaN, become 1 */
    char *panels;                 /* at a cache line */
    void *scales, *minima, *sums; /* all as fa_linear_args has them; without features they are not written */
    const void *middles; /* 4 bits: sixteen lanes, the middles of the values of neighbouring codes, the last unused */
    const void *codes;   /* 4 bits: sixteen lanes, the integers that fa_linear_args has */
    double unit;         /* of these integers, as there; of int8 1 */
    double extreme;      /* in blocks: what the element of largest magnitude becomes, or its magnitude, ... */
    int by_magnitude;    /* ... if this is 1 */
    double beyond;
    int64_t n_blocks, k;
    fa_dtype weight;
    int maps;
    int block; /* features that share a scale, in blocks: 32; of a file also 16, where each layout's `shared` is a multiple */
    int zero;              /* blocks of a file in 4 bits: the code of rows in no block */
    const fa_watch *watch; /* optional */
} fa_pack_args;

typedef struct {
    int64_t (*scratch_bytes)(const fa_pack_args *);
    void (*run)(const fa_pack_args *, int64_t begin, int64_t end, void *scratch); /* panels of all maps */
} fa_pack_kernels;
