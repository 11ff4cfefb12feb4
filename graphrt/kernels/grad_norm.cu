// The L2 norm of many tensors together, in one launch or several, and always summed in the same order.
//
// A block takes a piece of a tensor, which is up to eight chunks (see grad_norm.py). A thread squares its 32 elements of a
// chunk and adds them in fp32, in chains of eight; everything beyond is added in fp64, so that the result is within 1e-6 of
// the exact one whatever the number of elements. Each piece has a place of its own for its sum. The block that finishes
// last, of whichever launch, adds all of them by place: neither the order in which they came nor the launches that the
// pieces were divided into change a bit. A square beyond FLT_MAX is inf: such a gradient counts as not finite.
//
// Every kernel argument is 8 bytes wide: a launcher can pass plain integers. common.cuh stands in front of this text.

constexpr int kThreads = 256;
constexpr int kChunk = 8192;        // elements
constexpr int kPiece = 8 * kChunk;  // mirrors grad_norm.py
constexpr int kBlocksPerSm = 4;
constexpr int kAhead = 8;  // sums that a thread of the last block has under way at once

enum DtypeCode { kFp32, kBf16, kFp16 };  // mirrors tensor_table.py

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

// The thread's share of the sum of squares of `count` elements, all loads before the first use.
template <typename In>
__device__ __forceinline__ float sum_squares(i64 address, int count) {
    constexpr int kStride = kThreads * In::kVector;
    constexpr int kLoads = kChunk / kStride;
    const typename In::Bits* x = reinterpret_cast<const typename In::Bits*>(address);
    const int index = (int)threadIdx.x * In::kVector;
    const bool is_aligned = address % 16 == 0;
    Bytes16 v[kLoads];
    if (is_aligned && count == kChunk) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) v[i] = load_global<In>(x, index + i * kStride);
    } else {
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int start = index + i * kStride;
            v[i] = is_aligned && start + In::kVector <= count ? load_global<In>(x, start)
                                                              : load_elements<In>(x, start, count - start);
        }
    }
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
#pragma unroll
        for (int e = 0; e < In::kVector; e++) {
            const float value = In::decode(v[i], e);
            sums[e % 4] = __fmaf_rn(value, value, sums[e % 4]);
        }
    }
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
}

__device__ __forceinline__ float sum_row_squares(i64 dtype, i64 address, i64 first, i64 size) {
    const int count = (int)(size - first < kChunk ? size - first : kChunk);
    if (dtype == kFp32) return sum_squares<Fp32>(address + 4 * first, count);
    if (dtype == kBf16) return sum_squares<Bf16>(address + 2 * first, count);
    return sum_squares<Fp16>(address + 2 * first, count);
}

// The sum over the block's threads, by a fixed tree; callers put a barrier between two of these.
__device__ __forceinline__ double sum_block(double value) {
    __shared__ double sums[kThreads];
    sums[threadIdx.x] = value;
    __syncthreads();
#pragma unroll 1
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// Whether this block is the last to leave its sum; then all sums may be read.
__device__ __forceinline__ bool leave_sum(double sum, double* place, u32* num_finished, i64 num_pieces) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        *place = sum;
        __threadfence();
        is_last = atomicAdd(num_finished, 1u) == (u32)num_pieces - 1;
    }
    __syncthreads();
    if (is_last) __threadfence();
    return is_last;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) graphrt_grad_norm(
    const i64* pointers, const i64* sizes, const i64* dtypes, const i64* places, const i64* pieces, i64 num_pieces,
    double* sums, u32* num_finished, float* norm) {
    begin_kernel();
    const i64 row = pieces[blockIdx.x] >> 32, piece = pieces[blockIdx.x] & 0xffffffff;
    const i64 dtype = dtypes[row], address = pointers[row], size = sizes[row];
    const i64 end = size - piece * kPiece < kPiece ? size : (piece + 1) * kPiece;
    double sum = 0.0;
#pragma unroll 1
    for (i64 first = piece * kPiece; first < end; first += kChunk) sum += (double)sum_row_squares(dtype, address, first, size);
    sum = sum_block(sum);
    if (!leave_sum(sum, sums + places[row] + piece, num_finished, num_pieces)) return;

    const volatile double* all = sums;  // past L1: other multiprocessors wrote them
    double total = 0.0;
    for (i64 first = threadIdx.x; first < num_pieces; first += kAhead * kThreads) {
        double ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) ahead[i] = first + i * kThreads < num_pieces ? all[first + i * kThreads] : 0.0;
#pragma unroll
        for (int i = 0; i < kAhead; i++) total += ahead[i];
    }
    total = sum_block(total);
    if (threadIdx.x == 0) {
        *norm = (float)sqrt(total);
        *num_finished = 0;  // for the next norm
    }
}
