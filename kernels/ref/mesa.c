// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core in double. Written to be read: states of a head are kept for the backward pass, every solve
// stands alone.
#include "kernels/ref/mesa.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double softplus(double x) {
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void multiply(int depth, const double *h, const double *lambda, const double *p, double *y) {
    for (int i = 0; i < depth; i++)
        y[i] = dot(h + i * depth, p, depth) + lambda[i] * p[i];
}

void kern_ref_mesa_exact(int depth, const double *h, const double *lambda, const double *q, double *x) {
    double *l = calloc((size_t)depth * (size_t)depth, sizeof(double)); // A = L L^T
    for (int i = 0; i < depth; i++)
        for (int j = 0; j <= i; j++) {
            double sum = h[i * depth + j] + (i == j ? lambda[i] : 0) - dot(l + i * depth, l + j * depth, j);
            l[i * depth + j] =
                i == j ? sqrt(sum) : sum / l[j * depth + j]; // sqrt of a negative number: NaN, as promised
        }
    for (int i = 0; i < depth; i++)
        x[i] = (q[i] - dot(l + i * depth, x, i)) / l[i * depth + i];
    for (int i = depth - 1; i >= 0; i--) {
        for (int j = i + 1; j < depth; j++)
            x[i] -= l[j * depth + i] * x[j];
        x[i] /= l[i * depth + i];
    }
    free(l);
}

static bool finished(const kern_solver *solver, int steps, double residual, double first, double rhs) {
    if (steps >= solver->max_steps)
        return true;
    if (solver->mode == KERN_SOLVE_FIXED)
        return false;
    if (solver->mode == KERN_SOLVE_STEPS)
        return sqrt(residual) <= 1e-7 * sqrt(rhs);
    return sqrt(residual) <= fmax(solver->tolerance * sqrt(first), 1e-6 * sqrt(rhs));
}

int kern_ref_mesa_solve(int depth, const double *h, const double *lambda, const double *q, const kern_solver *solver,
                        double *x) {
    const size_t bytes = (size_t)depth * sizeof(double);
    double *r = malloc(bytes), *p = malloc(bytes), *ap = malloc(bytes);
    const double epsilon = solver->mode == KERN_SOLVE_FIXED ? 1e-5 : 0;
    for (int i = 0; i < depth; i++)
        x[i] = solver->mode == KERN_SOLVE_FIXED ? 0 : q[i] / (h[i * depth + i] + lambda[i]);
    multiply(depth, h, lambda, x, ap);
    for (int i = 0; i < depth; i++)
        p[i] = r[i] = q[i] - ap[i];
    const double rhs = dot(q, q, depth), first = dot(r, r, depth);
    double residual = first;
    int steps = 0;
    while (!finished(solver, steps, residual, first, rhs)) {
        multiply(depth, h, lambda, p, ap);
        const double curvature = dot(p, ap, depth);
        if ((!(curvature > 0) && epsilon == 0) || !isfinite(curvature))
            break;
        const double length = residual / (curvature + epsilon);
        for (int i = 0; i < depth; i++) {
            x[i] += length * p[i];
            r[i] -= length * ap[i];
        }
        const double next = dot(r, r, depth), keep = next / (residual + epsilon);
        for (int i = 0; i < depth; i++)
            p[i] = r[i] + keep * p[i];
        residual = next;
        steps++;
    }
    free(ap);
    free(p);
    free(r);
    return steps;
}

static bool begins(const kern_ref_mesa_inputs *in, int t) {
    return t > 0 && in->begins && in->begins[t];
}

// next = gamma previous + beta k w^T for (depth, width) matrices.
static void write_state(int depth, int width, double gamma, double beta, const double *k, const double *w,
                        const double *previous, double *next) {
    for (int i = 0; i < depth; i++)
        for (int j = 0; j < width; j++)
            next[i * width + j] = gamma * previous[i * width + j] + beta * k[i] * w[j];
}

static void head_lambda(const kern_mesa *mesa, const double *params, int h, double *lambda) {
    for (int i = 0; i < mesa->key_width; i++)
        lambda[i] = softplus(params[h * mesa->key_width + i]) + mesa->lambda_bound;
}

void kern_ref_mesa(const kern_mesa *mesa, int tokens, const kern_ref_mesa_inputs *in, const kern_solver *solver,
                   double *keys, double *values, double *x, double *o) {
    const int depth = mesa->key_width, width = mesa->value_width, heads = mesa->heads;
    double *lambda = malloc((size_t)depth * sizeof(double)), *solution = malloc((size_t)depth * sizeof(double));
    for (int h = 0; h < heads; h++) {
        double *hk = keys + h * depth * depth, *hv = values + h * depth * width;
        head_lambda(mesa, in->lambda_params, h, lambda);
        for (int t = 0; t < tokens; t++) {
            const int at = t * heads + h;
            const double gamma = begins(in, t) ? 0 : exp(in->g[at]);
            write_state(depth, depth, gamma, in->beta[at], in->k + at * depth, in->k + at * depth, hk, hk);
            write_state(depth, width, gamma, in->beta[at], in->k + at * depth, in->v + at * width, hv, hv);
            if (solver->mode == KERN_SOLVE_EXACT)
                kern_ref_mesa_exact(depth, hk, lambda, in->q + at * depth, solution);
            else
                kern_ref_mesa_solve(depth, hk, lambda, in->q + at * depth, solver, solution);
            for (int j = 0; j < width; j++) {
                double read = 0;
                for (int i = 0; i < depth; i++)
                    read += hv[i * width + j] * solution[i];
                o[at * width + j] = read;
            }
            if (x)
                memcpy(x + at * depth, solution, (size_t)depth * sizeof(double));
        }
    }
    free(solution);
    free(lambda);
}

// What one head of the backward pass holds.
typedef struct head_pass {
    const double *hk, *hv; // (tokens + 1) states
    double *f, *g;         // dL/dHk_t, dL/dHv_t
    double *lambda, *x, *u, *dx;
} head_pass;

static void backward_token(const kern_mesa *mesa, const kern_ref_mesa_inputs *in, int t, int h, const double *d_o,
                           const head_pass *pass, const kern_ref_mesa_gradients *out) {
    const int depth = mesa->key_width, width = mesa->value_width, at = t * mesa->heads + h;
    const double *hk = pass->hk + (size_t)(t + 1) * depth * depth, *hv = pass->hv + (size_t)(t + 1) * depth * width;
    const double *hk_before = hk - depth * depth, *hv_before = hv - depth * width;
    const double *k = in->k + at * depth, *v = in->v + at * width, *dout = d_o + at * width;
    const double gamma = begins(in, t) ? 0 : exp(in->g[at]), beta = in->beta[at];
    double dbeta = 0, dgamma = 0;
    kern_ref_mesa_exact(depth, hk, pass->lambda, in->q + at * depth, pass->x);
    for (int i = 0; i < depth; i++)
        pass->dx[i] = dot(hv + i * width, dout, width);
    kern_ref_mesa_exact(depth, hk, pass->lambda, pass->dx, pass->u);
    memset(out->dk + at * depth, 0, (size_t)depth * sizeof(double));
    memset(out->dv + at * width, 0, (size_t)width * sizeof(double));
    for (int i = 0; i < depth; i++) {
        out->dq[at * depth + i] = pass->u[i];
        out->grad_lambda_params[h * depth + i] -=
            pass->u[i] * pass->x[i] / (1 + exp(-in->lambda_params[h * depth + i]));
        for (int j = 0; j < width; j++) {
            double *g = &pass->g[i * width + j];
            *g += pass->x[i] * dout[j];
            out->dk[at * depth + i] += beta * *g * v[j];
            out->dv[at * width + j] += beta * *g * k[i];
            dbeta += k[i] * *g * v[j];
            dgamma += *g * hv_before[i * width + j];
            *g *= gamma;
        }
        for (int j = 0; j < depth; j++)
            pass->f[i * depth + j] -= pass->u[i] * pass->x[j];
    }
    for (int i = 0; i < depth; i++)
        for (int j = 0; j < depth; j++) {
            out->dk[at * depth + i] += beta * (pass->f[i * depth + j] + pass->f[j * depth + i]) * k[j];
            dbeta += k[i] * pass->f[i * depth + j] * k[j];
            dgamma += pass->f[i * depth + j] * hk_before[i * depth + j];
        }
    for (int i = 0; i < depth * depth; i++)
        pass->f[i] *= gamma;
    out->dbeta[at] = dbeta;
    out->dg[at] = gamma * dgamma;
}

void kern_ref_mesa_backward(const kern_mesa *mesa, int tokens, const kern_ref_mesa_inputs *in, const double *keys,
                            const double *values, const double *d_o, const kern_ref_mesa_gradients *out) {
    const int depth = mesa->key_width, width = mesa->value_width, heads = mesa->heads;
    const size_t kk = (size_t)depth * (size_t)depth, kv = (size_t)depth * (size_t)width, d = (size_t)depth;
    double *memory = malloc((((size_t)tokens + 2) * (kk + kv) + 4 * d) * sizeof(double));
    double *hk = memory, *hv = hk + ((size_t)tokens + 1) * kk, *f = hv + ((size_t)tokens + 1) * kv, *g = f + kk;
    double *lambda = g + kv;
    const head_pass pass = {hk, hv, f, g, lambda, lambda + d, lambda + 2 * d, lambda + 3 * d};
    memset(out->grad_lambda_params, 0, (size_t)heads * d * sizeof(double));
    for (int h = 0; h < heads; h++) {
        head_lambda(mesa, in->lambda_params, h, lambda);
        for (size_t i = 0; i < kk; i++) {
            hk[i] = keys ? keys[h * kk + i] : 0;
            f[i] = out->dkeys ? out->dkeys[h * kk + i] : 0;
        }
        for (size_t i = 0; i < kv; i++) {
            hv[i] = values ? values[h * kv + i] : 0;
            g[i] = out->dvalues ? out->dvalues[h * kv + i] : 0;
        }
        for (int t = 0; t < tokens; t++) {
            const int at = t * heads + h;
            const double gamma = begins(in, t) ? 0 : exp(in->g[at]);
            const double *k = in->k + at * depth;
            write_state(depth, depth, gamma, in->beta[at], k, k, hk + t * kk, hk + (t + 1) * kk);
            write_state(depth, width, gamma, in->beta[at], k, in->v + at * width, hv + t * kv, hv + (t + 1) * kv);
        }
        for (int t = tokens - 1; t >= 0; t--)
            backward_token(mesa, in, t, h, d_o, &pass, out);
        if (out->dkeys)
            memcpy(out->dkeys + h * kk, f, kk * sizeof(double));
        if (out->dvalues)
            memcpy(out->dvalues + h * kv, g, kv * sizeof(double));
    }
    free(memory);
}
