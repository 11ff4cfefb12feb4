// Built once per source, with the paths of its files as KERNEL_... macros. Kernels are called like the driver does: an address for each argument.
#include "cuda_emulation.h"

#include <utility>

#include KERNEL_COMMON
#include KERNEL_SOURCE

template <typename... Args, size_t... I>
static void run(void (*kernel)(Args...), void** args, int num_blocks, int num_threads, bool is_reversed, std::index_sequence<I...>) {
    static_assert(((sizeof(Args) == 8) && ...), "the launcher passes 8 bytes for each argument");
    run_grid([=] { kernel(*static_cast<Args*>(args[I])...); }, num_blocks, num_threads, is_reversed);
}

template <typename... Args>
static int run_if_count(void (*kernel)(Args...), void** args, int num_args, int num_blocks, int num_threads, int is_reversed) {
    if (num_args != sizeof...(Args)) return -1;
    run(kernel, args, num_blocks, num_threads, is_reversed, std::index_sequence_for<Args...>());
    return 0;
}

// `kernel` is the address of an entry point that has the signature of `like`.
#define EMULATE(like)                                                                                               \
    extern "C" int emulate_##like(void* kernel, void** args, int num_args, int num_blocks, int num_threads, int is_reversed) { \
        return run_if_count(reinterpret_cast<decltype(&like)>(kernel), args, num_args, num_blocks, num_threads, is_reversed); \
    }

// The entry points of this source, or one for each signature among them.
#include KERNEL_SIGNATURES
