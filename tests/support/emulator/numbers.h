// Numbers as the GPU has them: 16-bit floats, pairs of them, flushed floats, tf32; products of matrices.
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
        bits = x != x ? 0x7fff : u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    operator float() const { return bits_as<float>(u32(bits) << 16); }
};

struct half {
    u16 bits;
    half() = default;
    half(float x) : bits(x != x ? 0x7fff : bits_as<u16>(static_cast<_Float16>(x))) {}
    operator float() const { return float(bits_as<_Float16>(bits)); }
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
    Predicate(bool x) : value(-s32(x)) {}
    operator bool() const { return value; }
};

static float tf32(u32 b) { return bits_as<float>(b & 0xffffe000u); }  // tensor cores ignore the low bits

// D [M, N] += A [M, K] B [K, N]
static void multiply(float *D, const float *A, const float *B, int M, int N, int K) {
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++) {
            const float a = A[i * K + k], *b = B + k * N;
            float *d = D + i * N;
            for (int j = 0; j < N; j++) d[j] = __builtin_fmaf(a, b[j], d[j]);
        }
}
