// The layers' small operations on a CPU in float32, each in one pass over its rows while they lie in the cache.
//
// The equations are those of backends/layers/pytorch.py, forward and backward. All tensors are contiguous. Work is
// divided into parts that do not depend on the number of threads, and sums over parts are added up in their order, so
// that the same call returns the same bits with any number of threads. Loops over a row's elements are written so that
// the compiler makes vector instructions of them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../exponential.h"

#define INLINE static inline __attribute__((always_inline))
#define PARALLEL _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")

typedef float *__restrict__ Out;
typedef const float *__restrict__ In;

// exp(x) to about one unit of the last place; 1.2e-38 below -87, where float32 loses digits, infinite above 88.3, so
// that no number here is a slow denormal one; keeps a NaN.
INLINE float exponential(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 89.0f ? 89.0f : x;
    const float n = doublings(x), p = exponential_of_remainder(remainder_of(x, n));
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}
INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
// The derivative of x sigmoid(x), where s is the sigmoid.
INLINE float silu_slope(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

constexpr int64_t CHANNELS = 192;  // of one task of a convolution: its rows fit the first cache
constexpr int64_t ROWS = 64;       // whose gradients are added up before they meet those of others

// How many taps of token t lie before its sequence's first token.
INLINE int64_t outside(const int64_t *position, int64_t t, int64_t W) {
    const int64_t before = position ? position[t] : t;
    return before >= W - 1 ? 0 : W - 1 - before;
}

INLINE void convolve(In x, In taps, Out z, int64_t first, int64_t W, int64_t C, int64_t n) {
    for (int64_t c = 0; c < n; c++) z[c] = x[(W - 1) * C + c] * taps[(W - 1) * C + c];
    for (int64_t j = first; j < W - 1; j++)
        for (int64_t c = 0; c < n; c++) z[c] += x[j * C + c] * taps[j * C + c];
}

extern "C" {

// x, y [B, T, C]; taps [W, C]; position [T] or null, for B = 1
void convolution_forward(const float *x, const float *taps, const int64_t *position, float *y, int64_t B, int64_t T,
                         int64_t C, int64_t W, int64_t silu, int64_t threads) {
    const int64_t blocks = (C + CHANNELS - 1) / CHANNELS;
    PARALLEL
    for (int64_t task = 0; task < B * blocks; task++) {
        const int64_t from = task % blocks * CHANNELS, n = std::min(CHANNELS, C - from);
        const int64_t row = task / blocks * T;
        for (int64_t t = 0; t < T; t++) {
            float z[CHANNELS];
            const int64_t at = (row + t) * C + from;
            convolve(x + at - (W - 1) * C, taps + from, z, outside(position, t, W), W, C, n);
            Out out = y + at;
            if (silu)
                for (int64_t c = 0; c < n; c++) out[c] = z[c] * sigmoid(z[c]);
            else
                for (int64_t c = 0; c < n; c++) out[c] = z[c];
        }
    }
}

// dtaps [B, W, C]: one for each sequence of the batch
void convolution_backward(const float *dy, const float *x, const float *taps, const int64_t *position, float *dx,
                          float *dtaps, int64_t B, int64_t T, int64_t C, int64_t W, int64_t silu, int64_t threads) {
    const int64_t blocks = (C + CHANNELS - 1) / CHANNELS;
    PARALLEL
    for (int64_t task = 0; task < B * blocks; task++) {
        const int64_t from = task % blocks * CHANNELS, n = std::min(CHANNELS, C - from), b = task / blocks;
        Out total = dtaps + b * W * C + from;
        std::vector<float> some(W * n);
        Out dw = some.data();
        for (int64_t j = 0; j < W; j++) memset(total + j * C, 0, n * sizeof(float));
        for (int64_t t = 0; t < T; t++) {
            float z[CHANNELS], dz[CHANNELS];
            const int64_t at = (b * T + t) * C + from, first = outside(position, t, W);
            In seen = x + at - (W - 1) * C, w = taps + from, d = dy + at;
            if (silu) {
                convolve(seen, w, z, first, W, C, n);
                for (int64_t c = 0; c < n; c++) dz[c] = d[c] * silu_slope(z[c], sigmoid(z[c]));
            } else {
                for (int64_t c = 0; c < n; c++) dz[c] = d[c];
            }
            Out out = dx + at - (W - 1) * C;
            for (int64_t c = 0; c < n; c++) out[(W - 1) * C + c] = 0.0f;
            for (int64_t j = first; j < W; j++)
                for (int64_t c = 0; c < n; c++) {
                    out[j * C + c] += w[j * C + c] * dz[c];
                    dw[j * n + c] += seen[j * C + c] * dz[c];
                }
            if ((t + 1) % ROWS == 0 || t + 1 == T)
                for (int64_t j = 0; j < W; j++)
                    for (int64_t c = 0; c < n; c++) {
                        total[j * C + c] += dw[j * n + c];
                        dw[j * n + c] = 0.0f;
                    }
        }
    }
}

// x [rows, N]; gate [rows, N], residual [rows, N], or null; total [rows, N] unless residual is null; r [rows];
// silu: the gate is multiplied as SiLU of it, or else as its sigmoid
void norm_forward(const float *x, const float *gate, const float *residual, const float *weight, float *y,
                  float *total, float *r, int64_t rows, int64_t N, int64_t silu, double eps, int64_t threads) {
    PARALLEL
    for (int64_t part = 0; part < (rows + ROWS - 1) / ROWS; part++)
        for (int64_t row = part * ROWS; row < std::min(rows, (part + 1) * ROWS); row++) {
            In given = x + row * N;
            if (residual) {
                In before = residual + row * N;
                Out all = total + row * N;
                for (int64_t i = 0; i < N; i++) all[i] = before[i] + given[i];
                given = all;
            }
            float square = 0.0f;
#pragma omp simd reduction(+ : square)
            for (int64_t i = 0; i < N; i++) square += given[i] * given[i];
            const float scale = 1.0f / __builtin_sqrtf(square / N + static_cast<float>(eps));
            r[row] = scale;
            Out out = y + row * N;
            if (gate && silu) {
                In z = gate + row * N;
                for (int64_t i = 0; i < N; i++) out[i] = given[i] * scale * weight[i] * (z[i] * sigmoid(z[i]));
            } else if (gate) {
                In z = gate + row * N;
                for (int64_t i = 0; i < N; i++) out[i] = given[i] * scale * weight[i] * sigmoid(z[i]);
            } else {
                for (int64_t i = 0; i < N; i++) out[i] = given[i] * scale * weight[i];
            }
        }
}

// dtotal [rows, N] is added to dx, or null; dgate [rows, N] unless gate is null; dweight [ceil(rows / ROWS), N]
void norm_backward(const float *dy, const float *dtotal, const float *x, const float *gate, const float *weight,
                   const float *r, float *dx, float *dgate, float *dweight, int64_t rows, int64_t N, int64_t silu,
                   int64_t threads) {
    PARALLEL
    for (int64_t part = 0; part < (rows + ROWS - 1) / ROWS; part++) {
        std::vector<float> normed(N), dn(N);
        Out h = normed.data(), n = dn.data(), dw = dweight + part * N;
        memset(dw, 0, N * sizeof(float));
        for (int64_t row = part * ROWS; row < std::min(rows, (part + 1) * ROWS); row++) {
            In d = dy + row * N, given = x + row * N;
            const float scale = r[row];
            for (int64_t i = 0; i < N; i++) h[i] = given[i] * scale;
            if (gate && silu) {
                In z = gate + row * N;
                Out dz = dgate + row * N;
                for (int64_t i = 0; i < N; i++) {
                    const float s = sigmoid(z[i]);
                    dz[i] = d[i] * (h[i] * weight[i]) * silu_slope(z[i], s);
                    n[i] = d[i] * (z[i] * s);
                }
            } else if (gate) {
                In z = gate + row * N;
                Out dz = dgate + row * N;
                for (int64_t i = 0; i < N; i++) {
                    const float s = sigmoid(z[i]);
                    dz[i] = d[i] * (h[i] * weight[i]) * (s * sigmoid(-z[i]));  // 1 - s would lose digits
                    n[i] = d[i] * s;
                }
            } else {
                for (int64_t i = 0; i < N; i++) n[i] = d[i];
            }
            float along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < N; i++) {
                dw[i] += n[i] * h[i];
                n[i] *= weight[i];
                along += n[i] * h[i];
            }
            along /= N;
            Out out = dx + row * N;
            for (int64_t i = 0; i < N; i++) out[i] = (n[i] - h[i] * along) * scale;
            if (dtotal) {
                // a loop of its own: no rounding is saved that autograd's sum of both gradients would do
                In added = dtotal + row * N;
                for (int64_t i = 0; i < N; i++) out[i] += added[i];
            }
        }
    }
}

// logits [rows, N] become softmax(z) - onehot, zero where kept is, if `save`, and else are lost; losses [rows]
void softmax(float *logits, const int64_t *targets, const float *kept, float *losses, int64_t rows, int64_t N,
             int64_t save, int64_t threads) {
    PARALLEL
    for (int64_t row = 0; row < rows; row++) {
        Out z = logits + row * N;
        const float keep = kept[row], chosen = z[targets[row]];
        float top = z[0], total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < N; i++) top = z[i] > top ? z[i] : top;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < N; i++) {
            const float e = exponential(z[i] - top);
            z[i] = e;  // unless `save`, too: compiled for itself, that loop added up in another order
            total += e;
        }
        losses[row] = keep * (__builtin_logf(total) - (chosen - top));
        if (!save) continue;
        const float share = keep / total;
        for (int64_t i = 0; i < N; i++) z[i] *= share;
        z[targets[row]] -= keep;
    }
}
}
