// Enough of CUDA C++ to run the kernels' sources on a CPU, one thread block at a time: each thread is a ucontext fiber
// that yields where it must wait for others. Blocks run one after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define GRAPHRT_EMULATION
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct uint3 { unsigned int x, y, z; };

static uint3 threadIdx, blockIdx, blockDim;

// ---- fibers ----

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kMaxThreads = 1024;

struct Fiber {
    ucontext_t context;
    bool is_done;
    unsigned int exchanged;  // the value a warp collective takes from this thread
};

// Arrivals of a group of threads that wait for each other.
struct Rendezvous {
    int num_arrived = 0;
    unsigned int generation = 0;
};

static Fiber fibers[kMaxThreads];
static std::vector<char> stacks;
static ucontext_t scheduler;
static std::function<void()> body;
static int current, block_threads, num_passes_idle;
static bool is_reversed;
static Rendezvous block_rendezvous, warp_rendezvous[kMaxThreads / 32];

static void yield_fiber() { swapcontext(&fibers[current].context, &scheduler); }

static void meet(Rendezvous& rendezvous, int num_expected) {
    num_passes_idle = 0;
    const unsigned int generation = rendezvous.generation;
    if (++rendezvous.num_arrived == num_expected) {
        rendezvous.num_arrived = 0;
        rendezvous.generation++;
        return;
    }
    while (rendezvous.generation == generation) yield_fiber();
}

static void run_fiber() {
    body();
    num_passes_idle = 0;
    fibers[current].is_done = true;
}

static void start_fiber(int thread) {
    Fiber& fiber = fibers[thread];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + thread * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    fiber.is_done = false;
    makecontext(&fiber.context, run_fiber, 0);
}

// One turn for every thread that is not done; false when all are.
static bool run_pass() {
    bool is_any_left = false;
    for (int i = 0; i < block_threads; i++) {
        current = is_reversed ? block_threads - 1 - i : i;
        if (fibers[current].is_done) continue;
        is_any_left = true;
        threadIdx = {(unsigned int)current, 0, 0};
        swapcontext(&scheduler, &fibers[current].context);
    }
    return is_any_left;
}

static void run_block() {
    block_rendezvous = {};
    for (auto& rendezvous : warp_rendezvous) rendezvous = {};
    for (int thread = 0; thread < block_threads; thread++) start_fiber(thread);
    num_passes_idle = 0;
    while (run_pass()) {
        if (++num_passes_idle > 2) {
            fprintf(stderr, "threads of block %u wait for threads that are done or wait elsewhere\n", blockIdx.x);
            abort();
        }
    }
}

static void run_grid(std::function<void()> kernel, int num_blocks, int num_threads, bool reversed) {
    stacks.resize(kMaxThreads * kStackBytes);
    body = std::move(kernel);
    block_threads = num_threads;
    blockDim = {(unsigned int)num_threads, 1, 1};
    is_reversed = reversed;
    for (int i = 0; i < num_blocks; i++) {
        blockIdx = {(unsigned int)(reversed ? num_blocks - 1 - i : i), 0, 0};
        run_block();
    }
}

// ---- device functions ----

static inline void __syncthreads() { meet(block_rendezvous, block_threads); }

// Everyone in the warp leaves a value; after the first meeting all may read, after the second all have read.
template <typename Read>
static unsigned int exchange_in_warp(unsigned int value, Read read) {
    const int thread = current, warp = thread / 32;
    fibers[thread].exchanged = value;
    meet(warp_rendezvous[warp], 32);
    const unsigned int result = read(warp * 32, thread % 32);
    meet(warp_rendezvous[warp], 32);
    return result;
}

static inline unsigned int __shfl_xor_sync(unsigned int, unsigned int value, int lane_mask) {
    return exchange_in_warp(value, [=](int first, int lane) { return fibers[first + (lane ^ lane_mask)].exchanged; });
}

static inline unsigned int __shfl_sync(unsigned int, unsigned int value, int source) {
    return exchange_in_warp(value, [=](int first, int) { return fibers[first + source % 32].exchanged; });
}

static inline unsigned int __reduce_max_sync(unsigned int, unsigned int value) {
    return exchange_in_warp(value, [](int first, int) {
        unsigned int largest = 0;
        for (int lane = 0; lane < 32; lane++) largest = std::max(largest, fibers[first + lane].exchanged);
        return largest;
    });
}

static inline int atomicMax(int* address, int value) {
    const int old = *address;
    if (value > old) *address = value;
    return old;
}

static inline unsigned int atomicAdd(unsigned int* address, unsigned int value) {
    const unsigned int old = *address;
    *address += value;
    return old;
}

static inline void __threadfence() {}

static inline float __uint_as_float(unsigned int bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline unsigned int __float_as_uint(float f) { unsigned int bits; memcpy(&bits, &f, 4); return bits; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

static inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned int result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned int)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

// ---- conversions that are single instructions on the GPU ----

static inline float emulated_half_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? __uint_as_float(0x7fffffffu) : sign * INFINITY;
    return sign * std::ldexp(exponent ? 1024.0f + mantissa : (float)mantissa, (exponent ? exponent : 1) - 25);
}

// cvt.rn: to nearest, ties to even, beyond the largest finite value inf.
static inline unsigned short emulated_float_to_half(float value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return 0x7fff;
    const float magnitude = std::fabs(value);
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), -14);
    return sign | (unsigned short)(((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
}

static inline unsigned short emulated_float_to_bf16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const unsigned int bits = __float_as_uint(value);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// cvt.rn.satfinite: to nearest, ties to even, beyond `largest` it is `largest`, NaN of either sign is 0x7f.
static inline unsigned int emulated_fp8(float value, int mantissa_bits, int bias, double largest) {
    if (std::isnan(value)) return 0x7f;
    const unsigned int sign = std::signbit(value) ? 0x80 : 0;
    const double magnitude = std::min((double)std::fabs(value), largest);
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    const int steps = (int)std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
    return sign | (unsigned int)(((exponent + bias - 1) << mantissa_bits) + steps);
}

static inline unsigned int emulated_e4m3x2(float low, float high) {
    return emulated_fp8(low, 3, 7, 448) | emulated_fp8(high, 3, 7, 448) << 8;
}

static inline unsigned int emulated_e5m2x2(float low, float high) {
    return emulated_fp8(low, 2, 15, 57344) | emulated_fp8(high, 2, 15, 57344) << 8;
}

// cvt.rn.bf16x2: to nearest, ties to even, NaN is 0x7fff.
static inline unsigned int emulated_bf16x2(float low, float high) {
    return emulated_float_to_bf16(low) | (unsigned int)emulated_float_to_bf16(high) << 16;
}
