// The delayed update of many slots in one launch: history roll, amax, scale, scale_inv and counts, all in place.
//
// A block takes 8 slots (one 32-byte sector of each history row) and all rows. Whether a slot rolls is known from its
// staging value alone, so the roll is one pass: read row i + 1 of a chunk of rows into registers, wait for the block,
// write them as row i. A chunk never reads a row that an earlier chunk wrote. The maximum falls out of the same reads.
//
// Every kernel argument is 8 bytes wide: a launcher can pass plain integers and floats. common.cuh stands in front of this text.

constexpr int kSlots = 8;
constexpr int kThreads = 1024;
constexpr int kRowThreads = kThreads / kSlots;
constexpr int kUnroll = 8;                            // rows in flight per thread
constexpr int kChunkRows = kRowThreads * kUnroll;
constexpr u32 kInfBits = 0x7f800000u;
constexpr u32 kLargestBits = 0x7f7fffffu;             // FLT_MAX

// Moves the rows of one slot one towards the oldest, the staging value in as the newest, and returns the largest of all
// rows as bits. Rows of a thread are kRowThreads apart. Row 0 is read by every thread of the slot and written by none.
__device__ __forceinline__ u32 roll_history(u32* column, i64 stride, i64 num_rows, int row_thread, u32 staging,
                                            bool is_rolled) {
    u32 amax = staging;
    for (i64 base = 0; base < num_rows; base += kChunkRows) {
        u32 next[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; k++) {
            const i64 row = base + k * kRowThreads + row_thread;
            next[k] = staging;
            if (is_rolled && row + 1 < num_rows) next[k] = column[(row + 1) * stride];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kUnroll; k++) {
            const i64 row = base + k * kRowThreads + row_thread;
            amax = next[k] > amax ? next[k] : amax;
            if (is_rolled && row > 0 && row < num_rows) column[row * stride] = next[k];
        }
    }
    return amax;
}

// Largest value over the threads of each slot, valid in the slot's row thread 0.
__device__ __forceinline__ u32 reduce_slots(u32 amax) {
    __shared__ u32 warp_amax[kThreads / 32][kSlots];
#pragma unroll
    for (int distance = kSlots; distance < 32; distance *= 2) {
        const u32 other = __shfl_xor_sync(0xffffffffu, amax, distance);
        amax = other > amax ? other : amax;
    }
    if (threadIdx.x % 32 < kSlots) warp_amax[threadIdx.x / 32][threadIdx.x % 32] = amax;
    __syncthreads();
    if (threadIdx.x < kSlots) {
#pragma unroll
        for (int w = 0; w < kThreads / 32; w++) {
            const u32 other = warp_amax[w][threadIdx.x];
            amax = other > amax ? other : amax;
        }
    }
    return amax;
}

// IEEE divisions, whatever the compile options. Dividing by 2**margin is exact unless the result is subnormal.
__device__ __forceinline__ float scale_from(float amax, float fp8_max, float headroom) {
    const float scale = __fdiv_rn(__fdiv_rn(fp8_max, amax), headroom);
    return __float_as_uint(scale) == kInfBits ? __uint_as_float(kLargestBits) : scale;
}

extern "C" __global__ void __launch_bounds__(kThreads) graphrt_update_scales(
    float* history, float* scale, float* scale_inv, int* num_nonfinite, i64* num_updates, i64 num_rows, i64 num_slots,
    i64 start, i64 end, i64 direction, double fp8_max, double headroom, i64 is_max) {
    begin_kernel();
    const int row_thread = threadIdx.x / kSlots;
    const i64 slot = start + (i64)blockIdx.x * kSlots + threadIdx.x % kSlots;
    u32* column = reinterpret_cast<u32*>(history) + slot;

    const u32 staging = slot < end ? *column & 0x7fffffffu : 0;
    const bool is_rolled = staging != 0 && staging < kInfBits;
    const u32 history_amax = reduce_slots(roll_history(column, num_slots, num_rows, row_thread, staging, is_rolled));

    if (blockIdx.x == 0 && threadIdx.x == 0) num_updates[direction] += 1;
    if (row_thread != 0 || staging == 0) return;
    *column = 0;
    if (!is_rolled) {
        num_nonfinite[slot] += 1;
        return;
    }
    const float amax = __uint_as_float(is_max ? history_amax : staging);
    const float new_scale = scale_from(amax, (float)fp8_max, (float)headroom);
    scale[slot] = new_scale;
    scale_inv[4 * slot] = __fdiv_rn(1.0f, new_scale);
}
