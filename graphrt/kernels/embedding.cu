// The gradient of an embedding: rows of a matrix added to the rows of a table that their tokens name.
//
// Three kernels, no atomics. The first finds where a stable sort by token puts each position, by counting for each the
// positions that come before it: n * n comparisons, which for the few thousand positions of a batch take less time than
// the launches of a radix sort. The second sums runs of equal tokens, the third those that are longer than a segment.
//
// A run is summed in segments of 64: a segment's rows in turn, then the segments in turn, then that sum is added to the
// table. So a token that fills the batch is summed by many blocks, and the order is that of the reference in
// embedding.py, in which no other token plays a part. Sums start at +0, and a sum that starts there is never -0: adding
// the zeros of places that are not there changes no bit.
//
// Keys are tokens; those that get no gradient have the key `vocab` and are sorted behind the others. Every kernel
// argument is 8 bytes wide. common.cuh stands in front of this text.

constexpr int kSegment = 64;
constexpr int kBatch = 8;  // rows in flight
constexpr int kThreads = 256;
static_assert(kSegment % kBatch == 0, "a segment is whole batches");

// ---- the stable sort -----------------------------------------------------------------------------------------------
// A lane has a position, and each warp counts in its own part of the keys.

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / 32;
constexpr int kTile = 8192;         // keys in shared memory
constexpr int kNoKey = 0x7fffffff;  // comes before none

static_assert(kTile % (32 * kSortWarps) == 0, "the parts of a full tile are whole pieces of 32 keys");

__device__ __forceinline__ int key_of(i64 token, i64 vocab, i64 padding) {
    return (int)(token >= 0 && token < vocab && token != padding ? token : vocab);
}

// How many of keys[begin..end) come before `key`, whose index is `own`. All of them are before its position, all behind
// it, or each has to be asked: the same for the 32 positions of a block, `block_first` and on.
__device__ __forceinline__ int count_before(const int* keys, int begin, int end, int offset, int key, int own,
                                            int block_first) {
    int count = 0;
    const bool is_mixed = offset + end > block_first && offset + begin < block_first + 32;
    if (is_mixed) {
        for (int j = begin; j < end; j++) count += keys[j] < key + (int)(offset + j < own);
        return count;
    }
    const int bound = key + (int)(offset + begin < own);
#pragma unroll 4
    for (int j = begin; j < end; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + j);
        count += (int)((int)four.x < bound) + (int)((int)four.y < bound) + (int)((int)four.z < bound) +
                 (int)((int)four.w < bound);
    }
    return count;
}

__device__ __forceinline__ void sort_positions(const i64* tokens, int* __restrict__ sorted_keys,
                                               int* __restrict__ positions, int num, i64 vocab, i64 padding) {
    __shared__ uint4 tile[kTile / 4];
    __shared__ int counts[kSortWarps][32];
    int* keys = reinterpret_cast<int*>(tile);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int block_first = (int)blockIdx.x * 32, own = block_first + lane;
    const int key = own < num ? key_of(tokens[own], vocab, padding) : 0;
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < num; first += kTile) {
        const int left = num - first < kTile ? num - first : kTile;
        const int part = (left + 32 * kSortWarps - 1) / (32 * kSortWarps) * 32;  // of each warp
#pragma unroll 4
        for (int j = threadIdx.x; j < part * kSortWarps; j += kSortThreads) {
            keys[j] = j < left ? key_of(tokens[first + j], vocab, padding) : kNoKey;
        }
        __syncthreads();
        count += count_before(keys, warp * part, (warp + 1) * part, first, key, own, block_first);
        __syncthreads();
    }
    counts[warp][lane] = count;
    __syncthreads();
    if (warp != 0 || own >= num) return;
    int place = 0;
#pragma unroll
    for (int w = 0; w < kSortWarps; w++) place += counts[w][lane];
    sorted_keys[place] = key;
    positions[place] = own;
}

// ---- the sums ------------------------------------------------------------------------------------------------------
// A block has a place in the sorted order and a share of the columns. It has work if a segment begins there.

__device__ __forceinline__ bool has_key(const int* keys, int place, int num, int key) {
    return place < num && keys[place] == key;
}

// Whether a segment begins at `place`, where the run does not begin.
__device__ __forceinline__ bool is_later_segment(const int* keys, int place, int key) {
    if (place < kSegment || keys[place - kSegment] != key) return false;
    int low = 0, high = place - kSegment;  // the run begins at one of low..high
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return (place - low) % kSegment == 0;
}

// The row of `partials` for the segment at `place` of a long run. Of 64 neighbouring places at most one begins a long
// run, and at most one continues one: what lies between two beginnings is shorter than a segment.
__device__ __forceinline__ int partial_row(int place, bool is_start) { return 2 * (place / kSegment) + (int)is_start; }

template <typename T>
__device__ __forceinline__ Bytes16 load_or_zero(const typename T::Bits* x, i64 index, i64 count, bool is_aligned,
                                                bool is_there) {
    if (!is_there) return Bytes16{{0, 0, 0, 0}};
    return is_aligned ? load_vector<T>(x, index) : load_elements<T>(x, index, count);
}

template <typename T>
__device__ __forceinline__ void add_vector(float* sums, const Bytes16& v) {
#pragma unroll
    for (int e = 0; e < T::kVector; e++) sums[e] = __fadd_rn(sums[e], T::decode(v, e));
}

// `sums` of kCount columns to x + index, added to what is there if `adds`.
template <int kCount>
__device__ __forceinline__ void store_sums(float* x, i64 index, const float* sums, i64 count, bool is_aligned,
                                           bool adds) {
#pragma unroll
    for (int half = 0; half < kCount; half += 4) {
        const float* s = sums + half;
        if (is_aligned) {
            uint4* target = reinterpret_cast<uint4*>(x + index + half);
            const uint4 old = adds ? *target : uint4{0, 0, 0, 0};
            *target = uint4{__float_as_uint(__fadd_rn(__uint_as_float(old.x), s[0])),
                            __float_as_uint(__fadd_rn(__uint_as_float(old.y), s[1])),
                            __float_as_uint(__fadd_rn(__uint_as_float(old.z), s[2])),
                            __float_as_uint(__fadd_rn(__uint_as_float(old.w), s[3]))};
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (half + e < count) x[index + half + e] = __fadd_rn(adds ? x[index + half + e] : 0.0f, s[e]);
            }
        }
    }
}

template <typename In>
__device__ __forceinline__ void sum_segment(const typename In::Bits* grad, const int* keys,
                                            const int* positions, float* __restrict__ out,
                                            float* __restrict__ partials, int num, int vocab, int cols, u32 col_blocks,
                                            bool adds, bool is_aligned) {
    const int place = (int)(blockIdx.x / col_blocks), share = (int)(blockIdx.x % col_blocks);
    const int col = (share * (int)blockDim.x + (int)threadIdx.x) * In::kVector;
    const int key = keys[place];
    if (key >= vocab || col >= cols) return;
    const bool is_start = place == 0 || keys[place - 1] != key;
    if (!is_start && !is_later_segment(keys, place, key)) return;
    const int count = cols - col;
    float sums[In::kVector] = {};
#pragma unroll 1
    for (int first = place; first < place + kSegment; first += kBatch) {
        Bytes16 rows[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const bool is_there = has_key(keys, first + k, num, key);
            const i64 position = is_there ? positions[first + k] : 0;
            rows[k] = load_or_zero<In>(grad, position * cols + col, count, is_aligned, is_there);
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) add_vector<In>(sums, rows[k]);
        if (!has_key(keys, first + kBatch, num, key)) break;
    }
    if (is_start && !has_key(keys, place + kSegment, num, key)) {
        store_sums<In::kVector>(out, (i64)key * cols + col, sums, count, is_aligned, adds);
    } else {
        const i64 row = partial_row(place, is_start);
        store_sums<In::kVector>(partials, row * cols + col, sums, count, is_aligned, false);
    }
}

// A block has 64 places and a share of the columns: it looks for the one long run that may begin there.
__device__ __forceinline__ void sum_long_run(const int* keys, const float* partials,
                                             float* __restrict__ out, int num, int vocab, int cols, u32 col_blocks,
                                             bool adds, bool is_aligned) {
    __shared__ int found;
    const int window = (int)(blockIdx.x / col_blocks), share = (int)(blockIdx.x % col_blocks);
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < kSegment; i += blockDim.x) {
        const int place = window * kSegment + i;
        if (place + kSegment >= num) break;
        const int key = keys[place];
        const bool is_start = place == 0 || keys[place - 1] != key;
        if (is_start && key < vocab && keys[place + kSegment] == key) found = place;
    }
    __syncthreads();
    const int start = found, col = (share * (int)blockDim.x + (int)threadIdx.x) * Fp32::kVector;
    if (start < 0 || col >= cols) return;
    const int key = keys[start], count = cols - col;
    const u32* words = reinterpret_cast<const u32*>(partials);
    float sums[Fp32::kVector] = {};
#pragma unroll 1
    for (int first = start; has_key(keys, first, num, key); first += kBatch * kSegment) {
        Bytes16 rows[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int place = first + k * kSegment;
            const i64 row = partial_row(place, place == start);
            rows[k] = load_or_zero<Fp32>(words, row * cols + col, count, is_aligned, has_key(keys, place, num, key));
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) add_vector<Fp32>(sums, rows[k]);
    }
    store_sums<Fp32::kVector>(out, (i64)key * cols + col, sums, count, is_aligned, adds);
}

// ---- entry points --------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kSortThreads) graphrt_embedding_sort(
    const i64* tokens, int* keys, int* positions, i64 num, i64 vocab, i64 padding) {
    begin_kernel();
    sort_positions(tokens, keys, positions, (int)num, vocab, padding);
}

#define GRAPHRT_EMBEDDING_SUM(name, In)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) graphrt_embedding_sum_##name(                             \
        const In::Bits* grad, const int* keys, const int* positions, float* out, float* partials, i64 num,           \
        i64 vocab, i64 cols, i64 col_blocks, i64 adds, i64 is_aligned) {                                             \
        begin_kernel();                                                                                              \
        sum_segment<In>(grad, keys, positions, out, partials, (int)num, (int)vocab, (int)cols, (u32)col_blocks,      \
                        adds != 0, is_aligned != 0);                                                                 \
    }

GRAPHRT_EMBEDDING_SUM(bf16, Bf16)
GRAPHRT_EMBEDDING_SUM(fp16, Fp16)
GRAPHRT_EMBEDDING_SUM(fp32, Fp32)

extern "C" __global__ void __launch_bounds__(kThreads) graphrt_embedding_sum_long_runs(
    const int* keys, const float* partials, float* out, i64 num, i64 vocab, i64 cols, i64 col_blocks, i64 adds,
    i64 is_aligned) {
    begin_kernel();
    sum_long_run(keys, partials, out, (int)num, (int)vocab, (int)cols, (u32)col_blocks, adds != 0, is_aligned != 0);
}
