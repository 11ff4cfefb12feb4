// RMSNorm with the residual add in front and the quantization behind, and its backward.
//
// A thread owns columns, eight (32 in the wide kernels), and walks down the rows of its block four at a time (two in
// the backward, one in the wide backward). Everything is read once and stays in registers: the row sums need one
// barrier a step, and the gradient of the weight adds up in registers. Many small blocks are resident at a time, so
// that some load while others wait at their barrier: 64 registers a thread (128 in the wide kernels, which take more
// than 8192 columns).
//
// The transposed copy is a kernel of its own, which reads the FP8 rows again. A block that holds whole rows, for their
// sums, holds too few of them to write long pieces of the transpose, and short ones cost more than the second reading:
// one byte an element, part of it still in the L2.
//
// The order of every sum is fixed and is that of the reference in norm.py; sums and products are rounded one by one
// (the __f*_rn functions are never contracted), so that results are the same bits everywhere.
//   row: the eight products of a vector as a tree, the vectors of a thread in turn; 32 lanes as a tree of halves; of
//        the warps, w, w + 8, w + 16, w + 24 in turn, then eight as a tree of halves.
//   column: the rows of a block in turn; of the blocks, b, b + 32, b + 64.. in turn, then 32 as a tree of halves.
//
// Matrices are row-major bf16 with 16-byte aligned addresses, the number of columns is a multiple of 16. Every kernel
// argument is 8 bytes wide. common.cuh stands in front of this text.

constexpr int kBlockThreads = 1024;
constexpr int kWideThreads = 512;
constexpr int kWideVectors = 4;
constexpr int kSumsPitch = 40;         // 32 warps and a gap that keeps four rows out of each other's banks
constexpr u32 kAllLanes = 0xffffffffu;

struct ToBf16 {
    static constexpr bool kIsFp8 = false;
};

template <typename Format>
struct ToFp8 : Format {
    static constexpr bool kIsFp8 = true;
};

__device__ __forceinline__ int column_of(int vector) {
    return (vector * (int)blockDim.x + (int)threadIdx.x) * 8;
}

__device__ __forceinline__ i64 index_of(int row, int col, int cols) { return (i64)row * cols + col; }

__device__ __forceinline__ float shuffle_xor(float value, int distance) {
    return __uint_as_float(__shfl_xor_sync(kAllLanes, __float_as_uint(value), distance));
}

__device__ __forceinline__ float shuffle_from(float value, int lane) {
    return __uint_as_float(__shfl_sync(kAllLanes, __float_as_uint(value), lane));
}

__device__ __forceinline__ float sum_8(const float* p) {
    return __fadd_rn(__fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3])),
                     __fadd_rn(__fadd_rn(p[4], p[5]), __fadd_rn(p[6], p[7])));
}

// A thread's sum of each row -> the block's: the lanes 8 * r.. of every warp get that of row r. Steps alternate between
// two buffers: a thread writes one again only after a barrier that all reach after they have read it.
template <int kRows>
__device__ __forceinline__ float reduce_rows(const float* sums, float* buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        float sum = sums[r];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, shuffle_xor(sum, distance));
        if (lane == 0) buffer[r * kSumsPitch + warp] = sum;
    }
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int first = 0; first < 32; first += 8) {
        const int other = first + lane % 8;
        if (other < num_warps && lane / 8 < kRows) total = __fadd_rn(total, buffer[lane / 8 * kSumsPitch + other]);
    }
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) total = __fadd_rn(total, shuffle_xor(total, distance));
    return total;
}

__device__ __forceinline__ Bytes16 load_or_zero(const u16* x, i64 index, bool is_inside) {
    return is_inside ? load_vector<Bf16>(x, index) : Bytes16{{0, 0, 0, 0}};
}

// Into L2, without a register to wait in.
__device__ __forceinline__ void prefetch(const u16* x) {
#ifndef GRAPHRT_EMULATION
    asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
#endif
}

// Makes the compiler take the words for new ones: what it computed from them before a barrier would occupy twice the
// registers across it.
__device__ __forceinline__ void forget_derived(Bytes16& v) {
#ifndef GRAPHRT_EMULATION
    asm volatile("" : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3]));
#endif
}

__device__ __forceinline__ void load_weight(const float* weight, int col, bool is_inside, float* w) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Bytes16 v = is_inside ? load_vector<Fp32>(reinterpret_cast<const u32*>(weight), col + 4 * half)
                                    : Bytes16{{0, 0, 0, 0}};
#pragma unroll
        for (int e = 0; e < 4; e++) w[4 * half + e] = Fp32::decode(v, e);
    }
}

__device__ __forceinline__ Bytes16 add_vectors(const Bytes16& a, const Bytes16& b) {
    float sum[8];
#pragma unroll
    for (int e = 0; e < 8; e++) sum[e] = __fadd_rn(Bf16::decode(a, e), Bf16::decode(b, e));
    return pack_bf16(sum);
}

__device__ __forceinline__ float sum_squares(const Bytes16& v) {
    float squares[8];
#pragma unroll
    for (int e = 0; e < 8; e++) squares[e] = __fmul_rn(Bf16::decode(v, e), Bf16::decode(v, e));
    return sum_8(squares);
}

// Four rows of x (+ residual, stored as residual_out) in the columns of one vector. All loads come first.
__device__ __forceinline__ void load_stream(const u16* x, const u16* residual, u16* residual_out, int row, int rows,
                                            int col, int cols, Bytes16* v) {
    const bool is_in_cols = col < cols;
#pragma unroll
    for (int r = 0; r < 4; r++) v[r] = load_or_zero(x, index_of(row + r, col, cols), is_in_cols && row + r < rows);
    if (residual == nullptr) return;
    Bytes16 added[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        added[r] = load_or_zero(residual, index_of(row + r, col, cols), is_in_cols && row + r < rows);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        v[r] = add_vectors(v[r], added[r]);
        if (is_in_cols && row + r < rows) store_bf16(residual_out, index_of(row + r, col, cols), v[r]);
    }
}

// n of four rows in the columns of one vector, stored as bf16 or as FP8; the merged amax.
template <typename Out>
__device__ __forceinline__ u32 store_normalized(Bytes16* v, const float* rstd, const float* weight, float scale,
                                                void* data, int row, int rows, int col, int cols, u32 amax) {
    const bool is_in_cols = col < cols;
    float w[8];
    load_weight(weight, col, is_in_cols, w);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const bool is_inside = is_in_cols && row + r < rows;
        const i64 index = index_of(row + r, col, cols);
        forget_derived(v[r]);
        float n[8];
#pragma unroll
        for (int e = 0; e < 8; e++) n[e] = __fmul_rn(__fmul_rn(Bf16::decode(v[r], e), rstd[r]), w[e]);
        const Bytes16 rounded = pack_bf16(n);
        if constexpr (Out::kIsFp8) {
            u32 q[2];
            quantize_vector<Bf16, Out>(rounded, scale, q);
            if (is_inside) {
                store_words<2>(static_cast<u8*>(data), index, q);
                amax = merge_amax<Bf16>(amax, rounded);
            }
        } else if (is_inside) {
            store_bf16(static_cast<u16*>(data), index, rounded);
        }
    }
    return amax;
}

// 1 / sqrt(mean + eps), IEEE operations in this order.
__device__ __forceinline__ float rstd_from(float sum, float inv_cols, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fmul_rn(sum, inv_cols), eps)));
}

template <typename Out, int kVectors>
__device__ __forceinline__ void rms_norm(const u16* x, const u16* residual,
                                         const float* weight, u16* __restrict__ residual_out,
                                         float* __restrict__ rstd_out, void* __restrict__ data,
                                         const float* scale_in, const float* scale_inv,
                                         float* __restrict__ scale_inv_out, int* amax_out, int rows, int cols,
                                         int block_rows, float inv_cols, float eps) {
    __shared__ float sums_buffer[2][4 * kSumsPitch];
    __shared__ u32 warp_amax[32];
    float scale = 1.0f;
    if constexpr (Out::kIsFp8) {
        scale = *scale_in;
        if (threadIdx.x < 32) warp_amax[threadIdx.x] = 0;
        copy_scale_inv(scale_inv, scale_inv_out);
    }
    u32 amax = 0;
#pragma unroll 1
    for (int step = 0; step < block_rows / 4; step++) {
        const int row = (int)blockIdx.x * block_rows + 4 * step;
        Bytes16 v[kVectors][4];
        float sums[4];
#pragma unroll
        for (int g = 0; g < kVectors; g++) {
            load_stream(x, residual, residual_out, row, rows, column_of(g), cols, v[g]);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float sum = sum_squares(v[g][r]);
                sums[r] = g == 0 ? sum : __fadd_rn(sums[r], sum);
            }
        }
        const float own_rstd = rstd_from(reduce_rows<4>(sums, sums_buffer[step % 2]), inv_cols, eps);
        const int own_row = row + (int)threadIdx.x / 8;
        if (threadIdx.x < 32 && threadIdx.x % 8 == 0 && own_row < rows) rstd_out[own_row] = own_rstd;
        float rstd[4];
#pragma unroll
        for (int r = 0; r < 4; r++) rstd[r] = shuffle_from(own_rstd, 8 * r);
#pragma unroll
        for (int g = 0; g < kVectors; g++) {
            amax = store_normalized<Out>(v[g], rstd, weight, scale, data, row, rows, column_of(g), cols, amax);
        }
    }
    if constexpr (Out::kIsFp8) {
        if (amax_out == nullptr) return;
        stage_warp_amax(amax, warp_amax);
        __syncthreads();
        merge_block_amax<32>(warp_amax, amax_out);
    }
}

// ---- the transposed copy -------------------------------------------------------------------------------------------
// A tile of 128 rows x 128 columns of FP8 bytes; a thread takes 16 bytes of four neighbouring rows. 4x4 bytes are
// turned with byte permutes and pass through shared memory in 16-byte units of 16 rows, so that rows and columns alike
// move as 128 contiguous bytes. A unit is placed at its index XOR the lane: writes and reads touch all 32 banks once.

constexpr int kTileThreads = 256;
constexpr int kTileRows = 128;
constexpr int kTileCols = 128;
constexpr int kTileLanes = kTileCols / 16;  // threads side by side
constexpr int kTileUnits = kTileRows / 16;  // units of a column

static_assert(kTileThreads == kTileLanes * kTileRows / 4, "a thread takes four rows of the tile");
static_assert(kTileUnits == kTileLanes, "the XOR placement pairs lanes with units");

__device__ __forceinline__ void transpose(const u8* data, u8* __restrict__ transposed, i64 rows,
                                          i64 cols) {
    __shared__ uint4 units[kTileCols * kTileUnits];  // [column][unit], placed by XOR
    const u32 tiles_across = (u32)((cols + kTileCols - 1) / kTileCols);
    const u32 tiles_down = (u32)((rows + kTileRows - 1) / kTileRows);
    const u32 tile = tiles_across * tiles_down - 1 - blockIdx.x;  // the rows written last are the likeliest in the L2
    const i64 tile_row = (i64)(tile / tiles_across) * kTileRows, tile_col = (i64)(tile % tiles_across) * kTileCols;
    const int lane = (int)threadIdx.x % kTileLanes, group = (int)threadIdx.x / kTileLanes;
    const i64 row = tile_row + 4 * group, col = tile_col + 16 * lane;
    Bytes16 v[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const u32* address = reinterpret_cast<const u32*>(data + (row + r) * cols + col);
        v[r] = col < cols && row + r < rows ? load_vector<Fp32>(address, 0) : Bytes16{{0, 0, 0, 0}};
    }
    u32* words = reinterpret_cast<u32*>(units);
    const int unit = (group / 4) ^ lane;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 columns[4];
        transpose_4x4(v[0].word[w], v[1].word[w], v[2].word[w], v[3].word[w], columns);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            words[((16 * lane + 4 * w + c) * kTileUnits + unit) * 4 + group % 4] = columns[c];
        }
    }
    __syncthreads();
    const i64 padded_rows = (rows + 15) / 16 * 16;  // a unit lies inside or outside
#pragma unroll
    for (int i = 0; i < kTileCols * kTileUnits / kTileThreads; i++) {
        const int index = i * kTileThreads + (int)threadIdx.x;
        const int column = index / kTileUnits, column_unit = index % kTileUnits;
        const i64 out_row = tile_col + column, out_col = tile_row + 16 * column_unit;
        if (out_row >= cols || out_col >= padded_rows) continue;
        *reinterpret_cast<uint4*>(transposed + out_row * padded_rows + out_col) =
            units[column * kTileUnits + (column_unit ^ (column / 16))];
    }
}

// The same copy from what the backward has, the stream and each row's rstd: for a forward that leaves it out, so that it
// need not be kept in between. One byte an element more is read.
__device__ __forceinline__ void normalize_transposed(const u16* x, const float* rstd,
                                                     const float* weight, u8* __restrict__ transposed,
                                                     const float* scale_in, i64 rows, i64 cols) {
    __shared__ uint4 units[fp8_tile::kUnits];
    const fp8_tile::Place place = fp8_tile::locate(cols);
    const bool is_in_cols = place.col() < cols;
    const float scale = *scale_in;
    Bytes16 v[4];
    float row_rstd[4], w[8];
    u32 q[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 row = place.row() + r;
        const bool is_inside = is_in_cols && row < rows;
        v[r] = load_or_zero(x, row * cols + place.col(), is_inside);
        row_rstd[r] = is_inside ? rstd[row] : 0.0f;
    }
    load_weight(weight, (int)place.col(), is_in_cols, w);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float n[8];
#pragma unroll
        for (int e = 0; e < 8; e++) n[e] = __fmul_rn(__fmul_rn(Bf16::decode(v[r], e), row_rstd[r]), w[e]);
        quantize_vector<Bf16, E4m3>(pack_bf16(n), scale, q[r]);
        if (!is_in_cols || place.row() + r >= rows) zero_words<2>(q[r]);  // the pad, even under a scale that is not finite
    }
    fp8_tile::put(place, q, units);
    __syncthreads();
    fp8_tile::store(place, units, transposed, rows, cols);
}

// ---- backward ------------------------------------------------------------------------------------------------------
// With gw = grad * weight, k = mean(gw * x) * rstd^2: grad_x = (gw - x * k) * rstd (+ grad_residual), and
// grad_weight = the sum over rows of grad * (x * rstd), a partial sum per block here, in `partials` [blocks, cols].

// The products of one vector in one row, summed.
__device__ __forceinline__ float sum_products(const Bytes16& grad, const Bytes16& x, const float* w) {
    float products[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        products[e] = __fmul_rn(__fmul_rn(Bf16::decode(grad, e), w[e]), Bf16::decode(x, e));
    }
    return sum_8(products);
}

// grad_x of one vector; adds its share of grad_weight to `sums`. Two columns at a time, for the registers.
__device__ __forceinline__ Bytes16 vector_gradient(const Bytes16& grad, const Bytes16& x, const Bytes16& added,
                                                   bool has_residual, const float* weight, float rstd, float k,
                                                   float* sums) {
    Bytes16 result;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float out[2];
#pragma unroll
        for (int e = 2 * w; e < 2 * w + 2; e++) {
            const float d = Bf16::decode(grad, e), value = Bf16::decode(x, e);
            float sum = __fmul_rn(__fsub_rn(__fmul_rn(d, weight[e]), __fmul_rn(value, k)), rstd);
            if (has_residual) sum = __fadd_rn(sum, Bf16::decode(added, e));
            out[e % 2] = sum;
            sums[e] = __fadd_rn(sums[e], __fmul_rn(d, __fmul_rn(value, rstd)));
        }
        result.word[w] = pack_bf16x2(out[0], out[1]);
    }
    return result;
}

__device__ __forceinline__ void store_partials(float* partials, i64 index, const float* sums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float* s = sums + 4 * half;
        *reinterpret_cast<uint4*>(partials + index + 4 * half) =
            uint4{__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]), __float_as_uint(s[3])};
    }
}

template <int kVectors>
__device__ __forceinline__ void rms_norm_backward(const u16* grad_out, const u16* x,
                                                  const float* rstd_in, const float* weight,
                                                  const u16* grad_residual, u16* grad_x,
                                                  float* __restrict__ partials, int rows, int cols, int block_rows,
                                                  float inv_cols) {
    constexpr int kRows = kVectors == 1 ? 2 : 1;  // of a step
    __shared__ float sums_buffer[2][kRows * kSumsPitch];
    float weight_sums[kVectors][8] = {};
    const bool has_residual = grad_residual != nullptr;
    const int first = (int)blockIdx.x * block_rows;
    int parity = 0;
#pragma unroll 1
    for (int row = first; row < first + block_rows && row < rows; row += kRows) {
        Bytes16 grad[kVectors][kRows], stream[kVectors][kRows];
#pragma unroll
        for (int g = 0; g < kVectors; g++) {
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const bool is_inside = column_of(g) < cols && row + r < rows;
                grad[g][r] = load_or_zero(grad_out, index_of(row + r, column_of(g), cols), is_inside);
                stream[g][r] = load_or_zero(x, index_of(row + r, column_of(g), cols), is_inside);
                if (is_inside && has_residual) prefetch(grad_residual + index_of(row + r, column_of(g), cols));
            }
        }
        const int own = threadIdx.x % 32 / 8;  // the row whose sum this thread gets
        const float own_rstd = own < kRows && row + own < rows ? rstd_in[row + own] : 0.0f;
        float sums[kRows];
#pragma unroll
        for (int g = 0; g < kVectors; g++) {
            float w[8];
            load_weight(weight, column_of(g), column_of(g) < cols, w);
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float sum = sum_products(grad[g][r], stream[g][r], w);
                sums[r] = g == 0 ? sum : __fadd_rn(sums[r], sum);
            }
        }
        const float mean = __fmul_rn(reduce_rows<kRows>(sums, sums_buffer[parity]), inv_cols);
        const float own_k = __fmul_rn(__fmul_rn(mean, own_rstd), own_rstd);
        parity ^= 1;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const float rstd = shuffle_from(own_rstd, 8 * r), k = shuffle_from(own_k, 8 * r);
#pragma unroll
            for (int g = 0; g < kVectors; g++) {
                const int col = column_of(g);
                if (col >= cols || row + r >= rows) continue;
                const i64 index = index_of(row + r, col, cols);
                forget_derived(grad[g][r]);
                forget_derived(stream[g][r]);
                const Bytes16 added = load_or_zero(grad_residual, index, has_residual);
                float w[8];
                load_weight(weight, col, true, w);
                store_bf16(grad_x, index, vector_gradient(grad[g][r], stream[g][r], added, has_residual, w, rstd, k,
                                                          weight_sums[g]));
            }
        }
    }
#pragma unroll
    for (int g = 0; g < kVectors; g++) {
        if (column_of(g) < cols) store_partials(partials, (i64)blockIdx.x * cols + column_of(g), weight_sums[g]);
    }
}

// Sums `partials` [num_partials, cols] down its columns, 32 columns a block, 32 threads a column.
__device__ __forceinline__ void sum_partials(const float* partials, float* __restrict__ sums,
                                             i64 num_partials, i64 cols) {
    __shared__ float turned[32][33];  // [thread of the column][column]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 first = (i64)blockIdx.x * 32;
    float sum = 0;
    if (first + lane < cols) {
#pragma unroll 8
        for (i64 b = warp; b < num_partials; b += 32) sum = __fadd_rn(sum, partials[b * cols + first + lane]);
    }
    turned[warp][lane] = sum;
    __syncthreads();
    sum = turned[lane][warp];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, shuffle_xor(sum, distance));
    if (lane == 0 && first + warp < cols) sums[first + warp] = sum;
}

// ---- entry points: graphrt_[wide_]rms_norm_<what it writes>; wide is four vectors a thread -------------------------

#define GRAPHRT_RMS_NORM(name, Out, kVectors, kThreads)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_##name(                                           \
        const u16* x, const u16* residual, const float* weight, u16* residual_out, float* rstd, void* data,          \
        const float* scale, const float* scale_inv, float* scale_inv_out, int* amax, i64 rows, i64 cols,             \
        i64 block_rows, double inv_cols, double eps) {                                                               \
        begin_kernel();                                                                                              \
        rms_norm<Out, kVectors>(x, residual, weight, residual_out, rstd, data, scale, scale_inv, scale_inv_out,      \
                                amax, (int)rows, (int)cols, (int)block_rows, (float)inv_cols, (float)eps);           \
    }

#define GRAPHRT_RMS_NORM_BACKWARD(name, kVectors, kThreads)                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_##name(                                           \
        const u16* grad_out, const u16* x, const float* rstd, const float* weight, const u16* grad_residual,         \
        u16* grad_x, float* partials, i64 rows, i64 cols, i64 block_rows, double inv_cols) {                         \
        begin_kernel();                                                                                              \
        rms_norm_backward<kVectors>(grad_out, x, rstd, weight, grad_residual, grad_x, partials, (int)rows,           \
                                    (int)cols, (int)block_rows, (float)inv_cols);                                    \
    }

GRAPHRT_RMS_NORM(rms_norm_bf16, ToBf16, 1, kBlockThreads)
GRAPHRT_RMS_NORM(rms_norm_e4m3, ToFp8<E4m3>, 1, kBlockThreads)
GRAPHRT_RMS_NORM(rms_norm_e5m2, ToFp8<E5m2>, 1, kBlockThreads)
GRAPHRT_RMS_NORM(wide_rms_norm_bf16, ToBf16, kWideVectors, kWideThreads)
GRAPHRT_RMS_NORM(wide_rms_norm_e4m3, ToFp8<E4m3>, kWideVectors, kWideThreads)
GRAPHRT_RMS_NORM(wide_rms_norm_e5m2, ToFp8<E5m2>, kWideVectors, kWideThreads)
GRAPHRT_RMS_NORM_BACKWARD(rms_norm_backward, 1, kBlockThreads)
GRAPHRT_RMS_NORM_BACKWARD(wide_rms_norm_backward, kWideVectors, kWideThreads)

extern "C" __global__ void __launch_bounds__(kTileThreads) graphrt_rms_norm_transpose(
    const u8* data, u8* transposed, i64 rows, i64 cols) {
    begin_kernel();
    transpose(data, transposed, rows, cols);
}

extern "C" __global__ void __launch_bounds__(fp8_tile::kThreads, 4) graphrt_rms_norm_transposed(
    const u16* x, const float* rstd, const float* weight, u8* transposed, const float* scale, i64 rows, i64 cols) {
    begin_kernel();
    normalize_transposed(x, rstd, weight, transposed, scale, rows, cols);
}

extern "C" __global__ void __launch_bounds__(kBlockThreads) graphrt_rms_norm_sum_partials(
    const float* partials, float* sums, i64 num_partials, i64 cols) {
    begin_kernel();
    sum_partials(partials, sums, num_partials, cols);
}
