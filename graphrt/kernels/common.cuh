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
