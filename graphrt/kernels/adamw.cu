// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2) over many tensors, in two launches.
//
// The first, one thread a tensor, counts the step and works out what all elements of a tensor share: bias corrections in
// fp64, clip coefficient, lr * weight_decay. So every chunk of a tensor sees the same step, and no fp64 is left for the
// second launch, which is pure memory traffic: 28 bytes a parameter in fp32. There a block takes one chunk of one tensor;
// a thread has one or two 16-byte loads of each column in flight.
//
// Roundings are written out (__fmul_rn, ...): the compiler contracts nothing, and the result is that of the plain torch
// operations in multi_tensor.py, bit for bit. Averages move by `x + w * (y - x)`, which keeps a small w exact to fp32, where
// `beta * x` would round beta = 0.999 by enough to bias a long average by 1e-5.
//
// Every kernel argument is 8 bytes wide: a launcher can pass plain integers and floats. common.cuh stands in front of this text.

constexpr int kThreads = 256;
constexpr int kChunk = 8192;  // elements; mirrors multi_tensor.py
constexpr int kShared = 4;    // values in front of the tensors' pairs in `scalars`; mirrors multi_tensor.py
constexpr u32 kInfBits = 0x7f800000u;
constexpr float kClipEps = 1e-6f;  // as torch.nn.utils.clip_grad_norm_

enum Column { kParam, kGrad, kMean, kSquare, kMaxSquare };  // kMaxSquare with amsgrad alone

extern "C" __global__ void __launch_bounds__(kThreads) graphrt_adamw_prepare(
    float* const* steps, i64 num_rows, const float* lr, const float* weight_decay, const float* grad_norm,
    const float* max_grad_norm, double beta1, double beta2, float* scalars) {
    begin_kernel();
    const i64 row = (i64)blockIdx.x * kThreads + threadIdx.x;
    const float norm = *grad_norm;
    const bool is_finite = (__float_as_uint(norm) & kAbsMask) < kInfBits;
    if (row == 0) {
        const float ratio = __fdiv_rn(*max_grad_norm, __fadd_rn(norm, kClipEps));
        scalars[0] = is_finite ? 1.0f : 0.0f;
        scalars[1] = ratio > 1.0f ? 1.0f : ratio;
        scalars[2] = __fmul_rn(*lr, *weight_decay);
    }
    if (row >= num_rows || !is_finite) return;
    const float step = __fadd_rn(*steps[row], 1.0f);
    *steps[row] = step;
    scalars[kShared + 2 * row] = (float)((double)*lr / (1.0 - pow(beta1, (double)step)));
    scalars[kShared + 2 * row + 1] = (float)(1.0 / sqrt(1.0 - pow(beta2, (double)step)));
}

// ---- one element ---------------------------------------------------------------------------------------------------

struct Rule {
    float clip;           // multiplies the gradient
    float decay;          // lr * weight_decay
    float step_size;      // lr / (1 - beta1^step)
    float inv_root;       // 1 / sqrt(1 - beta2^step)
    float weight1;        // of the move towards the gradient; see move_towards
    float weight2;        // of the move towards its square
    float eps;
    bool is_maximize;
    bool writes_grads;
};

// x + w * (y - x); for w of a half or more y - (1 - w) * (y - x), given as -(1 - w), so that w = 1 gives y.
__device__ __forceinline__ float move_towards(float x, float y, float weight) {
    return __fadd_rn(weight > 0.0f ? x : y, __fmul_rn(weight, __fsub_rn(y, x)));
}

template <int kColumns>
__device__ __forceinline__ void update_element(float* x, const Rule& rule) {
    x[kGrad] = __fmul_rn(x[kGrad], rule.clip);
    const float grad = rule.is_maximize ? -x[kGrad] : x[kGrad];
    x[kMean] = move_towards(x[kMean], grad, rule.weight1);
    x[kSquare] = move_towards(x[kSquare], __fmul_rn(grad, grad), rule.weight2);
    float square = x[kSquare];
    if constexpr (kColumns > kMaxSquare) {
        square = x[kMaxSquare] < square ? square : x[kMaxSquare];
        x[kMaxSquare] = square;
    }
    const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(square), rule.inv_root), rule.eps);
    const float decayed = __fsub_rn(x[kParam], __fmul_rn(rule.decay, x[kParam]));
    x[kParam] = __fsub_rn(decayed, __fdiv_rn(__fmul_rn(rule.step_size, x[kMean]), denominator));
}

// ---- vectors -------------------------------------------------------------------------------------------------------

// fp32 values to a word of the type, rounded to nearest even.
template <typename In>
__device__ __forceinline__ u32 pack_word(const float* values);

template <>
__device__ __forceinline__ u32 pack_word<Fp32>(const float* values) {
    return __float_as_uint(values[0]);
}

template <>
__device__ __forceinline__ u32 pack_word<Bf16>(const float* values) {
    return pack_bf16x2(values[0], values[1]);
}

template <>
__device__ __forceinline__ u32 pack_word<Fp16>(const float* values) {
#ifdef GRAPHRT_EMULATION
    return emulated_float_to_half(values[0]) | (u32)emulated_float_to_half(values[1]) << 16;
#else
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(values[0]), "f"(values[1]));
    return packed;
#endif
}

template <typename In, int kColumns>
__device__ __forceinline__ void update_vector(Bytes16* columns, const Rule& rule) {
    constexpr int kPerWord = In::kVector / 4;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float values[kPerWord][kColumns];
#pragma unroll
        for (int k = 0; k < kPerWord; k++) {
#pragma unroll
            for (int c = 0; c < kColumns; c++) values[k][c] = In::decode(columns[c], w * kPerWord + k);
            update_element<kColumns>(values[k], rule);
        }
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
            float column[kPerWord];
#pragma unroll
            for (int k = 0; k < kPerWord; k++) column[k] = values[k][c];
            columns[c].word[w] = pack_word<In>(column);
        }
    }
}

// Written out because the compiler cannot know that the table's addresses are of global memory.
template <typename In>
__device__ __forceinline__ Bytes16 load_global(const typename In::Bits* x, int index) {
#ifdef GRAPHRT_EMULATION
    return load_vector<In>(x, index);
#else
    Bytes16 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(__cvta_generic_to_global(x + index)));
    return v;
#endif
}

template <typename In>
__device__ __forceinline__ void store_global(typename In::Bits* x, int index, const Bytes16& v) {
#ifdef GRAPHRT_EMULATION
    *reinterpret_cast<uint4*>(x + index) = uint4{v.word[0], v.word[1], v.word[2], v.word[3]};
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(x + index)),
                 "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
#endif
}

template <typename In>
__device__ __forceinline__ void store_elements(typename In::Bits* x, int index, const Bytes16& v, int count) {
    constexpr int kPerWord = In::kVector / 4;
#pragma unroll
    for (int e = 0; e < In::kVector; e++) {
        if (e < count) x[index + e] = (typename In::Bits)(v.word[e / kPerWord] >> (e % kPerWord * 16));
    }
}

// ---- one chunk -----------------------------------------------------------------------------------------------------

// `count` elements from the addresses in `columns`. A whole chunk is aligned and has nothing to ask; else this is the end of
// a tensor, or one at an address that is not aligned.
template <typename In, int kColumns>
__device__ __forceinline__ void update_chunk(typename In::Bits* const* columns, int count, bool is_aligned,
                                             const Rule& rule) {
    // Vectors of each column in flight: as many as four blocks' registers on a multiprocessor hold.
    constexpr int kLoads = In::kVector == 4 && kColumns == 4 ? 2 : 1;
    constexpr int kStride = kThreads * In::kVector;
    static_assert(kChunk % (kLoads * kStride) == 0, "a whole chunk is a whole number of turns");
    const bool is_whole = is_aligned && count == kChunk;
#pragma unroll 1
    for (int base = (int)threadIdx.x * In::kVector; base < count; base += kLoads * kStride) {
        Bytes16 data[kLoads][kColumns];
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int index = base + i * kStride;
            if (is_whole || (is_aligned && index + In::kVector <= count)) {
#pragma unroll
                for (int c = 0; c < kColumns; c++) data[i][c] = load_global<In>(columns[c], index);
            } else {
#pragma unroll
                for (int c = 0; c < kColumns; c++) data[i][c] = load_elements<In>(columns[c], index, count - index);
            }
        }
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int index = base + i * kStride;
            const bool is_vector = is_whole || (is_aligned && index + In::kVector <= count);
            update_vector<In, kColumns>(data[i], rule);
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
                if (c == kGrad && !rule.writes_grads) continue;
                if (is_vector) {
                    store_global<In>(columns[c], index, data[i][c]);
                } else {
                    store_elements<In>(columns[c], index, data[i][c], count - index);
                }
            }
        }
    }
}

template <typename In, int kColumns>
__device__ __forceinline__ void adamw(const i64* pointers, const i64* sizes, const i64* chunks, i64 num_rows,
                                      const float* scalars, double weight1, double weight2, double eps,
                                      i64 is_maximize, i64 writes_grads) {
    const i64 entry = chunks[blockIdx.x];
    if (scalars[0] == 0.0f) return;  // the gradient is not finite
    const i64 row = entry >> 32, first = (entry & 0xffffffff) * kChunk;
    typename In::Bits* columns[kColumns];
    i64 address_bits = 0;
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
        const i64 address = pointers[c * num_rows + row] + first * (i64)sizeof(typename In::Bits);
        columns[c] = reinterpret_cast<typename In::Bits*>(address);
        address_bits |= address;
    }
    const i64 num_left = sizes[row] - first;
    const int count = (int)(num_left < kChunk ? num_left : kChunk);
    const bool is_aligned = address_bits % 16 == 0;

    Rule rule;
    rule.clip = scalars[1];
    rule.decay = scalars[2];
    rule.step_size = scalars[kShared + 2 * row];
    rule.inv_root = scalars[kShared + 2 * row + 1];
    rule.weight1 = (float)weight1;
    rule.weight2 = (float)weight2;
    rule.eps = (float)eps;
    rule.is_maximize = is_maximize != 0;
    rule.writes_grads = writes_grads != 0 && rule.clip != 1.0f;  // a factor of one changes nothing

    update_chunk<In, kColumns>(columns, count, is_aligned, rule);
}

// ---- entry points: graphrt_adamw[_amsgrad]_<dtype> -----------------------------------------------------------------

#define GRAPHRT_ADAMW(name, In, kColumns)                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) graphrt_adamw_##name(                                  \
        const i64* pointers, const i64* sizes, const i64* chunks, i64 num_rows, const float* scalars,                \
        double weight1, double weight2, double eps, i64 is_maximize, i64 writes_grads) {                             \
        begin_kernel();                                                                                              \
        adamw<In, kColumns>(pointers, sizes, chunks, num_rows, scalars, weight1, weight2, eps, is_maximize,          \
                            writes_grads);                                                                           \
    }

GRAPHRT_ADAMW(bf16, Bf16, 4)
GRAPHRT_ADAMW(fp16, Fp16, 4)
GRAPHRT_ADAMW(fp32, Fp32, 4)
GRAPHRT_ADAMW(amsgrad_bf16, Bf16, 5)
GRAPHRT_ADAMW(amsgrad_fp16, Fp16, 5)
GRAPHRT_ADAMW(amsgrad_fp32, Fp32, 5)
