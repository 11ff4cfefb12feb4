// Rotary position embedding: the pair (x[i], x[i + Dh/2]) of a head is turned by the angle of its position,
//     first' = first * cos - second * sin,    second' = second * cos + first * sin,
// in fp32 without contraction, rounded once to bf16; backward turns by the opposite angle. A thread always holds both
// halves of its pairs, eight of each in a 16-byte vector, so nothing is exchanged.
//
// Two shapes of the same work, both limited by memory:
// - Row-major bf16 (forward in place, backward without FP8): a thread takes one position and the same eight pairs of
//   four heads, so that its sixteen cosines and sines are read once for 128 bytes of x.
// - Backward to FP8, row-major and transposed, with the amax: a tile of 64 positions x 16 lanes, a lane being eight
//   pairs (16 columns) of one head. A thread takes four positions of a lane. A tile's lanes are a few neighbouring lanes
//   of four heads: heads share the cosines, and reading those for each head would cost the L2 as much as the gradients.
//   The rest is as in quantize.cu: 4x4 bytes are transposed with byte permutes and leave through shared memory as
//   16-byte units, 64 contiguous bytes per column.
//
// Addresses are 16-byte aligned and strides are multiples of eight elements; the launcher sees to it.
// common.cuh stands in front of this text.

constexpr int kRopeThreads = 256;
constexpr int kRopeHeads = 4;                    // heads a thread of the row-major kernels takes, and heads sharing a tile
constexpr int kRopeTileRows = 64;
constexpr int kRopeLanes = 16;
constexpr int kRopeLaneCols = 16;                // eight of the first half of a head, eight of the second
constexpr int kRopeUnits = kRopeTileRows / 16;   // 16-byte units of one transposed row of a tile
constexpr int kRopeTileUnits = kRopeLanes * kRopeLaneCols * kRopeUnits;

static_assert(kRopeThreads == kRopeLanes * kRopeTileRows / 4, "a thread takes four positions of a lane");
static_assert(kRopeLanes % 8 == 0, "a warp takes eight lanes of sixteen positions");

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

// A thread's place: eight lanes x four row groups a warp, the four groups being one 16-byte unit of the transpose.
struct Place {
    int lane, row_group;
};

__device__ __forceinline__ Place locate_thread() {
    constexpr int kWarpsAcross = kRopeLanes / 8;
    const int warp = (int)threadIdx.x / 32;
    return Place{(int)threadIdx.x % 8 + warp % kWarpsAcross * 8, (int)threadIdx.x / 8 % 4 + warp / kWarpsAcross * 4};
}

// A lane's head (counted through q, k and v) and first column inside it. Lanes are numbered so that `lanes_together`
// neighbours of a head are followed by the same of the next three heads.
struct Lane {
    u32 head, column;
};

__device__ __forceinline__ Lane locate_lane(u32 lane, u32 lanes_together, const Shape& shape) {
    const u32 blocks_in_head = shape.head_size / 16 / lanes_together;
    const u32 inner = lane % lanes_together, block = lane / lanes_together;
    const u32 head_in_group = block % kRopeHeads, rest = block / kRopeHeads;
    const u32 head = rest / blocks_in_head * kRopeHeads + head_in_group;
    return Lane{head, 8 * (rest % blocks_in_head * lanes_together + inner)};
}

__device__ __forceinline__ u32 count_tiles_across(u32 lanes_together, const Shape& shape) {
    const u32 num_groups = (3 * shape.num_heads + kRopeHeads - 1) / kRopeHeads;
    return (num_groups * kRopeHeads * (shape.head_size / 16) + kRopeLanes - 1) / kRopeLanes;
}

// Place of a 16-byte unit of the transposed tile: XOR with the lane, so that writes (eight lanes, four words of a unit)
// and reads (eight neighbouring units) touch all 32 banks once.
__device__ __forceinline__ int place_unit(int column, int unit) {
    return (column * kRopeUnits + unit) ^ (column / kRopeLaneCols % 8);
}

// Four positions' gradients of one lane, first and second half.
struct Pairs {
    Bytes16 half[2][4];
    u32 position[4];
};

__device__ __forceinline__ Pairs load_pairs(const Gradients& gradients, const Lane& lane, i64 row, i64 num_valid,
                                            const Shape& shape) {
    Pairs pairs;
    u32 batch = (u32)row / shape.positions, position = (u32)row % shape.positions;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        pairs.position[r] = position;
        pairs.half[0][r] = pairs.half[1][r] = zero_vector();
        if (r < num_valid) {
            const u16* x = gradients.locate(batch, lane.head, position);
            pairs.half[0][r] = load_vector<Bf16>(x, lane.column);
            pairs.half[1][r] = load_vector<Bf16>(x, lane.column + shape.half());
        }
        if (++position == shape.positions) {
            position = 0;
            batch++;
        }
    }
    return pairs;
}

// Quantizes four rows of eight columns: q has two words a row. Rows from num_valid on are the pad: zeros, even under a
// scale that is not finite.
template <typename Out>
__device__ __forceinline__ u32 quantize_four(const Bytes16* v, float scale, i64 num_valid, u32 (*q)[2]) {
    u32 amax = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        amax = merge_amax<Bf16>(amax, v[r]);
        quantize_vector<Bf16, Out>(v[r], scale, q[r]);
        if (r >= num_valid) zero_words<2>(q[r]);
    }
    return amax;
}

__device__ __forceinline__ void stage_transposed(u32* unit_words, int column, int row_group, const u32 (*q)[2]) {
    u32 columns[8];
    transpose_4x8(q, columns);
#pragma unroll
    for (int c = 0; c < 8; c++) unit_words[place_unit(column + c, row_group / 4) * 4 + row_group % 4] = columns[c];
}

// Rows of the transpose leave shared memory. They end at a multiple of 16: a unit lies inside or outside.
__device__ __forceinline__ void store_staged(const uint4* units, const int* lane_columns, u8* transposed, i64 tile_row,
                                             i64 rows, u32 half) {
    const i64 padded_rows = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kRopeTileUnits / kRopeThreads; i++) {
        const int index = i * kRopeThreads + (int)threadIdx.x;
        const int column = index / kRopeUnits, unit = index % kRopeUnits;
        const int lane_column = lane_columns[column / kRopeLaneCols];
        const i64 row = tile_row + 16 * unit;
        if (lane_column < 0 || row >= padded_rows) continue;
        const i64 out_row = lane_column + column / 8 % 2 * (i64)half + column % 8;
        const uint4 bytes = units[place_unit(column, unit)];
        const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
        store_words<4>(transposed, out_row * padded_rows + row, words);
    }
}

template <typename Out>
__device__ __forceinline__ void rotate_tile(const Gradients& gradients, const u32* cos, const u32* sin, u8* data, u8* transposed,
                                            const float* scale_in, const float* scale_inv, float* scale_inv_out,
                                            int* amax_out, i64 rows, const Shape& shape, u32 lanes_together) {
    __shared__ uint4 units[kRopeTileUnits];  // [column][unit of 16 rows], units placed by XOR
    __shared__ int lane_columns[kRopeLanes];  // first column of each lane, -1 past the last head
    __shared__ u32 warp_amax[kRopeThreads / 32];
    const u32 tiles_across = count_tiles_across(lanes_together, shape);
    const u32 down = blockIdx.x / tiles_across, across = blockIdx.x - down * tiles_across;
    const Place place = locate_thread();
    const Lane lane = locate_lane(across * kRopeLanes + place.lane, lanes_together, shape);
    const bool is_inside = lane.head < 3 * shape.num_heads;
    const i64 tile_row = (i64)down * kRopeTileRows, row = tile_row + 4 * place.row_group;
    const i64 num_valid = is_inside ? clamp_count(rows - row, 4) : 0;

    Pairs pairs = load_pairs(gradients, lane, row, num_valid, shape);
    const float scale = *scale_in;
    const i64 out_column = (i64)lane.head * shape.head_size + lane.column;
    if (lane.head < 2 * shape.num_heads) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (r >= num_valid) continue;
            const Angles angles = load_angles(cos, sin, (i64)pairs.position[r] * shape.half() + lane.column);
            rotate<true>(angles, pairs.half[0][r], pairs.half[1][r]);
        }
    }
    u32 amax = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 q[4][2];
        const u32 half_amax = quantize_four<Out>(pairs.half[h], scale, num_valid, q);
        amax = half_amax > amax ? half_amax : amax;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (r < num_valid) store_words<2>(data, (row + r) * shape.columns() + out_column + h * (i64)shape.half(), q[r]);
        }
        stage_transposed(reinterpret_cast<u32*>(units), place.lane * kRopeLaneCols + 8 * h, place.row_group, q);
    }
    if (place.row_group == 0) lane_columns[place.lane] = is_inside ? (int)out_column : -1;
    if (amax_out != nullptr) stage_warp_amax(amax, warp_amax);
    copy_scale_inv(scale_inv, scale_inv_out);
    __syncthreads();
    if (transposed != nullptr) store_staged(units, lane_columns, transposed, tile_row, rows, shape.half());
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
    extern "C" __global__ void __launch_bounds__(kRopeThreads, 3) graphrt_rope_backward_bf16_##name(                 \
        GRAPHRT_ROPE_SOURCES, u8* data, u8* transposed, const float* scale, const float* scale_inv,                  \
        float* scale_inv_out, int* amax, i64 rows, i64 positions, i64 num_heads, i64 head_size,                      \
        i64 lanes_together) {                                                                                        \
        begin_kernel();                                                                                              \
        const Shape shape = {(u32)positions, (u32)num_heads, (u32)head_size};                                        \
        rotate_tile<Out>(GRAPHRT_ROPE_GRADIENTS, cos, sin, data, transposed, scale, scale_inv, scale_inv_out, amax,      \
                         rows, shape, (u32)lanes_together);                                                          \
    }

GRAPHRT_ROPE_BACKWARD(e4m3, E4m3)
GRAPHRT_ROPE_BACKWARD(e5m2, E5m2)
