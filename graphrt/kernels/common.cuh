// What the kernels share: element types, 16-byte loads, FP8 conversion, the amax of a block, the 4x4 byte transpose.
// Put in front of each source before it is compiled: NVRTC gets one text, and needs no headers.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

[[maybe_unused]] constexpr u32 kAbsMask = 0x7fffffffu;

struct Bytes16 {
    u32 word[4];
};

// ---- the begin of a kernel -----------------------------------------------------------------------------------------

// First in every entry point. Kernels are launched so that one may begin while the kernel before it on the stream still
// runs (programmatic dependent launch): it waits here until everything before it is finished and can be seen, and lets
// the next one begin likewise once all of its own blocks have. Memory that another kernel writes or reads must not be
// touched before, nor through the non-coherent path (ld.global.nc): that assumes that nobody writes while the grid runs.
__device__ __forceinline__ void begin_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- element types -------------------------------------------------------------------------------------------------

struct Bf16 {
    typedef u16 Bits;
    static constexpr int kVector = 8;  // elements in 16 bytes
    static __device__ __forceinline__ float decode(const Bytes16& v, int e) {
        const u32 word = v.word[e / 2];
        return __uint_as_float(e % 2 ? word & 0xffff0000u : word << 16);
    }
};

struct Fp16 {
    typedef u16 Bits;
    static constexpr int kVector = 8;
    static __device__ __forceinline__ float decode(const Bytes16& v, int e) {
        const u16 bits = (u16)(v.word[e / 2] >> (e % 2 * 16));
#ifdef GRAPHRT_EMULATION
        return emulated_half_to_float(bits);
#else
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
#endif
    }
};

struct Fp32 {
    typedef u32 Bits;
    static constexpr int kVector = 4;
    static __device__ __forceinline__ float decode(const Bytes16& v, int e) { return __uint_as_float(v.word[e]); }
};

// satfinite clamps to the largest finite value, inf too, and turns NaN into 0x7f. A clamp before it with fminf and
// fmaxf would turn NaN into a number.
struct E4m3 {
    static __device__ __forceinline__ u32 pack2(float low, float high) {
#ifdef GRAPHRT_EMULATION
        return emulated_e4m3x2(low, high);
#else
        u16 packed;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(packed) : "f"(low), "f"(high));
        return packed;
#endif
    }
};

struct E5m2 {
    static __device__ __forceinline__ u32 pack2(float low, float high) {
#ifdef GRAPHRT_EMULATION
        return emulated_e5m2x2(low, high);
#else
        u16 packed;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(packed) : "f"(low), "f"(high));
        return packed;
#endif
    }
};

// ---- 16 bytes in, FP8 words out ------------------------------------------------------------------------------------

template <typename In>
__device__ __forceinline__ Bytes16 load_vector(const typename In::Bits* x, i64 index) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + index);
    return Bytes16{{v.x, v.y, v.z, v.w}};
}

// The first `count` elements of a vector one by one, zeros for the rest: for tails and addresses that are not aligned.
template <typename In>
__device__ __forceinline__ Bytes16 load_elements(const typename In::Bits* x, i64 index, i64 count) {
    constexpr int kPerWord = In::kVector / 4;
    Bytes16 v = {{0, 0, 0, 0}};
#pragma unroll
    for (int e = 0; e < In::kVector; e++) {
        if (e < count) v.word[e / kPerWord] |= (u32)x[index + e] << (e % kPerWord * 16);
    }
    return v;
}

template <typename In>
__device__ __forceinline__ u32 merge_amax(u32 amax, const Bytes16& v) {
#pragma unroll
    for (int e = 0; e < In::kVector; e++) {
        const u32 bits = __float_as_uint(In::decode(v, e)) & kAbsMask;
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

template <typename In, typename Out>
__device__ __forceinline__ void quantize_vector(const Bytes16& v, float scale, u32* q) {
#pragma unroll
    for (int w = 0; w < In::kVector / 4; w++) {
        const u32 low = Out::pack2(In::decode(v, 4 * w) * scale, In::decode(v, 4 * w + 1) * scale);
        const u32 high = Out::pack2(In::decode(v, 4 * w + 2) * scale, In::decode(v, 4 * w + 3) * scale);
        q[w] = low | high << 16;
    }
}

template <int kWords>
__device__ __forceinline__ void store_words(u8* out, i64 index, const u32* words) {
    if constexpr (kWords == 2) {
        *reinterpret_cast<uint2*>(out + index) = uint2{words[0], words[1]};
    } else if constexpr (kWords == 4) {
        *reinterpret_cast<uint4*>(out + index) = uint4{words[0], words[1], words[2], words[3]};
    } else {
        static_assert(kWords == 1, "1, 2 or 4 words");
        *reinterpret_cast<u32*>(out + index) = words[0];
    }
}

template <int kWords>
__device__ __forceinline__ void zero_words(u32* words) {
#pragma unroll
    for (int w = 0; w < kWords; w++) words[w] = 0;
}

template <int kWords>
__device__ __forceinline__ void store_bytes(u8* out, i64 index, const u32* words, i64 count) {
#pragma unroll
    for (int b = 0; b < 4 * kWords; b++) {
        if (b < count) out[index + b] = (u8)(words[b / 4] >> (b % 4 * 8));
    }
}

// ---- amax of a block -----------------------------------------------------------------------------------------------
// The bits of non-negative floats order as integers do, with NaN above inf: an integer maximum loses no NaN.

__device__ __forceinline__ void stage_warp_amax(u32 amax, u32* warp_amax) {
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
}

// After a barrier behind stage_warp_amax: one atomic a block.
template <int kWarps>
__device__ __forceinline__ void merge_block_amax(const u32* warp_amax, int* amax_out) {
    if (threadIdx.x != 0) return;
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) amax = warp_amax[w] > amax ? warp_amax[w] : amax;
    atomicMax(amax_out, (int)amax);
}

__device__ __forceinline__ void copy_scale_inv(const float* scale_inv, float* scale_inv_out) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv_out = *scale_inv;
}

// ---- row-major and transposed --------------------------------------------------------------------------------------

// Four words, one per row, of four columns each -> four words, one per column, of four rows each.
__device__ __forceinline__ void transpose_4x4(u32 r0, u32 r1, u32 r2, u32 r3, u32* columns) {
    const u32 low01 = __byte_perm(r0, r1, 0x5140), high01 = __byte_perm(r0, r1, 0x7362);
    const u32 low23 = __byte_perm(r2, r3, 0x5140), high23 = __byte_perm(r2, r3, 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

__device__ __forceinline__ i64 clamp_count(i64 count, i64 largest) {
    return count < 0 ? 0 : count > largest ? largest : count;
}

// ---- bf16 out ------------------------------------------------------------------------------------------------------

// Two floats to bf16, to nearest even, the first in the low half; NaN becomes 0x7fff.
__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
#ifdef GRAPHRT_EMULATION
    return emulated_bf16x2(low, high);
#else
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
    return packed;
#endif
}

__device__ __forceinline__ Bytes16 pack_bf16(const float* values) {
    Bytes16 v;
#pragma unroll
    for (int w = 0; w < 4; w++) v.word[w] = pack_bf16x2(values[2 * w], values[2 * w + 1]);
    return v;
}

__device__ __forceinline__ void store_bf16(u16* out, i64 index, const Bytes16& v) {
    *reinterpret_cast<uint4*>(out + index) = uint4{v.word[0], v.word[1], v.word[2], v.word[3]};
}

// ---- the transposed copy of FP8 words that threads of a block hold --------------------------------------------------

// Two words a row, four rows of eight columns -> eight words, one per column, of four rows each.
__device__ __forceinline__ void transpose_4x8(const u32 (*q)[2], u32* columns) {
    transpose_4x4(q[0][0], q[1][0], q[2][0], q[3][0], columns);
    transpose_4x4(q[0][1], q[1][1], q[2][1], q[3][1], columns + 4);
}

// A tile of 128 rows x 64 columns for 256 threads, each of which holds four rows of eight columns. It passes through
// shared memory in 16-byte units of 16 rows, so that a column leaves as 128 contiguous bytes. A unit is placed at its
// index XOR the column group: writes and reads touch all 32 banks once.
namespace fp8_tile {

[[maybe_unused]] constexpr int kThreads = 256;
[[maybe_unused]] constexpr int kRows = 128;
[[maybe_unused]] constexpr int kCols = 64;
[[maybe_unused]] constexpr int kLanes = kCols / 8;      // threads side by side
[[maybe_unused]] constexpr int kColUnits = kRows / 16;  // units of a column
[[maybe_unused]] constexpr int kUnits = kCols * kColUnits;

struct Place {
    i64 tile_row, tile_col;  // first row and column of the tile
    int lane, group;         // this thread's columns are 8 * lane.., its rows 4 * group..
    __device__ __forceinline__ i64 row() const { return tile_row + 4 * group; }
    __device__ __forceinline__ i64 col() const { return tile_col + 8 * lane; }
};

// Tiles go across the matrix first.
__device__ __forceinline__ Place locate(i64 cols) {
    const u32 tiles_across = (u32)((cols + kCols - 1) / kCols);
    const u32 down = blockIdx.x / tiles_across;
    const i64 across = blockIdx.x - down * tiles_across;
    return Place{(i64)down * kRows, across * kCols, (int)threadIdx.x % kLanes, (int)threadIdx.x / kLanes};
}

__device__ __forceinline__ void put(const Place& place, const u32 (*q)[2], uint4* units) {
    u32* words = reinterpret_cast<u32*>(units);
    const int unit = (place.group / 4) ^ place.lane;
    u32 columns[8];
    transpose_4x8(q, columns);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        words[((8 * place.lane + c) * kColUnits + unit) * 4 + place.group % 4] = columns[c];
    }
}

// After a barrier behind put. `transposed` is [cols, ceil16(rows)], 16-byte aligned.
__device__ __forceinline__ void store(const Place& place, const uint4* units, u8* transposed, i64 rows, i64 cols) {
    const i64 padded_rows = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kUnits / kThreads; i++) {
        const int index = i * kThreads + (int)threadIdx.x;
        const int column = index / kColUnits, unit = index % kColUnits;
        const i64 col = place.tile_col + column, row = place.tile_row + 16 * unit;
        if (col >= cols || row >= padded_rows) continue;
        *reinterpret_cast<uint4*>(transposed + col * padded_rows + row) =
            units[column * kColUnits + (unit ^ (column / 8))];
    }
}

}  // namespace fp8_tile
