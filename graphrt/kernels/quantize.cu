// Quantize to FP8: q = saturating_cast(x * scale), row-major and, if asked, transposed, with the amax of x on the way.
//
// The work is pure memory traffic, so x is read once and everything else happens in registers. The transposing kernel
// takes a tile of 128 rows x 64 columns. A thread loads 16 bytes from each of four neighbouring rows (all loads before
// the first use), quantizes them, stores the row-major copy straight from registers, turns 4x4 bytes into 4x4 bytes of
// the transpose with byte permutes, and leaves them in shared memory, from where rows of the transpose leave as 16-byte
// stores: 128 contiguous bytes per column of x. A 16-byte unit of shared memory is placed at its index XOR the column
// group, so that both the writes (a warp covers eight column groups) and the reads (eight units of one column) touch
// all 32 banks once.
//
// Every kernel argument is 8 bytes wide: a launcher can pass plain integers. common.cuh stands in front of this text.

constexpr int kThreads = 256;
constexpr int kTileRows = 128;
constexpr int kTileCols = 64;
constexpr int kLaneCols = 8;                     // threads side by side in a tile row
constexpr int kUnits = kTileRows / 16;           // 16-byte units of one transposed row of a tile
constexpr int kLoads = 4;                        // 16-byte loads in flight per thread of the flat kernels

static_assert(kThreads == kLaneCols * kTileRows / 4, "a thread takes four rows of the tile");
static_assert(kUnits == kLaneCols, "the XOR placement pairs column groups with units");

struct Tile {
    i64 row, col;              // its first row and column
    int lane_col, row_group;   // this thread's place: which vectors across, which four rows down
};

// Tiles go across the matrix first.
__device__ __forceinline__ Tile locate_tile(u32 index, i64 cols) {
    const u32 tiles_across = (u32)((cols + kTileCols - 1) / kTileCols);
    const u32 down = index / tiles_across;
    const i64 across = index - down * tiles_across;
    return Tile{(i64)down * kTileRows, across * kTileCols, (int)threadIdx.x % kLaneCols, (int)threadIdx.x / kLaneCols};
}

// With kIsAligned, addresses are 16-byte aligned and cols is a multiple of the vector: one lies inside a row or
// outside. Elements outside the matrix are zeros: they leave the amax alone and become the transposed copy's pad.
template <typename In, bool kIsAligned>
__device__ __forceinline__ Bytes16 load_in_tile(const typename In::Bits* x, i64 row, i64 col, i64 rows, i64 cols) {
    if constexpr (kIsAligned) {
        return row < rows && col < cols ? load_vector<In>(x, row * cols + col) : Bytes16{{0, 0, 0, 0}};
    } else {
        return load_elements<In>(x, row * cols + col, row < rows ? clamp_count(cols - col, In::kVector) : 0);
    }
}

template <int kWords, bool kIsAligned>
__device__ __forceinline__ void store_in_tile(u8* data, i64 row, i64 col, i64 rows, i64 cols, const u32* q) {
    if constexpr (kIsAligned) {
        if (row < rows && col < cols) store_words<kWords>(data, row * cols + col, q);
    } else {
        if (row < rows) store_bytes<kWords>(data, row * cols + col, q, clamp_count(cols - col, 4 * kWords));
    }
}

// x -> data (if there is one), and the transposed tile in `units`; returns the thread's amax.
template <typename In, typename Out, bool kIsAligned>
__device__ __forceinline__ u32 quantize_tile(const Tile& tile, const typename In::Bits* x,
                                             u8* __restrict__ data, const float* scale_in, i64 rows,
                                             i64 cols, u32* unit_words) {
    constexpr int kWords = In::kVector / 4;
    constexpr int kGroupCols = kLaneCols * In::kVector;
    constexpr int kGroups = kTileCols / kGroupCols;
    const i64 row = tile.row + 4 * tile.row_group;
    const i64 col = tile.col + tile.lane_col * In::kVector;
    Bytes16 v[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            v[g][r] = load_in_tile<In, kIsAligned>(x, row + r, col + g * kGroupCols, rows, cols);
        }
    }
    const float scale = *scale_in;
    const int unit = (tile.row_group / 4) ^ tile.lane_col;
    u32 amax = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
        u32 q[4][kWords];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            amax = merge_amax<In>(amax, v[g][r]);
            quantize_vector<In, Out>(v[g][r], scale, q[r]);
            if (data != nullptr) store_in_tile<kWords, kIsAligned>(data, row + r, col + g * kGroupCols, rows, cols, q[r]);
            if (row + r >= rows) zero_words<kWords>(q[r]);  // the pad, even under a scale that is not finite
        }
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            u32 columns[4];
            transpose_4x4(q[0][w], q[1][w], q[2][w], q[3][w], columns);
            const int column = g * kGroupCols + tile.lane_col * In::kVector + 4 * w;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                unit_words[((column + c) * kUnits + unit) * 4 + tile.row_group % 4] = columns[c];
            }
        }
    }
    return amax;
}

// Rows of the transpose leave shared memory. They end at a multiple of 16: a unit lies inside or outside.
template <typename In, bool kIsAligned>
__device__ __forceinline__ void store_transposed(const Tile& tile, const uint4* units, u8* __restrict__ transposed,
                                                 i64 rows, i64 cols) {
    const i64 padded_rows = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kTileCols * kUnits / kThreads; i++) {
        const int index = i * kThreads + (int)threadIdx.x;
        const int column = index / kUnits, unit = index % kUnits;
        const i64 col = tile.col + column, row = tile.row + 16 * unit;
        if (col >= cols || row >= padded_rows) continue;
        const uint4 bytes = units[column * kUnits + (unit ^ (column / In::kVector % kLaneCols))];
        const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
        if constexpr (kIsAligned) {
            store_words<4>(transposed, col * padded_rows + row, words);
        } else {
            store_bytes<4>(transposed, col * padded_rows + row, words, 16);
        }
    }
}

// Tile `index` of one matrix; either of `data` and `transposed` may be left out, and `scale_inv_out`.
template <typename In, typename Out>
__device__ __forceinline__ void quantize_transpose(u32 index, const void* x, void* data, void* transposed,
                                                   const float* scale, const float* scale_inv, float* scale_inv_out,
                                                   int* amax_out, i64 rows, i64 cols, i64 is_aligned) {
    __shared__ uint4 units[kTileCols * kUnits];  // [column][unit of 16 rows], units placed by XOR
    __shared__ u32 warp_amax[kThreads / 32];
    const Tile tile = locate_tile(index, cols);
    const typename In::Bits* x_bits = static_cast<const typename In::Bits*>(x);
    u32* unit_words = reinterpret_cast<u32*>(units);

    const u32 amax =
        is_aligned ? quantize_tile<In, Out, true>(tile, x_bits, static_cast<u8*>(data), scale, rows, cols, unit_words)
                   : quantize_tile<In, Out, false>(tile, x_bits, static_cast<u8*>(data), scale, rows, cols, unit_words);
    if (amax_out != nullptr) stage_warp_amax(amax, warp_amax);
    if (index == 0 && threadIdx.x == 0 && scale_inv_out != nullptr) *scale_inv_out = *scale_inv;
    __syncthreads();
    if (transposed == nullptr) {
        // Nothing leaves shared memory but the amax.
    } else if (is_aligned) {
        store_transposed<In, true>(tile, units, static_cast<u8*>(transposed), rows, cols);
    } else {
        store_transposed<In, false>(tile, units, static_cast<u8*>(transposed), rows, cols);
    }
    if (amax_out != nullptr) merge_block_amax<kThreads / 32>(warp_amax, amax_out);
}

// ---- many matrices in one launch -----------------------------------------------------------------------------------

// One of them, as quantize_table.py writes it: addresses, shape, and whether every vector of it is aligned.
struct Entry {
    i64 x, data, transposed, scale, scale_inv, scale_inv_out, amax, rows, cols, is_aligned;
};

// The compiler cannot know that the table's addresses are of global memory, and would issue slower generic accesses.
template <typename T>
__device__ __forceinline__ T* as_global(i64 address) {
    T* pointer = reinterpret_cast<T*>(address);
#ifndef GRAPHRT_EMULATION
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

// A block takes one tile: `tiles` holds entry << 32 | tile of the entry.
template <typename In, typename Out>
__device__ __forceinline__ void quantize_many(const Entry* entries, const i64* tiles) {
    const i64 word = tiles[blockIdx.x];
    const Entry& entry = entries[word >> 32];
    quantize_transpose<In, Out>((u32)word, as_global<const void>(entry.x), as_global<void>(entry.data),
                                as_global<void>(entry.transposed), as_global<const float>(entry.scale),
                                as_global<const float>(entry.scale_inv), as_global<float>(entry.scale_inv_out),
                                reinterpret_cast<int*>(entry.amax), entry.rows, entry.cols, entry.is_aligned);
}

// ---- flat: row-major alone, or the amax alone ----------------------------------------------------------------------

// A block's share of `count` contiguous elements: kLoads vectors a thread, a block apart, so that a warp reads 512
// contiguous bytes with each load.
template <typename In>
__device__ __forceinline__ i64 flat_index(int load) {
    return (((i64)blockIdx.x * kLoads + load) * kThreads + threadIdx.x) * In::kVector;
}

template <typename In>
__device__ __forceinline__ bool is_whole_block(i64 count, i64 is_aligned) {
    return is_aligned && ((i64)blockIdx.x + 1) * kLoads * kThreads * In::kVector <= count;
}

template <typename In>
__device__ __forceinline__ void load_flat(const typename In::Bits* x, i64 count, bool is_whole, Bytes16* v) {
    if (is_whole) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) v[i] = load_vector<In>(x, flat_index<In>(i));
    } else {
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const i64 index = flat_index<In>(i);
            v[i] = load_elements<In>(x, index, clamp_count(count - index, In::kVector));
        }
    }
}

template <typename In>
__device__ __forceinline__ void record_flat(const Bytes16* v, int* amax_out) {
    __shared__ u32 warp_amax[kThreads / 32];
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kLoads; i++) amax = merge_amax<In>(amax, v[i]);
    stage_warp_amax(amax, warp_amax);
    __syncthreads();
    merge_block_amax<kThreads / 32>(warp_amax, amax_out);
}

template <typename In, typename Out>
__device__ __forceinline__ void quantize_rows(
    const void* x_bytes, void* __restrict__ data_bytes, const float* scale_in,
    const float* scale_inv, float* __restrict__ scale_inv_out, int* __restrict__ amax_out, i64 count,
    i64 is_aligned) {
    constexpr int kWords = In::kVector / 4;
    u8* data = static_cast<u8*>(data_bytes);
    const bool is_whole = is_whole_block<In>(count, is_aligned);
    Bytes16 v[kLoads];
    load_flat<In>(static_cast<const typename In::Bits*>(x_bytes), count, is_whole, v);
    const float scale = *scale_in;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        const i64 index = flat_index<In>(i);
        u32 q[kWords];
        quantize_vector<In, Out>(v[i], scale, q);
        if (is_whole) {
            store_words<kWords>(data, index, q);
        } else {
            store_bytes<kWords>(data, index, q, clamp_count(count - index, In::kVector));
        }
    }
    copy_scale_inv(scale_inv, scale_inv_out);
    if (amax_out != nullptr) record_flat<In>(v, amax_out);
}

template <typename In>
__device__ __forceinline__ void record_amax(const void* x_bytes, int* amax_out, i64 count, i64 is_aligned) {
    Bytes16 v[kLoads];
    load_flat<In>(static_cast<const typename In::Bits*>(x_bytes), count, is_whole_block<In>(count, is_aligned), v);
    record_flat<In>(v, amax_out);
}

// ---- entry points: graphrt_<what>_<input dtype>[_<FP8 dtype>] ------------------------------------------------------

#define GRAPHRT_QUANTIZE(in_name, In, out_name, Out)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_quantize_transpose_##in_name##_##out_name(        \
        const void* x, void* data, void* transposed, const float* scale, const float* scale_inv,                     \
        float* scale_inv_out, int* amax, i64 rows, i64 cols, i64 is_aligned) {                                       \
        begin_kernel();                                                                                              \
        quantize_transpose<In, Out>(blockIdx.x, x, data, transposed, scale, scale_inv, scale_inv_out, amax, rows,    \
                                    cols, is_aligned);                                                               \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_quantize_rows_##in_name##_##out_name(             \
        const void* x, void* data, const float* scale, const float* scale_inv, float* scale_inv_out, int* amax,      \
        i64 count, i64 is_aligned) {                                                                                 \
        begin_kernel();                                                                                              \
        quantize_rows<In, Out>(x, data, scale, scale_inv, scale_inv_out, amax, count, is_aligned);                   \
    }

#define GRAPHRT_INPUT(in_name, In)                                                                                   \
    GRAPHRT_QUANTIZE(in_name, In, e4m3, E4m3)                                                                        \
    GRAPHRT_QUANTIZE(in_name, In, e5m2, E5m2)                                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) graphrt_quantize_many_##in_name##_e4m3(                \
        const Entry* entries, const i64* tiles) {                                                                    \
        begin_kernel();                                                                                              \
        quantize_many<In, E4m3>(entries, tiles);                                                                     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_record_amax_##in_name(                            \
        const void* x, int* amax, i64 count, i64 is_aligned) {                                                       \
        begin_kernel();                                                                                              \
        record_amax<In>(x, amax, count, is_aligned);                                                                 \
    }

GRAPHRT_INPUT(bf16, Bf16)
GRAPHRT_INPUT(fp16, Fp16)
GRAPHRT_INPUT(fp32, Fp32)
