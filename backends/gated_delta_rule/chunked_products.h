// Small float32 matrix products, triangular solves and exponentials for chunked_kernel.cpp.
//
// Every matrix lies in a buffer of its own whose rows begin `stride` floats apart. Numbers of rows are multiples
// of ROWS, numbers of columns multiples of W; what pads a matrix up to that is zero. A product is cut into tiles
// of ROWS x (1 or 2 vectors) whose sums stay in registers; each tile adds up its terms in blocks, in the order of k,
// so that a result's bits do not depend on the sizes around it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../exponential.h"

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 4;
#else
constexpr int W = 4, ROWS = 4;
#endif
constexpr int PAD = 16;  // sizes are rounded up to this, on every machine

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float loose __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define INLINE inline __attribute__((always_inline))

INLINE vec load(const float *x) { return *reinterpret_cast<const loose *>(x); }
INLINE void store(float *x, vec y) { *reinterpret_cast<loose *>(x) = y; }
INLINE vec all(float x) { return x - vec{}; }

INLINE float sum(vec x) {
    float y[W];
    memcpy(y, &x, sizeof y);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) y[i] += y[i + n];
    return y[0];
}

// A matrix: element (i, j) is x[i * stride + j].
struct Matrix {
    float *x;
    long stride;
    float *operator[](long i) const { return x + i * stride; }
    Matrix from(long i, long j = 0) const { return {x + i * stride + j, stride}; }
};

// How a product reads its left factor, A or A^T.
enum Side { PLAIN, TRANSPOSED };
// Which elements of the left factor, as read, may be other than zero.
enum Shape { FULL, LOWER, UPPER };

template <Side side>
INLINE float element(Matrix A, long i, long k) {
    return side == PLAIN ? A.x[i * A.stride + k] : A.x[k * A.stride + i];
}

// sums += C[i : i + ROWS, j : j + NV W]. It comes last: a state that grew over thousands of tokens is rounded once.
template <int NV>
INLINE void add_tile(vec (&sums)[ROWS][NV], Matrix C, long i, long j) {
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < NV; n++) sums[r][n] += load(C[i + r] + j + n * W);
}

template <int NV>
INLINE void store_tile(const vec (&sums)[ROWS][NV], Matrix C, long i, long j) {
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < NV; n++) store(C[i + r] + j + n * W, sums[r][n]);
}

// sums += A[i : i + ROWS, first : last] B[first : last, j : j + NV W], one term after the other
template <Side side, int NV>
INLINE void add_product(vec (&sums)[ROWS][NV], Matrix A, Matrix B, long i, long j, long first, long last) {
    for (long k = first; k < last; k++) {
        vec b[NV];
        for (int n = 0; n < NV; n++) b[n] = load(B[k] + j + n * W);
        for (int r = 0; r < ROWS; r++) {
            const vec a = all(element<side>(A, i + r, k));
            for (int n = 0; n < NV; n++) sums[r][n] += a * b[n];
        }
    }
}

// The same in blocks of TERMS, each of which is added up for itself. The error of n terms of either sign grows like
// n / sqrt(2) one after the other, and like sqrt(n TERMS / 2 + n^2 / (2 TERMS)) in blocks: a third at n = 384.
constexpr long TERMS = 32;
template <Side side, int NV>
INLINE void add_blocks(vec (&sums)[ROWS][NV], Matrix A, Matrix B, long i, long j, long first, long last) {
    add_product<side, NV>(sums, A, B, i, j, first, first + TERMS < last ? first + TERMS : last);
    for (long k = first + TERMS; k < last; k += TERMS) {
        vec block[ROWS][NV] = {};
        add_product<side, NV>(block, A, B, i, j, k, k + TERMS < last ? k + TERMS : last);
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < NV; n++) sums[r][n] += block[r][n];
    }
}

// C[m, n] += A[m, k] B[k, n], or A^T as `side` says. With only_lower, tiles above C's diagonal are left out.
template <Side side, Shape shape, bool only_lower = false>
void product(long m, long n, long k, Matrix A, Matrix B, Matrix C) {
    auto panel = [&](auto width, long j) {
        constexpr int NV = decltype(width)::value;
        for (long i = 0; i < m; i += ROWS) {
            if (only_lower && j >= i + ROWS) continue;
            const long first = shape == UPPER ? i : 0, last = shape == LOWER && i + ROWS < k ? i + ROWS : k;
            vec sums[ROWS][NV] = {};
            add_blocks<side, NV>(sums, A, B, i, j, first, last);
            add_tile(sums, C, i, j);
            store_tile(sums, C, i, j);
        }
    };
    long j = 0;
    for (; j + 2 * W <= n; j += 2 * W) panel(std::integral_constant<int, 2>(), j);
    if (j < n) panel(std::integral_constant<int, 1>(), j);
}

// Solves (I - N) X = Y for X in the place of Y [m, n]; N [m, m] is zero on and above the diagonal.
// With side TRANSPOSED it solves (I - N^T) X = Y, from the last row to the first.
template <Side side>
void solve(long m, long n, Matrix N, Matrix Y) {
    auto panel = [&](auto width, long j) {
        constexpr int NV = decltype(width)::value;
        for (long block = 0; block < m; block += ROWS) {
            const long i = side == PLAIN ? block : m - ROWS - block;
            vec sums[ROWS][NV] = {};
            add_product<side, NV>(sums, N, Y, i, j, side == PLAIN ? 0 : i + ROWS, side == PLAIN ? i : m);
            add_tile(sums, Y, i, j);
            for (int done = 0; done < ROWS; done++)
                for (int next = done + 1; next < ROWS; next++) {
                    const int p = side == PLAIN ? done : ROWS - 1 - done;
                    const int r = side == PLAIN ? next : ROWS - 1 - next;
                    const vec a = all(element<side>(N, i + r, i + p));
                    for (int v = 0; v < NV; v++) sums[r][v] += a * sums[p][v];
                }
            store_tile(sums, Y, i, j);
        }
    };
    long j = 0;
    for (; j + 2 * W <= n; j += 2 * W) panel(std::integral_constant<int, 2>(), j);
    if (j < n) panel(std::integral_constant<int, 1>(), j);
}

// out[n, m] = in[m, n]^T
INLINE void transpose(long m, long n, Matrix in, Matrix out) {
    constexpr int T = 8;
    for (long i = 0; i < m; i += T)
        for (long j = 0; j < n; j += T)
            for (int a = 0; a < T; a++)
                for (int b = 0; b < T; b++) out[j + a][i + b] = in[i + b][j + a];
}

// exp(x) for x = near + rest <= 0, to about one unit of the last place; exactly 0 below -104.
INLINE vec exponential(vec near, vec rest) {
    near = near < -120.0f ? all(-120.0f) : near;  // keeps a NaN
    const vec n = doublings(near);
    const vec p = exponential_of_remainder(remainder_of(near, n) + rest);
    // 2^n in two factors, so that results below 2^-126 are rounded once
    const ivec whole = __builtin_convertvector(n, ivec), half = whole >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
}

// out_j = exp(sign (x_j - y)) for j < n, n a multiple of W and at most MOST; the exponents, in float64, are <= 0 where it
// matters. A float32 near one of -100 may be 4e-6 away, so what is left is kept to first order.
constexpr int MOST = 64;
INLINE void exponentials(long n, const double *x, double y, double sign, float *out) {
    alignas(64) float near[MOST], rest[MOST];
    for (long j = 0; j < n; j++) {
        const double exponent = sign * (x[j] - y);
        near[j] = static_cast<float>(exponent);
        rest[j] = static_cast<float>(exponent - near[j]);
    }
    for (long j = 0; j < n; j += W) store(out + j, exponential(load(near + j), load(rest + j)));
}

// sum over j of x_j y_j, n a multiple of W
INLINE float dot(long n, const float *x, const float *y) {
    vec total = {};
    for (long j = 0; j < n; j += W) total += load(x + j) * load(y + j);
    return sum(total);
}
