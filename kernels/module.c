// SPDX-License-Identifier: Apache-2.0
// Opens the CUDA module, a shared object that links no project library and exports kern_module_v1 alone.
//
// It is looked for as libmesa_kern_cuda.so in the folder MESA_LIBRARY_DIR and nowhere else when that is set; otherwise
// beside the program, where an installation has it from there, which may have been moved as a whole, then in the
// library directory that the build was configured with, for programs of others that use the library. RTLD_NOW and
// RTLD_LOCAL: a module whose own libraries are missing fails here, with the linker's words as the reason. ABI number
// and struct sizes are compared before any other member is used. There is no fallback here: the caller decides what an
// absent module means.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/backend.h"

#define MODULE_NAME "libmesa_kern_cuda.so"

typedef char module_path[4096];

static bool join(module_path path, const char *directory) {
    int length = snprintf(path, sizeof(module_path), "%s/" MODULE_NAME, directory);
    return length > 0 && (size_t)length < sizeof(module_path);
}

// The program's folder, empty where it is unknown.
static void find_program(module_path folder) {
    ssize_t length = readlink("/proc/self/exe", folder, sizeof(module_path) - 1);
    folder[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(folder, '/');
    *(slash ? slash : folder) = '\0';
}

static bool is_at(module_path path, const char *program, const char *place) {
    module_path folder;
    int length = snprintf(folder, sizeof folder, "%s/%s", program, place);
    return length > 0 && (size_t)length < sizeof folder && join(path, folder) && access(path, F_OK) == 0;
}

static bool find_module(module_path path) {
    const char *directory = getenv("MESA_LIBRARY_DIR");
    if (directory && directory[0])
        return join(path, directory);
    module_path program;
    find_program(program);
    return is_at(path, program, ".") || is_at(path, program, KERN_LIBRARY_PLACE) || join(path, KERN_LIBRARY_DIR);
}

static kern_status check_abi(const kern_backend *backend, char *reason, size_t reason_size) {
    if (!backend) {
        kern_set_reason(reason, reason_size, MODULE_NAME " refuses this program's ABI %d", (int)KERN_ABI);
        return KERN_NO_DEVICE;
    }
    if (backend->abi != KERN_ABI || backend->size_rows != sizeof(kern_rows) ||
        backend->size_backend != sizeof(kern_backend)) {
        kern_set_reason(reason, reason_size,
                        MODULE_NAME
                        " is of another version: ABI %u, row table %u bytes, table %u bytes; this program has "
                        "%d, %zu, %zu",
                        backend->abi, backend->size_rows, backend->size_backend, (int)KERN_ABI, sizeof(kern_rows),
                        sizeof(kern_backend));
        return KERN_NO_DEVICE;
    }
    return KERN_OK;
}

kern_status kern_module_open(void **module, const kern_backend **backend, char *reason, size_t reason_size) {
    const kern_host host = {KERN_ABI};
    module_path path;
    if (!find_module(path)) {
        kern_set_reason(reason, reason_size, "MESA_LIBRARY_DIR is too long a path");
        return KERN_NO_DEVICE;
    }
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *text = dlerror();
        kern_set_reason(reason, reason_size, "no CUDA module: %s", text ? text : path);
        return KERN_NO_DEVICE;
    }
    kern_status status = KERN_NO_DEVICE;
    kern_module_function *entry = NULL;
    void *symbol = dlsym(handle, "kern_module_v1");
    if (!symbol) {
        kern_set_reason(reason, reason_size, "%s exports no kern_module_v1", path);
        goto fail;
    }
    memcpy(&entry, &symbol, sizeof entry); // ISO C has no cast from an object to a function pointer
    *backend = entry(&host);
    status = check_abi(*backend, reason, reason_size);
    if (status)
        goto fail;
    *module = handle;
    return KERN_OK;
fail:
    dlclose(handle);
    return status;
}
