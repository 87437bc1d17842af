// SPDX-License-Identifier: Apache-2.0
// References of the feature maps in double, one vector a call.
//
// The mathematics stand in feature_map.c. Used by tests only.
#ifndef KERNELS_REF_FEATURE_MAP_H
#define KERNELS_REF_FEATURE_MAP_H

#include "kernels/kernels.h"

// z (width) -> y (kern_feature_width(feature, width)).
void kern_ref_feature_map(int feature, const double *z, double eps, double *y, int width);
// dz is written.
void kern_ref_feature_map_backward(int feature, const double *z, double eps, const double *dy, double *dz, int width);

#endif
