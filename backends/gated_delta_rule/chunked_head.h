// A call of the chunked kernel, one value head of one of its sequences, and the rows that are copied from and to tensors.
#pragma once

#include <cstdlib>
#include <memory>

#include "chunked_products.h"

namespace {

constexpr double RESET = -1024.0;  // contract.RESET
constexpr double NORM_EPS = 1e-6;  // contract.L2NORM_EPS

// The strides of a tensor [batch, time, head, ...] in elements; its last dimension is contiguous.
struct Strides {
    int64_t batch, time, head;
};

}  // namespace

// The arguments, in the order in which chunked_kernel.py has them. Pointers may be null where it says so.
struct Call {
    const float *q, *k, *v, *g, *beta;  // g [B, T, HV], or with decays per channel [B, T, HV, K]; dg is like it
    const float *initial_state;     // [N, HV, K, V] or null
    const int64_t *bounds, *saved;  // [N + 1] first tokens and saved states of packed sequences, or null
    float *o, *E;                   // [B, T, HV, V]; forward writes E unless null, backward reads it
    float *states;                  // [saved, HV, K, V], the first states of all but a sequence's first chunk; like E
    float *final_state;             // [N, HV, K, V] or null
    // of backward
    const float *d_o, *dfinal_state;  // dfinal_state null: zeros
    float *dq, *dk;                   // [B, T, HV, K]: a group's value heads are not added up
    float *dv, *dg, *dbeta;           // [B, T, HV, V], [B, T, HV]
    float *dinitial_state;            // or null
    Strides q_strides, k_strides, v_strides, g_strides, beta_strides, do_strides;
    int64_t N, T, H, HV, K, V, C, normalize, threads;
};

namespace {

INLINE long round_up(long n) { return (n + PAD - 1) / PAD * PAD; }

// Memory of one thread, kept from call to call: fresh pages would cost a tenth of a short call.
float *scratch(size_t floats) {
    struct Free {
        void operator()(float *x) const { free(x); }
    };
    thread_local std::unique_ptr<float, Free> memory;
    thread_local size_t size = 0;
    if (size < floats) {
        memory.reset(static_cast<float *>(aligned_alloc(64, floats * sizeof(float))));
        size = memory ? floats : 0;
        if (!memory) abort();
    }
    return memory.get();
}

// Hands out matrices from one block of memory; without a block it only counts.
struct Arena {
    float *next = nullptr;
    size_t used = 0;
    Matrix matrix(long rows, long columns) {
        const long stride = columns + PAD;  // not a power of two, whose rows would share few lines of the cache
        Matrix out{next, stride};
        used += rows * stride;
        if (next) next += rows * stride;
        return out;
    }
    float *row(long n) { return matrix(1, round_up(n)).x; }
};

// One value head of one sequence, and the chunk of it that is being computed.
struct Head {
    const Call &c;
    const float scale;
    long sequence, head, batch, first_token, last_token, first_saved;
    long K, V;  // rounded up

    Head(const Call &call, double scale, long task)
        : c(call), scale(scale), sequence(task / c.HV), head(task % c.HV) {
        batch = c.bounds ? 0 : sequence;
        first_token = c.bounds ? c.bounds[sequence] : 0;
        last_token = c.bounds ? c.bounds[sequence + 1] : c.T;
        first_saved = c.bounds ? c.saved[sequence] : sequence * ((c.T - 1) / c.C);
        K = round_up(c.K), V = round_up(c.V);
    }
    long chunks() const { return (last_token - first_token + c.C - 1) / c.C; }
    long tokens(long chunk) const {
        const long left = last_token - first_token - chunk * c.C;
        return left < c.C ? left : c.C;
    }
    long offset(const Strides &s, long chunk, long h) const {
        return batch * s.batch + (first_token + chunk * c.C) * s.time + h * s.head;
    }
    // of a contiguous tensor [B, T, HV, n]
    long dense(long chunk, long n) const { return ((batch * c.T + first_token + chunk * c.C) * c.HV + head) * n; }
    long state() const { return (sequence * c.HV + head) * c.K * c.V; }
    float *saved_state(long chunk) const {
        return c.states + ((first_saved + chunk - 1) * c.HV + head) * c.K * c.V;
    }
    // whether a chunk begins with a state, and whether somebody reads the one that it ends with: of short sequences most
    // have neither, and products with states are most of the work
    bool reads_state(long chunk) const { return chunk > 0 || c.initial_state; }
    bool is_last(long chunk) const { return chunk == chunks() - 1; }
};

// Copies x [count, n], rows `stride` apart, times `factor` to out, with zeros up to [rows, round_up(n)]. `ahead` is
// how far from x the next chunk lies: rows of heads are too far apart for the processor to guess.
void fill(
    const float *x, long stride, long count, long n, long rows, Matrix out, float factor = 1.0f, long ahead = 0) {
    const long whole = n / W * W;
    for (long i = 0; i < rows; i++) {
        const float *row = x + i * stride;
        float *y = out[i];
        long j = 0;
        if (i < count) {
            for (; j < whole; j += W) {
                if (ahead && j % 16 == 0) __builtin_prefetch(row + ahead + j);
                store(y + j, load(row + j) * factor);
            }
            for (; j < n; j++) y[j] = row[j] * factor;
        }
        for (; j < round_up(n); j++) y[j] = 0.0f;
    }
}

// Copies x [count, n] times `factor` to out, rows `stride` apart.
void put(Matrix x, long count, long n, float *out, long stride, float factor = 1.0f, long ahead = 0) {
    const long whole = n / W * W;
    for (long i = 0; i < count; i++) {
        float *y = out + i * stride;
        long j = 0;
        for (; j < whole; j += W) {
            if (ahead && j % 16 == 0) __builtin_prefetch(y + ahead + j, 1);
            store(y + j, load(x[i] + j) * factor);
        }
        for (; j < n; j++) y[j] = x[i][j] * factor;
    }
}

void clear(Matrix x, long rows) { memset(x.x, 0, rows * x.stride * sizeof(float)); }

// out[i] = factors[i] x[i]
void scale_rows(Matrix x, const float *factors, long rows, long n, Matrix out, float sign = 1.0f) {
    for (long i = 0; i < rows; i++) {
        const vec factor = all(sign * factors[i]);
        for (long j = 0; j < n; j += W) store(out[i] + j, load(x[i] + j) * factor);
    }
}

// x <- factor x for a state
void scale_state(Matrix x, long rows, long n, float factor) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < n; j += W) store(x[i] + j, load(x[i] + j) * factor);
}

// Divides rows by sqrt(sum of squares + eps), and stores the reciprocals. They are rounded once: where all keys are
// equal, so are their errors, which add up over the tokens.
void normalize(Matrix x, long rows, long n, float *reciprocals) {
    for (long i = 0; i < rows; i++) {
        vec squares = {};
        for (long j = 0; j < n; j += W) squares += load(x[i] + j) * load(x[i] + j);
        double total = 0.0;
        for (int j = 0; j < W; j++) total += squares[j];
        const float r = 1.0 / std::sqrt(total + NORM_EPS);
        reciprocals[i] = r;
        for (long j = 0; j < n; j += W) store(x[i] + j, load(x[i] + j) * r);
    }
}

// dx <- r (dx - x <dx, x>), the gradient through `normalize`
void normalize_back(Matrix dx, Matrix x, const float *reciprocals, long rows, long n) {
    for (long i = 0; i < rows; i++) {
        const vec r = all(reciprocals[i]), along = all(dot(n, dx[i], x[i]));
        for (long j = 0; j < n; j += W) store(dx[i] + j, (load(dx[i] + j) - along * load(x[i] + j)) * r);
    }
}

// y += a x
INLINE void add_row(float *y, float a, const float *x, long n) {
    for (long j = 0; j < n; j += W) store(y + j, load(y + j) + load(x + j) * a);
}

INLINE ivec places(long first) {
    ivec x;
    for (int i = 0; i < W; i++) x[i] = first + i;
    return x;
}

// One token of a head: q and k, normalized where asked, and its gates.
struct Token {
    const float *q, *k;
    float rq, rk, gam, beta;
    Token(const Head &h, Matrix q_row, Matrix k_row) : q(q_row.x), k(k_row.x) {
        const Call &c = h.c;
        const long head = h.head / (c.HV / c.H);
        fill(c.q + h.offset(c.q_strides, 0, head), 0, 1, c.K, 1, q_row);
        fill(c.k + h.offset(c.k_strides, 0, head), 0, 1, c.K, 1, k_row);
        if (c.normalize) {
            normalize(q_row, 1, h.K, &rq);
            normalize(k_row, 1, h.K, &rk);
        }
        gam = std::exp(static_cast<double>(c.g[h.offset(c.g_strides, 0, h.head)]));
        beta = c.beta[h.offset(c.beta_strides, 0, h.head)];
    }
};

// Computes all heads of all sequences; a Pass holds what one of them needs.
template <class Pass>
void run(const Call &c, double scale, void (*pass)(const Head &, Pass &)) {
    const long K = round_up(c.K), V = round_up(c.V), tasks = c.N * c.HV;
    Arena count;
    Pass(count, c.C, K, V);
    const long together = tasks / (16 * c.threads) + 1;  // of thousands of short ones
#pragma omp parallel for schedule(dynamic, together) num_threads(c.threads) if (tasks > 1 && c.threads > 1)
    for (long task = 0; task < tasks; task++) {
        Arena arena{scratch(count.used)};
        Pass f(arena, c.C, K, V);
        pass(Head(c, scale, task), f);
    }
}

}  // namespace
