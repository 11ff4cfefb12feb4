/* A profiler for the tests: NVTX loads it through NVTX_INJECTION64_PATH, and it writes what it is told to a file.
 *
 * No NVTX header is needed: the types below are the part of NVTX version 3's interface to tools that the domain calls go
 * through. The file, named by GRAPHRT_NVTX_LOG, is appended to line by line, so that the program can write marks of its own
 * into it:
 *
 *   domain DOMAIN NAME                       a domain was made
 *   string DOMAIN HANDLE NAME                a string was registered
 *   push THREAD DOMAIN HANDLE TYPE PAYLOAD   a range was entered; HANDLE is 0 for a message that is no registered string,
 *                                            TYPE is 0 without a payload, 2 for a signed 64-bit one
 *   pop THREAD DOMAIN
 *   destroy DOMAIN
 */

#define _GNU_SOURCE
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint16_t version;
    uint16_t size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type;
    int32_t reserved;
    int64_t payload;
    int32_t message_type;
    const void *message;
} Event;

typedef void (*Function)(void);

typedef struct {
    size_t size;
    /* The table of a module of NVTX: addresses of the pointers that its calls go through. */
    int (*get_module_functions)(int module, Function ***functions, unsigned *num_functions);
} Callbacks;

enum { EXPORT_CALLBACKS = 1, MODULE_CORE2 = 5, MESSAGE_REGISTERED = 3 };
enum { DOMAIN_RANGE_PUSH = 4, DOMAIN_RANGE_POP = 5, DOMAIN_REGISTER_STRING = 10, DOMAIN_CREATE = 12, DOMAIN_DESTROY = 14 };

static FILE *lines;
static intptr_t num_handles; /* the interpreter's lock is held in every call that makes one */

static long thread(void) { return syscall(SYS_gettid); }

static void *create_domain(const char *name) {
    intptr_t domain = ++num_handles;
    fprintf(lines, "domain %" PRIdPTR " %s\n", domain, name);
    return (void *)domain;
}

static void destroy_domain(void *domain) { fprintf(lines, "destroy %" PRIdPTR "\n", (intptr_t)domain); }

static void *register_string(void *domain, const char *name) {
    intptr_t handle = ++num_handles;
    fprintf(lines, "string %" PRIdPTR " %" PRIdPTR " %s\n", (intptr_t)domain, handle, name);
    return (void *)handle;
}

static int push(void *domain, const Event *event) {
    intptr_t handle = event->message_type == MESSAGE_REGISTERED ? (intptr_t)event->message : 0;
    fprintf(lines, "push %ld %" PRIdPTR " %" PRIdPTR " %" PRId32 " %" PRId64 "\n", thread(), (intptr_t)domain, handle,
            event->payload_type, event->payload_type ? event->payload : 0);
    return 0;
}

static int pop(void *domain) {
    fprintf(lines, "pop %ld %" PRIdPTR "\n", thread(), (intptr_t)domain);
    return 0;
}

/* What NVTX looks up by name and calls once, at the first NVTX call of the process. Returns 1 for success. */
int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const Callbacks *callbacks = get_export_table(EXPORT_CALLBACKS);
    Function **functions = NULL;
    unsigned num_functions = 0;
    const char *path = getenv("GRAPHRT_NVTX_LOG");
    if (!callbacks || !path || !callbacks->get_module_functions(MODULE_CORE2, &functions, &num_functions)) return 0;
    if (num_functions <= DOMAIN_DESTROY) return 0;
    lines = fopen(path, "a");
    if (!lines) return 0;
    setvbuf(lines, NULL, _IOLBF, 0);
    *functions[DOMAIN_CREATE] = (Function)create_domain;
    *functions[DOMAIN_DESTROY] = (Function)destroy_domain;
    *functions[DOMAIN_REGISTER_STRING] = (Function)register_string;
    *functions[DOMAIN_RANGE_PUSH] = (Function)push;
    *functions[DOMAIN_RANGE_POP] = (Function)pop;
    return 1;
}
