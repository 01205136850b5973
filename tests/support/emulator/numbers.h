// Numbers as the GPU has them: 16-bit floats, pairs of them, flushed floats, tf32, rough results.
#pragma once
#include "machine.h"

template <class To, class From> static To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

struct bf16 {
    u16 bits;
    bf16() = default;
    bf16(float x) {
        const u32 b = bits_as<u32>(x);
        bits = x != x ? 0x7fff : static_cast<u16>((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    operator float() const { return bits_as<float>(static_cast<u32>(bits) << 16); }
};

struct half {
    u16 bits;
    half() = default;
    half(float x) : bits(x != x ? 0x7fff : bits_as<u16>(static_cast<_Float16>(x))) {}
    operator float() const { return static_cast<float>(bits_as<_Float16>(bits)); }
};

template <class T> struct Pair {
    T low, high;
};

// float32 whose denormal numbers are read and written as zero
struct Flushed {
    float value;
    Flushed() = default;
    Flushed(float x) : value(flush(x)) {}
    operator float() const { return flush(value); }
    static float flush(float x) {
        const u32 b = bits_as<u32>(x);
        return b & 0x7f800000 ? x : bits_as<float>(b & 0x80000000);
    }
};

struct Predicate {
    s32 value;
    Predicate() = default;
    Predicate(bool x) : value(-static_cast<s32>(x)) {}
    operator bool() const { return value; }
};

static float tf32(u32 b) { return bits_as<float>(b & 0xffffe000u); }  // tensor cores ignore the low bits
static u32 round_to_tf32(float x) {
    const u32 b = bits_as<u32>(x);
    return (b & 0x7f800000) == 0x7f800000 ? b : (b + 0x1000) & 0xffffe000u;
}

// What an approximating instruction returns: the nearest float, or with `rough` a neighbour of it, at random.
static thread_local Launch *roughly = nullptr;
static float approximate(double exact) {
    const float x = static_cast<float>(exact);
    if (!roughly || x == 0 || !std::isfinite(x)) return x;
    const u64 side = roughly->draw() % 3;
    return side == 2 ? x : std::nextafterf(x, side ? INFINITY : -INFINITY);
}

// D [M, N] += A [M, K] B [K, N]
static void multiply(const Launch &l, float *D, const float *A, const float *B, int M, int N, int K) {
    if (!l.options.rough) {
        for (int i = 0; i < M; i++)
            for (int k = 0; k < K; k++) {
                const float a = A[i * K + k], *b = B + k * N;
                float *d = D + i * N;
                for (int j = 0; j < N; j++) d[j] = __builtin_fmaf(a, b[j], d[j]);
            }
        return;
    }
    // as tensor cores do: terms are aligned to the largest and cut off below 2^-25 of it, the sum is cut off too
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double terms[17] = {D[i * N + j]}, most = std::fabs(terms[0]), plain = terms[0], sum = 0;
            for (int k = 0; k < K; k++) {
                terms[k + 1] = static_cast<double>(A[i * K + k]) * B[k * N + j];
                most = std::max(most, std::fabs(terms[k + 1]));
                plain += terms[k + 1];
            }
            float &d = D[i * N + j];
            d = static_cast<float>(plain);
            if (!(most > 0) || !std::isfinite(plain)) continue;
            const double unit = std::ldexp(1.0, std::ilogb(most) - 25);
            for (int k = 0; k <= K; k++) sum += std::trunc(terms[k] / unit) * unit;
            d = static_cast<float>(sum);
            if (std::fabs(static_cast<double>(d)) > std::fabs(sum)) d = std::nextafterf(d, 0.0f);
        }
}
