// SPDX-License-Identifier: Apache-2.0
// Memory of the process and what is left for it, and whether a folder's files are as they were.
//
// Figures of the system's files; what cannot be read is 0. Any thread.
#ifndef SERVER_MEMORY_H
#define SERVER_MEMORY_H

#include <stdint.h>

uint64_t srv_memory_resident(void); // bytes of this process
// Bytes that the system and the process's control group have left for more; 0: not known.
uint64_t srv_memory_left(void);
// Of names, sizes, places and times of a folder's files: another number where one was written or replaced.
uint64_t srv_folder_stamp(const char *folder);

#endif
