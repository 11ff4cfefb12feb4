// Fills a range of memory with a pattern of four bytes, as a memset node of a graph does: byte i becomes byte i % 4 of it.
//
// A thread writes 16 bytes, whole where the range allows, else byte by byte. common.cuh stands in front of this text.

constexpr int kThreads = 256;
constexpr int kBytes = 16;

extern "C" __global__ void __launch_bounds__(kThreads) graphrt_fill(u8* data, i64 num_bytes, i64 pattern, i64 is_aligned) {
    begin_kernel();
    const i64 begin = ((i64)blockIdx.x * kThreads + threadIdx.x) * kBytes;
    const u32 word = (u32)pattern;
    if (is_aligned && begin + kBytes <= num_bytes) {
        *(Bytes16*)(data + begin) = {word, word, word, word};
        return;
    }
    for (i64 i = begin; i < begin + kBytes && i < num_bytes; i++) data[i] = (u8)(word >> (i % 4 * 8));
}
