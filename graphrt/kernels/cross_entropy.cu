// Cross-entropy of rows of logits, and its gradient in the place of the logits.
//
// Forward: a block reads its row once. A thread keeps a running maximum and the running sum of exp(x - maximum); for
// every 64 bytes it takes their maximum first, so the sum is rescaled once for many elements. Threads merge in a fixed
// order. One read from memory is all there is to win: a row in shared memory would cost occupancy and save no byte.
// The loss is (maximum - logit of the label) + log(sum), not log-sum-exp minus logit: the first difference is exact where
// the logits are large and close, the second has rounded.
//
// Backward: elementwise, four vectors in flight per thread, and never an element read by another thread than the one
// that overwrites it.
//
// exp(x) is ex2.approx(x * log2(e)): a relative error of at most 2^-22 from the instruction and |x| * 2^-23 from the
// rounded product; an element with a large |x| is a small part of the sum. common.cuh stands in front of this text.

constexpr int kLossThreads = 256;
constexpr int kLossWarps = kLossThreads / 32;
constexpr int kLossLoads = 4;    // 16-byte loads in flight per thread
constexpr int kLossScalars = 8;  // loads in flight per thread in rows that are not aligned to 16 bytes

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ float exp_approx(float x) {
    const float scaled = x * 1.44269504f;
#ifdef GRAPHRT_EMULATION
    return exp2f(scaled);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(scaled));
    return result;
#endif
}

template <typename In>
__device__ __forceinline__ float read_logit(const typename In::Bits* row, i64 index) {
    return In::decode(load_elements<In>(row, index, 1), 0);
}

// ---- forward -------------------------------------------------------------------------------------------------------

// sum of exp(x - maximum); without an element, or with none above -inf, maximum is -inf and sum 0.
struct Partial {
    float maximum, sum;
};

// What to take off before the exponential: -inf minus -inf would be NaN.
__device__ __forceinline__ float finite_base(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

template <typename In, int kVectors>
__device__ __forceinline__ Partial merge_vectors(const Partial& partial, const Bytes16* v) {
    float maximum = partial.maximum;
#pragma unroll
    for (int i = 0; i < kVectors; i++) {
#pragma unroll
        for (int e = 0; e < In::kVector; e++) maximum = fmaxf(maximum, In::decode(v[i], e));
    }
    const float base = finite_base(maximum);
    float sum = 0.0f;  // of these alone, before it meets the running sum: small terms are not rounded away one by one
#pragma unroll
    for (int i = 0; i < kVectors; i++) {
        float part = 0.0f;
#pragma unroll
        for (int e = 0; e < In::kVector; e++) part += exp_approx(In::decode(v[i], e) - base);
        sum += part;
    }
    return Partial{maximum, partial.sum * exp_approx(partial.maximum - base) + sum};
}

// A thread's share of a row of whole vectors, a block apart, so that a warp reads 512 contiguous bytes with each load.
template <typename In>
__device__ __forceinline__ Partial reduce_vectors(const typename In::Bits* row, i64 num_classes) {
    constexpr u32 kFill = In::kVector == 8 ? 0xff80ff80u : 0xff800000u;  // -inf adds nothing
    Partial partial = {-infinity(), 0.0f};
    constexpr i64 kStep = kLossThreads * In::kVector;
    for (i64 start = (i64)threadIdx.x * In::kVector; start < num_classes; start += kLossLoads * kStep) {
        Bytes16 v[kLossLoads];
#pragma unroll
        for (int i = 0; i < kLossLoads; i++) {
            const i64 index = start + i * kStep;
            v[i] = index < num_classes ? load_vector<In>(row, index) : Bytes16{{kFill, kFill, kFill, kFill}};
        }
        partial = merge_vectors<In, kLossLoads>(partial, v);
    }
    return partial;
}

// The same one element at a time, neighbouring threads taking neighbouring elements.
template <typename In>
__device__ __forceinline__ Partial reduce_scalars(const typename In::Bits* row, i64 num_classes) {
    Partial partial = {-infinity(), 0.0f};
    for (i64 start = threadIdx.x; start < num_classes; start += kLossScalars * kLossThreads) {
        Bytes16 v[kLossScalars / Fp32::kVector];
#pragma unroll
        for (int i = 0; i < kLossScalars; i++) {
            const i64 index = start + i * kLossThreads;
            v[i / 4].word[i % 4] = __float_as_uint(index < num_classes ? read_logit<In>(row, index) : -infinity());
        }
        partial = merge_vectors<Fp32, kLossScalars / Fp32::kVector>(partial, v);
    }
    return partial;
}

__device__ __forceinline__ float exchange(float value, int lane_mask) {
    return __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(value), lane_mask));
}

__device__ __forceinline__ Partial reduce_warp(const Partial& partial) {
    float maximum = partial.maximum;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) maximum = fmaxf(maximum, exchange(maximum, mask));
    float sum = partial.sum * exp_approx(partial.maximum - finite_base(maximum));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += exchange(sum, mask);
    return Partial{maximum, sum};
}

__device__ __forceinline__ Partial reduce_block(const Partial* warps) {
    Partial total = {-infinity(), 0.0f};
#pragma unroll
    for (int w = 0; w < kLossWarps; w++) total.maximum = fmaxf(total.maximum, warps[w].maximum);
    const float base = finite_base(total.maximum);
#pragma unroll
    for (int w = 0; w < kLossWarps; w++) total.sum += warps[w].sum * exp_approx(warps[w].maximum - base);
    return total;
}

template <typename In>
__device__ __forceinline__ void cross_entropy(const typename In::Bits* logits, const i64* labels, float* losses,
                                              float* lse, i64 num_classes, i64 ignore_index, i64 is_aligned) {
    __shared__ Partial warps[kLossWarps];
    const i64 row_index = blockIdx.x;
    const typename In::Bits* row = logits + row_index * num_classes;
    const Partial partial = is_aligned ? reduce_vectors<In>(row, num_classes) : reduce_scalars<In>(row, num_classes);
    // Only now: in front of the row's loads they would cost registers through the loop, or make it wait.
    const i64 label = threadIdx.x == 0 ? labels[row_index] : -1;
    const bool is_class = label >= 0 && label < num_classes;
    const float picked = is_class ? read_logit<In>(row, label) : not_a_number();
    const Partial warp = reduce_warp(partial);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = warp;
    __syncthreads();
    if (threadIdx.x != 0) return;
    const Partial total = reduce_block(warps);
    const float log_sum = logf(total.sum);
    lse[row_index] = finite_base(total.maximum) + log_sum;
    losses[row_index] = label == ignore_index ? 0.0f : total.maximum - picked + log_sum;
}

// ---- backward ------------------------------------------------------------------------------------------------------

// What a row's gradients are made of. `scale` is NaN for a label out of range.
struct RowGradient {
    float lse, scale;
    i64 label;
    bool is_ignored;
};

__device__ __forceinline__ RowGradient load_row_gradient(const i64* labels, const float* lse, const float* scale,
                                                         i64 row, i64 num_classes, i64 ignore_index) {
    const i64 label = labels[row];
    const float row_lse = lse[row], row_scale = *scale;
    const bool is_class = label >= 0 && label < num_classes;
    return RowGradient{row_lse, is_class ? row_scale : not_a_number(), label, label == ignore_index};
}

__device__ __forceinline__ float differentiate(float logit, bool is_label, const RowGradient& gradient) {
    const float probability = exp_approx(logit - gradient.lse);
    return (is_label ? probability - 1.0f : probability) * gradient.scale;
}

__device__ __forceinline__ Bytes16 encode(const float* values, Bf16) { return pack_bf16(values); }

__device__ __forceinline__ Bytes16 encode(const float* values, Fp32) {
    return Bytes16{{__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                    __float_as_uint(values[3])}};
}

// A block's share of a row of whole vectors.
template <typename In>
__device__ __forceinline__ void differentiate_vectors(typename In::Bits* row, i64 start, i64 num_classes,
                                                      const RowGradient& gradient) {
    constexpr i64 kStep = kLossThreads * In::kVector;
    const i64 first = start + threadIdx.x * In::kVector;
    Bytes16 v[kLossLoads];
#pragma unroll
    for (int i = 0; i < kLossLoads; i++) {
        const i64 index = first + i * kStep;
        v[i] = index < num_classes ? load_vector<In>(row, index) : Bytes16{{0, 0, 0, 0}};
    }
#pragma unroll
    for (int i = 0; i < kLossLoads; i++) {
        const i64 index = first + i * kStep, offset = gradient.label - index;
        if (index >= num_classes) continue;
        const int place = offset >= 0 && offset < In::kVector ? (int)offset : -1;
        float values[In::kVector];
#pragma unroll
        for (int e = 0; e < In::kVector; e++) values[e] = differentiate(In::decode(v[i], e), e == place, gradient);
        const Bytes16 gradients = gradient.is_ignored ? Bytes16{{0, 0, 0, 0}} : encode(values, In{});
        store_words<4>(reinterpret_cast<u8*>(row + index), 0, gradients.word);
    }
}

// The same one element at a time, neighbouring threads taking neighbouring elements.
template <typename In>
__device__ __forceinline__ void differentiate_scalars(typename In::Bits* row, i64 start, i64 num_classes,
                                                      const RowGradient& gradient) {
    constexpr int kRounds = kLossLoads * In::kVector / kLossScalars;
#pragma unroll 1
    for (int round = 0; round < kRounds; round++) {
        const i64 first = start + round * kLossScalars * kLossThreads + threadIdx.x;
        float logits[kLossScalars];
#pragma unroll
        for (int i = 0; i < kLossScalars; i++) {
            const i64 index = first + i * kLossThreads;
            logits[i] = index < num_classes ? read_logit<In>(row, index) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kLossScalars; i++) {
            const i64 index = first + i * kLossThreads;
            if (index >= num_classes) return;
            const float value = differentiate(logits[i], index == gradient.label, gradient);
            const float values[In::kVector] = {gradient.is_ignored ? 0.0f : value};
            row[index] = (typename In::Bits)encode(values, In{}).word[0];
        }
    }
}

template <typename In>
__device__ __forceinline__ void cross_entropy_backward(typename In::Bits* logits, const i64* labels, const float* lse,
                                                       const float* scale, i64 num_classes, i64 ignore_index,
                                                       i64 blocks_per_row, i64 is_aligned) {
    const u32 row_index = blockIdx.x / (u32)blocks_per_row, block = blockIdx.x % (u32)blocks_per_row;
    const RowGradient gradient = load_row_gradient(labels, lse, scale, row_index, num_classes, ignore_index);
    typename In::Bits* row = logits + row_index * num_classes;
    const i64 start = (i64)block * kLossLoads * kLossThreads * In::kVector;
    if (is_aligned) {
        differentiate_vectors<In>(row, start, num_classes, gradient);
    } else {
        differentiate_scalars<In>(row, start, num_classes, gradient);
    }
}

// ---- entry points --------------------------------------------------------------------------------------------------

#define GRAPHRT_CROSS_ENTROPY(name, In)                                                                              \
    extern "C" __global__ void __launch_bounds__(kLossThreads, 5) graphrt_cross_entropy_##name(                      \
        const In::Bits* logits, const i64* labels, float* losses, float* lse, i64 num_classes, i64 ignore_index,     \
        i64 is_aligned) {                                                                                            \
        begin_kernel();                                                                                              \
        cross_entropy<In>(logits, labels, losses, lse, num_classes, ignore_index, is_aligned);                       \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kLossThreads) graphrt_cross_entropy_backward_##name(                \
        In::Bits* logits, const i64* labels, const float* lse, const float* scale, i64 num_classes,                  \
        i64 ignore_index, i64 blocks_per_row, i64 is_aligned) {                                                      \
        begin_kernel();                                                                                              \
        cross_entropy_backward<In>(logits, labels, lse, scale, num_classes, ignore_index, blocks_per_row,            \
                                   is_aligned);                                                                      \
    }

GRAPHRT_CROSS_ENTROPY(bf16, Bf16)
GRAPHRT_CROSS_ENTROPY(fp32, Fp32)
