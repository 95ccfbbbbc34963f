/* What differs between instruction sets besides intrinsics. simd.h includes this; but for cpu.c, no other file asks
 * which one it is.
 *
 *     V_BYTES, V_REGISTERS      bytes of a vector; vector registers, which all accumulators below must fit
 *     MR x NV                   accumulators of attention's products, of MR * NV + NV + 1 registers. AVX-512: 8x3,
 *                               12x2, 4x4, 4x6 and 2x8 are behind from 128 keys up. AVX2: 6x2 is 3% behind, with 8
 *                               loads for 12 multiply-adds and not 7; 8x2 spills. NEON: a vector holds but four
 *                               queries. generic: without fused multiply-adds a product takes one register more
 *     LINEAR_ROWS x LINEAR_NV   the same of the layers' matrix product. generic: each number of rows is code to compile
 *     BYTES_ROWS                its rows in int8 by int8: without an instruction for it, the dot product takes registers for
 *                               absolute values, 1 and products between
 *     V_I8_OFFSET               128 where the dot product of bytes takes one side unsigned (see v_dot_i8), or 0
 *     V_I8_DOT                  1 where one instruction multiplies and adds four bytes a lane
 *     V_I8_SQUARES              1 where an instruction multiplies two rows of eight bytes with two columns
 *     STEP_NV                   vectors of a state's columns that a step of linear attention holds, twice */
#if defined FA_GENERIC
#define V_BYTES 16
#define V_REGISTERS 16
#define MR 6
#define NV 2
#define LINEAR_ROWS 4
#define LINEAR_NV 2
#elif defined __AVX512F__ || defined FA_EMULATE_TILES /* whose vectors are as wide on every CPU */
#define V_BYTES 64
#define V_REGISTERS 32
#define MR 8
#define NV 2
#define LINEAR_ROWS 12
#define LINEAR_NV 2
#elif defined __AVX2__
#define V_BYTES 32
#define V_REGISTERS 16
#define MR 4
#define NV 3
#define LINEAR_ROWS 6
#define LINEAR_NV 2
#elif defined __aarch64__
#define V_BYTES 16
#define V_REGISTERS 32
#define MR 4
#define NV 4
#define LINEAR_ROWS 6
#define LINEAR_NV 4
#endif
#define STEP_NV (V_REGISTERS / 4)
#if defined __AVX512VNNI__ || defined __AVXVNNI__
#define V_I8_OFFSET 128
#else
#define V_I8_OFFSET 0
#endif
#if V_I8_OFFSET || (defined __ARM_FEATURE_DOTPROD && !defined FA_GENERIC)
#define V_I8_DOT 1
#else
#define V_I8_DOT 0
#endif
#if defined __ARM_FEATURE_MATMUL_INT8 && !defined FA_GENERIC
#define V_I8_SQUARES 1
#else
#define V_I8_SQUARES 0
#endif
#define BYTES_ROWS (V_I8_DOT || V_BYTES == 16 ? LINEAR_ROWS : V_REGISTERS / 4)
