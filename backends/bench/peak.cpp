// Multiplies and adds in registers and does nothing else: what the arithmetic of the C++ kernels can reach at best.
#include "../gated_delta_rule/chunked_products.h"

// More sums at once than it takes cycles until one is ready, times the two begun in each cycle; fewer than registers.
constexpr int SUMS = 12;

// On every thread, replaces each of SUMS vectors x by a x + b, `rounds` times, and returns by how much all of them
// have grown. With a = b = 1 that is how many multiplications, or additions, were done: exact below 2^24 rounds.
extern "C" double multiply_and_add(int64_t rounds, int64_t threads, double a, double b) {
    double grown = 0.0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : grown) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        const vec factor = all(static_cast<float>(a)), term = all(static_cast<float>(b));
        vec sums[SUMS];
        for (int n = 0; n < SUMS; n++) sums[n] = all(n);  // all different, or the compiler would compute one
        for (int64_t round = 0; round < rounds; round++)
            for (int n = 0; n < SUMS; n++) sums[n] = sums[n] * factor + term;
        for (int n = 0; n < SUMS; n++)
            for (int i = 0; i < W; i++) grown += sums[n][i] - n;
    }
    return grown;
}
