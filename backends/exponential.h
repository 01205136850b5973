// exp for the C++ kernels, of numbers and of vectors of them: the steps that both kernels share.
//
// x = n log(2) + r with |r| <= log(2) / 2. Each kernel puts the three together in its own way: what lies outside of the
// range differs, and so does how 2^n is made.
#pragma once

// n = x / log(2), rounded to an integer: adding 1.5 * 2^23 does that.
template <class Number>
inline __attribute__((always_inline)) Number doublings(Number x) {
    return (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
}

// r = x - n log(2), where log(2) stands in two parts
template <class Number>
inline __attribute__((always_inline)) Number remainder_of(Number x, Number n) {
    return (x - n * 0.693359375f) + n * 2.12194440e-4f;
}

// exp(r), by the coefficients of Cephes' expf
template <class Number>
inline __attribute__((always_inline)) Number exponential_of_remainder(Number r) {
    Number p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}
