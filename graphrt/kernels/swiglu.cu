// SwiGLU, forward and backward, over the halves of h = gate | up: out = bf16(silu(gate) * up), and
// grad_h = bf16(grad * up * silu'(gate)) | bf16(grad * silu(gate)). The bf16 result is stored, or quantized to FP8
// row-major and, if asked, transposed, with its amax on the way: it never visits memory in bf16 then. The backward can
// write the transposed copy of the forward's result as well, in e4m3 and with the scale of then: what the weight gradient
// reads need not be kept from the forward.
//
// Pure memory traffic: a block takes a tile of 128 rows x 64 features, a thread 16 bytes of four neighbouring rows of
// each input, all loads before the first use. One exponential and one reciprocal a feature, both approximate
// instructions good to about 2^-22, so that arithmetic stays below half of the time the memory takes.
//
// Matrices are row-major bf16 with 16-byte aligned addresses, and the number of features is a multiple of 16: a vector
// lies inside a row or outside. Every kernel argument is 8 bytes wide. common.cuh stands in front of this text.

constexpr int kThreads = fp8_tile::kThreads;
constexpr float kLog2E = 1.44269504f;

// Where a result goes: bf16, or FP8.
struct ToBf16 {
    static constexpr bool kIsFp8 = false;
};

template <typename Format>
struct ToFp8 : Format {
    static constexpr bool kIsFp8 = true;
};

struct Target {
    void* data;       // [rows, cols]
    u8* transposed;   // [cols, ceil16(rows)] fp8, or null
    float scale;
    i64 rows, cols;
};

// 1 / (1 + 2^(-x log2 e)). Below about -87 it is 0: instructions flush subnormals.
__device__ __forceinline__ float sigmoid(float x) {
#ifdef GRAPHRT_EMULATION
    return 1.0f / (1.0f + std::exp2(x * -kLog2E));
#else
    float exponential, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -kLog2E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exponential));
    return result;
#endif
}

__device__ __forceinline__ Bytes16 swiglu_vector(const Bytes16& gate, const Bytes16& up) {
    float out[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float g = Bf16::decode(gate, e);
        out[e] = g * sigmoid(g) * Bf16::decode(up, e);
    }
    return pack_bf16(out);
}

__device__ __forceinline__ void swiglu_gradient(const Bytes16& gate, const Bytes16& up, const Bytes16& grad,
                                                Bytes16* grad_gate, Bytes16* grad_up) {
    float to_gate[8], to_up[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float g = Bf16::decode(gate, e), d = Bf16::decode(grad, e);
        const float s = sigmoid(g);
        to_up[e] = d * (g * s);
        to_gate[e] = d * Bf16::decode(up, e) * (s * (1.0f + g * (1.0f - s)));
    }
    *grad_gate = pack_bf16(to_gate);
    *grad_up = pack_bf16(to_up);
}

__device__ __forceinline__ Bytes16 load_or_zero(const u16* x, i64 index, bool is_inside) {
    return is_inside ? load_vector<Bf16>(x, index) : Bytes16{{0, 0, 0, 0}};
}

// Stores one vector of the result, as bf16 or as the FP8 words it leaves in q; returns the merged amax.
template <typename Out>
__device__ __forceinline__ u32 store_result(const Target& target, const Bytes16& v, i64 row, i64 col, bool is_inside,
                                            u32 amax, u32* q) {
    const i64 index = row * target.cols + col;
    if constexpr (Out::kIsFp8) {
        quantize_vector<Bf16, Out>(v, target.scale, q);
        if (is_inside) {
            store_words<2>(static_cast<u8*>(target.data), index, q);
        } else {
            zero_words<2>(q);  // the pad, even under a scale that is not finite
        }
        return merge_amax<Bf16>(amax, v);
    } else {
        if (is_inside) store_bf16(static_cast<u16*>(target.data), index, v);
        return 0;
    }
}

// Everyone in the block arrives here. `amax_out` is null when no amax is recorded.
__device__ __forceinline__ void record_block_amax(u32 amax, int* amax_out, u32* warp_amax) {
    if (amax_out == nullptr) return;
    stage_warp_amax(amax, warp_amax);
    __syncthreads();
    merge_block_amax<kThreads / 32>(warp_amax, amax_out);
}

template <typename Out>
__device__ __forceinline__ float load_scale(const float* scale) {
    if constexpr (Out::kIsFp8) return *scale;
    return 1.0f;
}

template <typename Out>
__device__ __forceinline__ void swiglu(const u16* h, void* __restrict__ data, u8* __restrict__ transposed,
                                       const float* scale, const float* scale_inv, float* scale_inv_out, int* amax_out,
                                       i64 rows, i64 features) {
    const fp8_tile::Place place = fp8_tile::locate(features);
    const bool is_in_cols = place.col() < features;
    Bytes16 gate[4], up[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 index = (place.row() + r) * 2 * features + place.col();
        const bool is_inside = is_in_cols && place.row() + r < rows;
        gate[r] = load_or_zero(h, index, is_inside);
        up[r] = load_or_zero(h, index + features, is_inside);
    }
    const Target target = {data, transposed, load_scale<Out>(scale), rows, features};
    u32 amax = 0, q[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 row = place.row() + r;
        const Bytes16 out = swiglu_vector(gate[r], up[r]);
        amax = store_result<Out>(target, out, row, place.col(), is_in_cols && row < rows, amax, q[r]);
    }
    if constexpr (Out::kIsFp8) {
        __shared__ uint4 units[fp8_tile::kUnits];
        __shared__ u32 warp_amax[kThreads / 32];
        copy_scale_inv(scale_inv, scale_inv_out);
        if (transposed != nullptr) {
            fp8_tile::put(place, q, units);
            __syncthreads();
            fp8_tile::store(place, units, transposed, rows, features);
        }
        record_block_amax(amax, amax_out, warp_amax);
    }
}

// kMakesOutput: the forward's result is computed again, from the same sigmoid.
template <typename Out, bool kMakesOutput>
__device__ __forceinline__ void swiglu_backward(const u16* h, const u16* grad_out,
                                                void* __restrict__ data, u8* __restrict__ transposed,
                                                const float* scale, const float* scale_inv, float* scale_inv_out,
                                                int* amax_out, u8* __restrict__ output_transposed,
                                                const float* output_scale, i64 rows, i64 features) {
    const fp8_tile::Place place = fp8_tile::locate(features);
    const bool is_in_cols = place.col() < features;
    Bytes16 gate[4], up[4], grad[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 row = place.row() + r, index = row * 2 * features + place.col();
        const bool is_inside = is_in_cols && row < rows;
        gate[r] = load_or_zero(h, index, is_inside);
        up[r] = load_or_zero(h, index + features, is_inside);
        grad[r] = load_or_zero(grad_out, row * features + place.col(), is_inside);
    }
    const Target target = {data, transposed, load_scale<Out>(scale), rows, 2 * features};
    const float output_factor = kMakesOutput ? *output_scale : 1.0f;
    u32 amax = 0, q_gate[4][2], q_up[4][2], q_output[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 row = place.row() + r;
        const bool is_inside = is_in_cols && row < rows;
        if constexpr (kMakesOutput) {
            quantize_vector<Bf16, E4m3>(swiglu_vector(gate[r], up[r]), output_factor, q_output[r]);
            if (!is_inside) zero_words<2>(q_output[r]);
        }
        Bytes16 grad_gate, grad_up;
        swiglu_gradient(gate[r], up[r], grad[r], &grad_gate, &grad_up);
        amax = store_result<Out>(target, grad_gate, row, place.col(), is_inside, amax, q_gate[r]);
        amax = store_result<Out>(target, grad_up, row, place.col() + features, is_inside, amax, q_up[r]);
    }
    __shared__ uint4 units[2 + kMakesOutput][fp8_tile::kUnits];
    const bool is_transposing = Out::kIsFp8 && transposed != nullptr;
    if constexpr (kMakesOutput) fp8_tile::put(place, q_output, units[2]);
    if constexpr (Out::kIsFp8) {
        copy_scale_inv(scale_inv, scale_inv_out);
        if (is_transposing) {
            fp8_tile::put(place, q_gate, units[0]);
            fp8_tile::put(place, q_up, units[1]);
        }
    }
    if (kMakesOutput || is_transposing) __syncthreads();
    if constexpr (kMakesOutput) fp8_tile::store(place, units[2], output_transposed, rows, features);
    if (is_transposing) {
        fp8_tile::store(place, units[0], transposed, rows, features);
        fp8_tile::store(place, units[1], transposed + features * ((rows + 15) / 16 * 16), rows, features);
    }
    if constexpr (Out::kIsFp8) {
        __shared__ u32 warp_amax[kThreads / 32];
        record_block_amax(amax, amax_out, warp_amax);
    }
}

// ---- entry points: graphrt_swiglu[_backward[_output]]_<what it writes> ---------------------------------------------

#define GRAPHRT_SWIGLU(name, Out)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) graphrt_swiglu_##name(                                 \
        const u16* h, void* data, u8* transposed, const float* scale, const float* scale_inv, float* scale_inv_out,  \
        int* amax, i64 rows, i64 features) {                                                                         \
        begin_kernel();                                                                                              \
        swiglu<Out>(h, data, transposed, scale, scale_inv, scale_inv_out, amax, rows, features);                     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 3) graphrt_swiglu_backward_##name(                        \
        const u16* h, const u16* grad_out, void* data, u8* transposed, const float* scale, const float* scale_inv,   \
        float* scale_inv_out, int* amax, i64 rows, i64 features) {                                                   \
        begin_kernel();                                                                                              \
        swiglu_backward<Out, false>(h, grad_out, data, transposed, scale, scale_inv, scale_inv_out, amax, nullptr,   \
                                    nullptr, rows, features);                                                        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 3) graphrt_swiglu_backward_output_##name(                 \
        const u16* h, const u16* grad_out, void* data, u8* transposed, const float* scale, const float* scale_inv,   \
        float* scale_inv_out, int* amax, u8* output_transposed, const float* output_scale, i64 rows, i64 features) { \
        begin_kernel();                                                                                              \
        swiglu_backward<Out, true>(h, grad_out, data, transposed, scale, scale_inv, scale_inv_out, amax,             \
                                   output_transposed, output_scale, rows, features);                                 \
    }

GRAPHRT_SWIGLU(bf16, ToBf16)
GRAPHRT_SWIGLU(e4m3, ToFp8<E4m3>)
GRAPHRT_SWIGLU(e5m2, ToFp8<E5m2>)
