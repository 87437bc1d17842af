// SPDX-License-Identifier: Apache-2.0
// Quantised matrices of a checkpoint: which tensors belong to one, that they fit it and each other, reading them.
//
// A matrix whose tensor is I8 or U8 has its scales, and its minima if any, in tensors of their own (quantize.h), in
// whichever file. They are only accepted where config.json announces them, for matrices of two dimensions that stand by
// themselves. Everything is checked before the first is read; a scale that is not finite is refused when it is.
#include "engine/checkpoint_internal.h"

#include <stdio.h>
#include <string.h>

#include "engine/files.h"

bool eng_place_is_blocks(const eng_place *place) {
    return place->entry->dtype == ENG_I8 || place->entry->dtype == ENG_U8;
}

static eng_stored find_stored(const eng_checkpoint *checkpoint, const char *name, const char *suffix) {
    char text[ENG_ST_MAX_NAME + 16];
    snprintf(text, sizeof text, "%s%s", name, suffix);
    for (size_t i = 0; i < checkpoint->files; i++) {
        const eng_st_entry *entry = eng_st_find(checkpoint->file[i], text);
        if (entry)
            return (eng_stored){checkpoint->file[i], entry};
    }
    return (eng_stored){NULL, NULL};
}

static eng_status refuse(const eng_st_file *file, const char *name, const char *fault, eng_error *error) {
    return eng_fail(error, ENG_FORMAT, "%s: tensor '%.64s': %s", eng_path_tail(eng_st_path(file)), name, fault);
}

static eng_status check_shape(const eng_st_file *file, const eng_st_entry *entry, int64_t rows, int64_t columns,
                              eng_error *error) {
    if (entry->ndim == 2 && entry->shape[0] == rows && entry->shape[1] == columns)
        return ENG_OK;
    char fault[96];
    snprintf(fault, sizeof fault, "its shape is not [%lld, %lld], as the matrix asks for", (long long)rows,
             (long long)columns);
    return refuse(file, entry->name, fault, error);
}

static eng_status check_scales(const eng_stored *stored, const eng_tensor *tensor, eng_error *error) {
    if (stored->entry->dtype != ENG_F16)
        return refuse(stored->file, stored->entry->name, "its type is not F16", error);
    return check_shape(stored->file, stored->entry, tensor->shape[0], eng_blocks_of_row(tensor->shape[1]), error);
}

eng_status eng_place_find_blocks(const eng_checkpoint *checkpoint, eng_place *place, const eng_tensor *tensor,
                                 bool part, eng_error *error) {
    const eng_st_entry *entry = place->entry;
    if (!checkpoint->model->config.quantised)
        return refuse(place->file, entry->name, "is in blocks, but config.json has no quantization_config", error);
    if (part || tensor->role != ENG_ROLE_MATRIX || tensor->ndim != 2)
        return refuse(place->file, entry->name, "must be F32, F16 or BF16: it is no matrix of its own", error);
    const kern_dtype dtype = entry->dtype == ENG_I8 ? KERN_Q8 : KERN_Q4;
    eng_status status =
        check_shape(place->file, entry, tensor->shape[0], eng_blocks_row_bytes(dtype, tensor->shape[1]), error);
    if (status != ENG_OK)
        return status;
    place->scale = find_stored(checkpoint, entry->name, ".scale");
    if (!place->scale.entry)
        return refuse(place->file, entry->name, "is in blocks, but its .scale is missing", error);
    if (dtype == KERN_Q4)
        place->minimum = find_stored(checkpoint, entry->name, ".minimum");
    status = check_scales(&place->scale, tensor, error);
    return status == ENG_OK && place->minimum.entry ? check_scales(&place->minimum, tensor, error) : status;
}

static eng_status read_scales(const eng_stored *stored, uint16_t *values, eng_error *error) {
    const int64_t count = stored->entry->count;
    int64_t nonfinite = 0;
    eng_status status = eng_st_read(stored->file, stored->entry, 0, count, values, error);
    for (int64_t i = 0; status == ENG_OK && i < count; i++)
        nonfinite += (values[i] & 0x7c00) == 0x7c00;
    if (nonfinite > 0)
        return eng_fail(error, ENG_NUMERIC, "%s: tensor '%.96s': %lld of %lld values are not finite",
                        eng_path_tail(eng_st_path(stored->file)), stored->entry->name, (long long)nonfinite,
                        (long long)count);
    return status;
}

eng_status eng_place_read_blocks(const eng_place *place, const eng_tensor *tensor, eng_blocks *out, eng_error *error) {
    const kern_dtype dtype = place->entry->dtype == ENG_I8 ? KERN_Q8 : KERN_Q4;
    eng_status status =
        eng_blocks_create(dtype, tensor->shape[0], tensor->shape[1], place->minimum.entry != NULL, out, error);
    if (status != ENG_OK)
        return status;
    status = eng_st_read(place->file, place->entry, 0, place->entry->count, out->code, error);
    if (status == ENG_OK)
        status = read_scales(&place->scale, out->scale, error);
    if (status == ENG_OK && place->minimum.entry)
        status = read_scales(&place->minimum, out->minimum, error);
    if (status != ENG_OK)
        eng_blocks_free(out);
    return status;
}
