// Rotary position embedding: the pair (x[i], x[i + Dh/2]) of a head is turned by the angle of its position,
//     first' = first * cos - second * sin,    second' = second * cos + first * sin,
// in fp32 without contraction, rounded once to bf16; backward turns by the opposite angle. A thread always holds both
// halves of its pairs, eight of each in a 16-byte vector, of one position and four heads: its sixteen cosines and sines
// are read once for 128 bytes of x. All loads come before the first use.
//
// Two shapes of the same work, both limited by memory:
// - Row-major bf16 (forward in place, backward without FP8): threads lie along a row.
// - Backward to FP8, row-major and transposed, with the amax: a tile of 64 positions x 16 lanes, a lane being eight
//   pairs (16 columns) of one head, four neighbouring lanes of four heads. For the transpose four threads with
//   neighbouring positions exchange FP8 words, so that each has four rows of one head. The rest is as in quantize.cu: 4x4
//   bytes are transposed with byte permutes and leave through shared memory as 16-byte units, 64 contiguous bytes per
//   column. Made for heads of 64 and 128: where half a head is no multiple of 32 columns, lanes of a tile stay idle.
//
// Addresses are 16-byte aligned and strides are multiples of eight elements; the launcher sees to it.
// common.cuh stands in front of this text.

constexpr int kRopeThreads = 256;
constexpr int kRopeHeads = 4;                    // heads a thread takes
constexpr int kRopeTileRows = 64;
constexpr int kRopeTogether = 4;                 // neighbouring lanes of a head in a tile
constexpr int kRopeTileColumns = 8 * kRopeTogether;  // of a half of a head
constexpr int kRopeLanes = kRopeHeads * kRopeTogether;
constexpr int kRopeLaneCols = 16;                // eight of the first half of a head, eight of the second
constexpr int kRopeUnits = kRopeTileRows / 16;   // 16-byte units of one transposed row of a tile
constexpr int kRopeTileUnits = kRopeLanes * kRopeLaneCols * kRopeUnits;

static_assert(kRopeThreads == kRopeTogether * kRopeTileRows, "a thread takes one position and a lane of each head");
static_assert(kRopeHeads == 4, "four rows are exchanged for four heads");

// ---- rotation ------------------------------------------------------------------------------------------------------

// Cosines and sines of eight neighbouring pairs at one position.
struct Angles {
    Bytes16 cos[2], sin[2];
};

__device__ __forceinline__ Angles load_angles(const u32* cos, const u32* sin, i64 index) {
    return Angles{{load_vector<Fp32>(cos, index), load_vector<Fp32>(cos, index + 4)},
                  {load_vector<Fp32>(sin, index), load_vector<Fp32>(sin, index + 4)}};
}

template <bool kIsInverse>
__device__ __forceinline__ void rotate(const Angles& angles, Bytes16& first, Bytes16& second) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float turned_first[2], turned_second[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int e = 2 * w + i;
            const float x = Bf16::decode(first, e), y = Bf16::decode(second, e);
            const float cos = Fp32::decode(angles.cos[e / 4], e % 4);
            const float sin = kIsInverse ? -Fp32::decode(angles.sin[e / 4], e % 4) : Fp32::decode(angles.sin[e / 4], e % 4);
            // Intrinsics: the compiler would contract these to fused multiply-adds, which round once less.
            turned_first[i] = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
            turned_second[i] = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
        }
        first.word[w] = pack_bf16x2(turned_first[0], turned_first[1]);
        second.word[w] = pack_bf16x2(turned_second[0], turned_second[1]);
    }
}

// ---- where things are ----------------------------------------------------------------------------------------------

struct Shape {
    u32 positions, num_heads, head_size;  // T, H, Dh

    __device__ __forceinline__ i64 columns() const { return (i64)3 * num_heads * head_size; }
    __device__ __forceinline__ u32 half() const { return head_size / 2; }
};

// A [B, H, T, Dh] tensor, its last dimension contiguous.
struct Heads {
    const u16* data;
    i64 batch_stride, head_stride, position_stride;

    __device__ __forceinline__ const u16* locate(u32 batch, u32 head, u32 position) const {
        return data + batch * batch_stride + head * head_stride + position * position_stride;
    }
};

// The gradients of q, k and v; heads are counted through, q's first.
struct Gradients {
    Heads q, k, v;
    u32 num_heads;

    __device__ __forceinline__ const u16* locate(u32 batch, u32 head, u32 position) const {
        if (head < num_heads) return q.locate(batch, head, position);
        if (head < 2 * num_heads) return k.locate(batch, head - num_heads, position);
        return v.locate(batch, head - 2 * num_heads, position);
    }
};

// A row-major qkv, [B * T, columns], in the same terms.
struct QkvRows {
    const u16* data;
    i64 columns;
    u32 positions, head_size;

    __device__ __forceinline__ const u16* locate(u32 batch, u32 head, u32 position) const {
        return data + ((i64)batch * positions + position) * columns + head * head_size;
    }
};

__device__ __forceinline__ Bytes16 zero_vector() { return Bytes16{{0, 0, 0, 0}}; }

// ---- row-major bf16 ------------------------------------------------------------------------------------------------
// `out` may be where the sources are: a thread stores where it has loaded, and nobody else loads there.

template <bool kIsInverse, u32 kParts, typename Source>
__device__ __forceinline__ void rotate_rows(const Source& source, const u32* cos, const u32* sin, u16* out, i64 rows,
                                            const Shape& shape) {
    const u32 half_vectors = shape.head_size / 16;
    const u32 num_heads = kParts * shape.num_heads;
    const u32 num_groups = (num_heads + kRopeHeads - 1) / kRopeHeads;
    // 32 bits: an item is 128 bytes, 2^32 of them are more than any GPU's memory.
    const u32 item = blockIdx.x * kRopeThreads + threadIdx.x;
    const u32 vector = item % half_vectors;
    const u32 group = item / half_vectors % num_groups;
    const u32 row = item / half_vectors / num_groups;
    if (row >= rows) return;
    const u32 batch = row / shape.positions, position = row % shape.positions;

    Bytes16 first[kRopeHeads], second[kRopeHeads];
#pragma unroll
    for (int j = 0; j < kRopeHeads; j++) {
        const u32 head = group + j * num_groups;
        first[j] = second[j] = zero_vector();
        if (head >= num_heads) continue;
        const u16* x = source.locate(batch, head, position);
        first[j] = load_vector<Bf16>(x, 8 * vector);
        second[j] = load_vector<Bf16>(x, 8 * vector + shape.half());
    }
    const Angles angles = load_angles(cos, sin, (i64)position * shape.half() + 8 * vector);
    u16* out_row = out + row * shape.columns() + 8 * vector;
#pragma unroll
    for (int j = 0; j < kRopeHeads; j++) {
        const u32 head = group + j * num_groups;
        if (head >= num_heads) continue;
        if (kParts == 2 || head < 2 * shape.num_heads) rotate<kIsInverse>(angles, first[j], second[j]);
        store_bf16(out_row, (i64)head * shape.head_size, first[j]);
        store_bf16(out_row, (i64)head * shape.head_size + shape.half(), second[j]);
    }
}

// ---- to FP8, row-major and transposed ------------------------------------------------------------------------------

struct Tile {
    i64 row;      // its first position, counted through the batch
    u32 head;     // its first head, counted through q, k and v
    u32 column;   // its first column in a half of each head
};

__device__ __forceinline__ Tile locate_tile(const Shape& shape) {
    const u32 blocks_in_head = (shape.half() + kRopeTileColumns - 1) / kRopeTileColumns;
    const u32 tiles_across = (3 * shape.num_heads + kRopeHeads - 1) / kRopeHeads * blocks_in_head;
    const u32 down = blockIdx.x / tiles_across, across = blockIdx.x - down * tiles_across;
    return Tile{(i64)down * kRopeTileRows, across / blocks_in_head * kRopeHeads, across % blocks_in_head * kRopeTileColumns};
}

// Place of a 16-byte unit of the transposed tile: XOR with the lane, so that reads (eight neighbouring units) touch all 32
// banks once, and writes touch 16 twice.
__device__ __forceinline__ int place_unit(int column, int unit) {
    return (column * kRopeUnits + unit) ^ (column / kRopeLaneCols % 8);
}

__device__ __forceinline__ u32 exchange(u32 word, int num_rows) {
    return __shfl_xor_sync(0xffffffffu, word, num_rows * kRopeTogether);
}

// Four words of each of four neighbouring rows, a thread a row (its last two bits tell which): thread i gets word i of
// rows 0 to 3. First pairs of words with the thread two rows away, then one word with the neighbour.
__device__ __forceinline__ void exchange_rows(u32* words, int row) {
    const bool is_upper = row & 2, is_odd = row & 1;
    const u32 own[2] = {is_upper ? words[2] : words[0], is_upper ? words[3] : words[1]};
    const u32 far[2] = {exchange(is_upper ? words[0] : words[2], 2), exchange(is_upper ? words[1] : words[3], 2)};
    const u32 own_other = exchange(own[!is_odd], 1), far_other = exchange(far[!is_odd], 1);
    const u32 own_rows[2] = {is_odd ? own_other : own[0], is_odd ? own[1] : own_other};
    const u32 far_rows[2] = {is_odd ? far_other : far[0], is_odd ? far[1] : far_other};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        words[i] = is_upper ? far_rows[i] : own_rows[i];
        words[2 + i] = is_upper ? own_rows[i] : far_rows[i];
    }
}

// Rows of the transpose leave shared memory. They end at a multiple of 16: a unit lies inside or outside.
__device__ __forceinline__ void store_staged(const uint4* units, const Tile& tile, u8* transposed, i64 rows, const Shape& shape) {
    const i64 padded_rows = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kRopeTileUnits / kRopeThreads; i++) {
        const int index = i * kRopeThreads + (int)threadIdx.x;
        const int column = index / kRopeUnits, unit = index % kRopeUnits;
        const int lane = column / kRopeLaneCols;
        const u32 head = tile.head + lane / kRopeTogether, in_half = tile.column + 8 * (lane % kRopeTogether) + column % 8;
        const i64 row = tile.row + 16 * unit;
        if (head >= 3 * shape.num_heads || in_half >= shape.half() || row >= padded_rows) continue;
        const i64 out_row = (i64)head * shape.head_size + column / 8 % 2 * shape.half() + in_half;
        *reinterpret_cast<uint4*>(transposed + out_row * padded_rows + row) = units[place_unit(column, unit)];
    }
}

template <typename Out>
__device__ __forceinline__ void rotate_tile(const Gradients& gradients, const u32* cos, const u32* sin, u8* data, u8* transposed,
                                            const float* scale_in, const float* scale_inv, float* scale_inv_out,
                                            int* amax_out, i64 rows, const Shape& shape) {
    __shared__ uint4 units[kRopeTileUnits];  // [column][unit of 16 rows], units placed by XOR
    __shared__ u32 warp_amax[kRopeThreads / 32];
    const Tile tile = locate_tile(shape);
    const int inner = (int)threadIdx.x % kRopeTogether, tile_row = (int)threadIdx.x / kRopeTogether;
    const i64 row = tile.row + tile_row;
    const u32 column = tile.column + 8 * inner, num_heads = 3 * shape.num_heads;
    const bool is_inside = row < rows && column < shape.half();
    const u32 batch = (u32)row / shape.positions, position = (u32)row % shape.positions;

    Bytes16 halves[kRopeHeads][2];
#pragma unroll
    for (int j = 0; j < kRopeHeads; j++) {
        halves[j][0] = halves[j][1] = zero_vector();
        if (is_inside && tile.head + j < num_heads) {
            const u16* x = gradients.locate(batch, tile.head + j, position);
            halves[j][0] = load_vector<Bf16>(x, column);
            halves[j][1] = load_vector<Bf16>(x, column + shape.half());
        }
    }
    Angles angles = {{zero_vector(), zero_vector()}, {zero_vector(), zero_vector()}};
    if (is_inside && tile.head < 2 * shape.num_heads) angles = load_angles(cos, sin, (i64)position * shape.half() + column);
    const float scale = *scale_in;
    u8* out_row = data + row * shape.columns() + column;
    u32 amax = 0, q[kRopeHeads][2][2];
#pragma unroll
    for (int j = 0; j < kRopeHeads; j++) {
        const u32 head = tile.head + j;
        if (head < 2 * shape.num_heads) rotate<true>(angles, halves[j][0], halves[j][1]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            amax = merge_amax<Bf16>(amax, halves[j][h]);
            quantize_vector<Bf16, Out>(halves[j][h], scale, q[j][h]);
            if (is_inside && head < num_heads) {
                store_words<2>(out_row, (i64)head * shape.head_size + h * (i64)shape.half(), q[j][h]);
            } else {
                zero_words<2>(q[j][h]);  // the pad, even under a scale that is not finite
            }
        }
    }
    if (transposed != nullptr) {
        u32* unit_words = reinterpret_cast<u32*>(units);
        const int head = tile_row % 4, group = tile_row / 4;  // what this thread stages: four rows of one head
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int w = 0; w < 2; w++) {
                u32 words[4] = {q[0][h][w], q[1][h][w], q[2][h][w], q[3][h][w]}, columns[4];
                exchange_rows(words, tile_row);
                transpose_4x4(words[0], words[1], words[2], words[3], columns);
                const int first = (head * kRopeTogether + inner) * kRopeLaneCols + 8 * h + 4 * w;
#pragma unroll
                for (int c = 0; c < 4; c++) unit_words[place_unit(first + c, group / 4) * 4 + group % 4] = columns[c];
            }
        }
    }
    if (amax_out != nullptr) stage_warp_amax(amax, warp_amax);
    copy_scale_inv(scale_inv, scale_inv_out);
    __syncthreads();
    if (transposed != nullptr) store_staged(units, tile, transposed, rows, shape);
    if (amax_out != nullptr) merge_block_amax<kRopeThreads / 32>(warp_amax, amax_out);
}

// ---- entry points --------------------------------------------------------------------------------------------------

// qkv [B, T, 3, H, Dh] in place: q and k are its first 2 * H heads.
extern "C" __global__ void __launch_bounds__(kRopeThreads, 3) graphrt_rope_bf16(
    u16* qkv, const u32* cos, const u32* sin, i64 rows, i64 positions, i64 num_heads, i64 head_size) {
    begin_kernel();
    const Shape shape = {(u32)positions, (u32)num_heads, (u32)head_size};
    const QkvRows source = {qkv, shape.columns(), shape.positions, shape.head_size};
    rotate_rows<false, 2>(source, cos, sin, qkv, rows, shape);
}

#define GRAPHRT_ROPE_SOURCES                                                                                         \
    const u16 *q, i64 q_batch, i64 q_head, i64 q_position, const u16 *k, i64 k_batch, i64 k_head, i64 k_position,    \
        const u16 *v, i64 v_batch, i64 v_head, i64 v_position, const u32 *cos, const u32 *sin
#define GRAPHRT_ROPE_GRADIENTS                                                                                       \
    Gradients {                                                                                                      \
        {q, q_batch, q_head, q_position}, {k, k_batch, k_head, k_position}, {v, v_batch, v_head, v_position},        \
            (u32)num_heads                                                                                           \
    }

extern "C" __global__ void __launch_bounds__(kRopeThreads, 3) graphrt_rope_backward_bf16(
    GRAPHRT_ROPE_SOURCES, u16* out, i64 rows, i64 positions, i64 num_heads, i64 head_size) {
    begin_kernel();
    const Shape shape = {(u32)positions, (u32)num_heads, (u32)head_size};
    rotate_rows<true, 3>(GRAPHRT_ROPE_GRADIENTS, cos, sin, out, rows, shape);
}

#define GRAPHRT_ROPE_BACKWARD(name, Out)                                                                             \
    extern "C" __global__ void __launch_bounds__(kRopeThreads, 4) graphrt_rope_backward_bf16_##name(                 \
        GRAPHRT_ROPE_SOURCES, u8* data, u8* transposed, const float* scale, const float* scale_inv,                  \
        float* scale_inv_out, int* amax, i64 rows, i64 positions, i64 num_heads, i64 head_size) {                    \
        begin_kernel();                                                                                              \
        const Shape shape = {(u32)positions, (u32)num_heads, (u32)head_size};                                        \
        rotate_tile<Out>(GRAPHRT_ROPE_GRADIENTS, cos, sin, data, transposed, scale, scale_inv, scale_inv_out, amax,  \
                         rows, shape);                                                                               \
    }

GRAPHRT_ROPE_BACKWARD(e4m3, E4m3)
GRAPHRT_ROPE_BACKWARD(e5m2, E5m2)
