/* Measurements of the machine. */
#pragma once
#include "arrays.h"

typedef struct {
    double (*fma_rounds)(int64_t rounds, fa_dtype kind);
    double (*read_bytes)(const char *data, int64_t n);
} fa_peak_kernels;
