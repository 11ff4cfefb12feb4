// Copies up to two ranges of memory: the first blocks take the first range, the others the second.
//
// A thread moves four times 16 bytes, whole where both addresses and the range allow, else byte by byte. common.cuh stands
// in front of this text.

constexpr int kThreads = 256;
constexpr int kBytes = 16;
constexpr int kLoads = 4;

__device__ __forceinline__ void copy_range(u8* to, const u8* from, i64 num_bytes, bool is_aligned, i64 block) {
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

extern "C" __global__ void __launch_bounds__(kThreads) graphrt_copy(
    u8* to, const u8* from, i64 num_bytes, i64 is_aligned, u8* other_to, const u8* other_from, i64 other_num_bytes,
    i64 is_other_aligned, i64 num_blocks) {
    begin_kernel();
    if ((i64)blockIdx.x < num_blocks) {
        copy_range(to, from, num_bytes, is_aligned != 0, blockIdx.x);
    } else {
        copy_range(other_to, other_from, other_num_bytes, is_other_aligned != 0, (i64)blockIdx.x - num_blocks);
    }
}
