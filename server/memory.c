// SPDX-License-Identifier: Apache-2.0
// Reads /proc and the control group's limit; and looks at a folder without reading its files.
//
// The limit of a control group is compared with what this process has, not with all that the group has: the rest of
// that is mostly the system's cache of files, which gives way.
#include "server/memory.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The second number of the file is the resident pages.
uint64_t srv_memory_resident(void) {
    FILE *file = fopen("/proc/self/statm", "re");
    char line[128] = "", *at = line;

    if (!file)
        return 0;
    if (fgets(line, sizeof line, file))
        (void)strtoull(line, &at, 10);
    fclose(file);
    return strtoull(at, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t available(void) {
    FILE *file = fopen("/proc/meminfo", "re");
    unsigned long long kib = 0;
    char line[128];

    while (file && kib == 0 && fgets(line, sizeof line, file))
        if (strncmp(line, "MemAvailable:", 13) == 0)
            kib = strtoull(line + 13, NULL, 10);
    if (file)
        fclose(file);
    return kib * 1024;
}

// memory.max of the group that the process is in (version 2); "max" and what is not there: no limit.
static uint64_t group_limit(void) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[512] = "", path[600];
    unsigned long long limit = 0;

    if (!file)
        return 0;
    while (fgets(line, sizeof line, file) && strncmp(line, "0::", 3) != 0)
        line[0] = '\0';
    fclose(file);
    line[strcspn(line, "\n")] = '\0';
    if (!line[0])
        return 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", line + 3);
    file = fopen(path, "re");
    if (file && fgets(line, sizeof line, file))
        limit = strtoull(line, NULL, 10);
    if (file)
        fclose(file);
    return limit;
}

uint64_t srv_memory_left(void) {
    const uint64_t left = available(), limit = group_limit(), used = srv_memory_resident();

    if (limit == 0)
        return left;
    const uint64_t below = limit > used ? limit - used : 1;
    return left == 0 || below < left ? below : left;
}

// ---- folders -------------------------------------------------------------------------------------------------------

// FNV-1a.
static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (const unsigned char *at = bytes; count-- > 0; at++)
        hash = (hash ^ *at) * UINT64_C(1099511628211);
    return hash;
}

uint64_t srv_folder_stamp(const char *folder) {
    DIR *listing = opendir(folder);
    uint64_t sum = 1;

    if (!listing)
        return 0;
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        struct stat facts;
        if (entry->d_name[0] == '.' || fstatat(dirfd(listing), entry->d_name, &facts, 0) != 0)
            continue;
        const int64_t told[] = {(int64_t)facts.st_dev,          (int64_t)facts.st_ino,
                                (int64_t)facts.st_size,         (int64_t)facts.st_mtim.tv_sec,
                                (int64_t)facts.st_mtim.tv_nsec, (int64_t)facts.st_ctim.tv_sec,
                                (int64_t)facts.st_ctim.tv_nsec};
        const uint64_t name = hash_bytes(UINT64_C(14695981039346656037), entry->d_name, strlen(entry->d_name));
        sum += hash_bytes(name, told, sizeof told); // in whatever order they are listed
    }
    closedir(listing);
    return sum;
}
