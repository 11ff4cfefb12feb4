// Copies up to three ranges of memory: the first blocks take the first range, the next ones the second, and so on.
//
// A thread moves four times 16 bytes, whole where both addresses and the range allow, else byte by byte. common.cuh stands
// in front of this text.

constexpr int kThreads = 256;
constexpr int kBytes = 16;
constexpr int kLoads = 4;

__device__ __forceinline__ void copy_range(u8* to, const u8* from, i64 num_bytes, i64 block) {
    const bool is_aligned = (((i64)to | (i64)from) % kBytes) == 0;
    const i64 begin = (block * kLoads * kThreads + threadIdx.x) * kBytes;
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
        const i64 first = begin + l * kThreads * kBytes;
        if (is_aligned && first + kBytes <= num_bytes) {
            *(Bytes16*)(to + first) = *(const Bytes16*)(from + first);
        } else {
            for (i64 i = first; i < first + kBytes && i < num_bytes; i++) to[i] = from[i];
        }
    }
}

// `second` and `third`: the first blocks of those ranges.
extern "C" __global__ void __launch_bounds__(kThreads) graphrt_copy(
    u8* to0, const u8* from0, i64 num_bytes0, u8* to1, const u8* from1, i64 num_bytes1, u8* to2, const u8* from2,
    i64 num_bytes2, i64 second, i64 third) {
    begin_kernel();
    const i64 block = blockIdx.x;
    if (block < second) {
        copy_range(to0, from0, num_bytes0, block);
    } else if (block < third) {
        copy_range(to1, from1, num_bytes1, block - second);
    } else {
        copy_range(to2, from2, num_bytes2, block - third);
    }
}
