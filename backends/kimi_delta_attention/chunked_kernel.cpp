// Kimi Delta Attention in chunks on a CPU, forward and backward, and one step of it; float32.
//
// The equations are those of chunked.py, and the way through a chunk is that of the gated delta rule's kernel, with which
// this one shares its headers. What a decay per channel changes: gam, lam and all factors are matrices [tokens, K], three
// scaled copies of q and k stand where the other kernel scales rows, and kk and P are made of pairs of tokens:
//
//     inside of 16 tokens     running products: run_j, which is k_j decayed up to token i, for one i after the other
//     between blocks          products of what right and left factors scale, at the cut between two blocks of 16 or 32
//
// A factor is exp of a sum of g <= 0, so none is above 1 and none is a quotient. The gradient of g_t is the sum over the
// pairs j < t <= i, added up pair by pair inside of 16 tokens and cut by cut between blocks.
#include "../gated_delta_rule/chunked_head.h"

namespace {

constexpr long BLOCK = 16;
static_assert(BLOCK % W == 0 && BLOCK == PAD, "a block's tokens are whole vectors, and chunks are whole blocks");
constexpr int CUTS = 2;  // blocks of 16 are joined to 32, and those to 64: MOST

struct Chunk {
    Matrix QK, g, a, gam, lam, G, written, KT, PN;  // [q; k], g, exp(g), .., [gam q; -gam k], lam k, (f k)^T, [P; N]
    Matrix f[CUTS], FQK[CUTS];                      // of each level the factors, and [f q; f k]
    float *beta, *rq, *rk, *run;

    Chunk(Arena &arena, long C, long K)
        : QK(arena.matrix(2 * C, K)), g(arena.matrix(C, K)), a(arena.matrix(C, K)), gam(arena.matrix(C, K)),
          lam(arena.matrix(C, K)), G(arena.matrix(2 * C, K)), written(arena.matrix(C, K)), KT(arena.matrix(K, C)),
          PN(arena.matrix(2 * C, C)), beta(arena.row(C)), rq(arena.row(C)), rk(arena.row(C)), run(arena.row(K * BLOCK)) {
        for (int level = 0; level < CUTS && BLOCK << level < C; level++)
            f[level] = arena.matrix(C, K), FQK[level] = arena.matrix(2 * C, K);
    }
};

// Calls cut(level, start, middle, end) for all cuts between blocks.
template <class Cut>
INLINE void for_cuts(long m, Cut cut) {
    for (int level = 0; BLOCK << level < m; level++)
        for (long s = BLOCK << level, start = 0; start + s < m; start += 2 * s)
            cut(level, start, start + s, start + 2 * s < m ? start + 2 * s : m);
}

// out = x . y
INLINE void multiply(Matrix x, Matrix y, long rows, long n, Matrix out, float sign = 1.0f) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < n; j += W) store(out[i] + j, load(x[i] + j) * load(y[i] + j) * sign);
}

// A running sum in two words: what one float32 near -30 cannot hold would cost its exponential 2e-6.
struct Sum {
    vec high = {}, low = {};
    INLINE void add(vec x) {
        const vec total = high + x, other = total - high;
        low += (high - (total - other)) + (x - other);
        high = total;
    }
    INLINE vec exp() const { return exponential(high, low); }
};

// Computes exp of g, gam, lam, and the factors of all cuts.
void gates(const Head &h, Chunk &x, long chunk, long m) {
    const Call &c = h.c;
    const long count = h.tokens(chunk);
    const float *beta = c.beta + h.offset(c.beta_strides, chunk, h.head);
    for (long i = 0; i < m; i++) x.beta[i] = i < count ? beta[i * c.beta_strides.time] : 0.0f;
    fill(c.g + h.offset(c.g_strides, chunk, h.head), c.g_strides.time, count, c.K, m, x.g);
    for (long j = 0; j < h.K; j += W) {
        Sum upto, after;
        for (long i = 0; i < m; i++) {
            vec g = load(x.g[i] + j);
            g = g < float(RESET) ? all(RESET) : g;
            store(x.g[i] + j, g);
            store(x.a[i] + j, exponential(g, vec{}));
            upto.add(g);
            store(x.gam[i] + j, upto.exp());
        }
        for (long i = m - 1; i >= 0; i--) {
            store(x.lam[i] + j, after.exp());
            after.add(load(x.g[i] + j));
        }
        for_cuts(m, [&](int level, long start, long middle, long end) {
            vec right = {}, left = {};
            for (long i = middle; i < end; i++) {
                right += load(x.g[i] + j);
                store(x.f[level][i] + j, exponential(right, vec{}));
            }
            for (long i = middle - 1; i >= start; i--) {
                store(x.f[level][i] + j, exponential(left, vec{}));
                left += load(x.g[i] + j);
            }
        });
    }
}

// Computes P and kk of the pairs inside of 16 tokens, the lower triangles with the diagonals. run [K, 16] has a vector
// lane for each token j.
void pairs_inside(long K, Matrix q, Matrix k, Matrix a, Matrix P, Matrix kk, float *run) {
    constexpr int NV = BLOCK / W, R = W == 16 ? 4 : 2;
    memset(run, 0, K * BLOCK * sizeof(float));
    for (long i = 0; i < BLOCK; i += R) {
        vec sums[R][2][NV] = {};
        for (long first = 0; first < K; first += TERMS) {
            vec block[R][2][NV] = {};
            for (long c = first; c < K && c < first + TERMS; c++)
                for (int n = 0; n < NV; n++) {
                    vec x = load(run + c * BLOCK + n * W);
                    for (int r = 0; r < R; r++) {
                        const vec k_c = all(k[i + r][c]);
                        x *= all(a[i + r][c]);
                        x = places(n * W) == static_cast<int32_t>(i + r) ? k_c : x;
                        block[r][0][n] += all(q[i + r][c]) * x;
                        block[r][1][n] += k_c * x;
                    }
                    store(run + c * BLOCK + n * W, x);
                }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < NV; n++) sums[r][0][n] += block[r][0][n], sums[r][1][n] += block[r][1][n];
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < NV; n++) {
                store(P[i + r] + n * W, sums[r][0][n]);
                store(kk[i + r] + n * W, sums[r][1][n]);
            }
    }
}

// Loads a chunk's q, k and gates, and computes all that depends on them: P, and N = -kk, whose columns (forward) or rows
// (backward) beta multiplies.
void prepare(const Head &h, Chunk &x, long chunk, long m, bool backward) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), head = h.head / (c.HV / c.H), next = backward ? -c.C : c.C;
    const Matrix q = x.QK, k = q.from(m), N = x.PN.from(m);
    fill(c.q + h.offset(c.q_strides, chunk, head), c.q_strides.time, count, c.K, m, q, 1.0f, next * c.q_strides.time);
    fill(c.k + h.offset(c.k_strides, chunk, head), c.k_strides.time, count, c.K, m, k, 1.0f, next * c.k_strides.time);
    if (c.normalize) {
        normalize(q, m, h.K, x.rq);
        normalize(k, m, h.K, x.rk);
    }
    gates(h, x, chunk, m);
    multiply(q, x.gam, m, h.K, x.G);
    multiply(k, x.gam, m, h.K, x.G.from(m), -1.0f);
    multiply(k, x.lam, m, h.K, x.written);
    clear(x.PN, 2 * m);
    for (long i = 0; i < m; i += BLOCK)
        pairs_inside(h.K, q.from(i), k.from(i), x.a.from(i), x.PN.from(i, i), N.from(i, i), x.run);
    for (int level = 0; BLOCK << level < m; level++) {
        multiply(q, x.f[level], m, h.K, x.FQK[level]);
        multiply(k, x.f[level], m, h.K, x.FQK[level].from(m));
        transpose(m, h.K, x.FQK[level].from(m), x.KT);
        for_cuts(m, [&](int at, long start, long middle, long end) {
            if (at != level) return;
            const long rows = end - middle, columns = middle - start;
            const Matrix right = x.FQK[level].from(middle), left = x.KT.from(0, start);
            product<PLAIN, FULL>(rows, columns, h.K, right, left, x.PN.from(middle, start));
            product<PLAIN, FULL>(rows, columns, h.K, right.from(m), left, N.from(middle, start));
        });
    }
    for (long i = 0; i < m; i++)
        for (long j = 0; j < m; j += W) {
            const vec strict = places(j) < static_cast<int32_t>(i) ? load(N[i] + j) : vec{};
            store(N[i] + j, -strict * (backward ? all(x.beta[i]) : load(x.beta + j)));
        }
}

struct Forward {
    Chunk x;
    Matrix S, OE, U;  // the state, [o; E], U
    Forward(Arena &arena, long C, long K, long V)
        : x(arena, C, K), S(arena.matrix(K, V)), OE(arena.matrix(2 * C, V)), U(arena.matrix(C, V)) {}
};

void forward_head(const Head &h, Forward &f) {
    const Call &c = h.c;
    Chunk &x = f.x;
    if (h.chunks() > 1 || c.initial_state || c.final_state)
        fill(c.initial_state ? c.initial_state + h.state() : nullptr, c.V, c.initial_state ? c.K : 0, c.V, h.K, f.S);
    for (long chunk = 0; chunk < h.chunks(); chunk++) {
        const long count = h.tokens(chunk), m = round_up(count), row = c.HV * c.V;
        const Matrix E = f.OE.from(m);
        if (c.states && chunk > 0) put(f.S, c.K, c.V, h.saved_state(chunk), c.V);
        prepare(h, x, chunk, m, false);
        clear(f.OE, m);
        fill(c.v + h.offset(c.v_strides, chunk, h.head), c.v_strides.time, count, c.V, m, E, 1.0f,
             c.C * c.v_strides.time);
        if (h.reads_state(chunk)) product<PLAIN, FULL>(2 * m, h.V, h.K, x.G, f.S, f.OE);
        solve<PLAIN>(m, h.V, x.PN.from(m), E);
        if (c.E) put(E, count, c.V, c.E + h.dense(chunk, c.V), row, 1.0f, row * c.C);
        scale_rows(E, x.beta, m, h.V, f.U);
        product<PLAIN, LOWER>(m, h.V, m, x.PN, f.U, f.OE);
        put(f.OE, count, c.V, c.o + h.dense(chunk, c.V), row, h.scale, row * c.C);
        if (h.is_last(chunk) && !c.final_state) return;
        scale_rows(f.S, x.gam[m - 1], h.K, h.V, f.S);
        product<TRANSPOSED, FULL>(h.K, h.V, m, x.written, f.U, f.S);
    }
    if (c.final_state) put(f.S, c.K, c.V, c.final_state + h.state(), c.V);
}

struct Backward {
    Chunk x;
    Matrix Y, E, U, UT, S, ST, dS, dST;  // Y [dO; dR, later dv]
    Matrix XY, dQK, dK, dg, rows;        // [dP; dkk], [dq; what S passes on to k], dk, dg, [row_q; row_k and column]
    float *dbeta, *carried;
    bool reads_S = true, reads_dS = true;  // of the chunk; else they are zeros, and nothing is in them
    Backward(Arena &arena, long C, long K, long V)
        : x(arena, C, K), Y(arena.matrix(2 * C, V)), E(arena.matrix(C, V)), U(arena.matrix(C, V)),
          UT(arena.matrix(V, C)), S(arena.matrix(K, V)), ST(arena.matrix(V, K)), dS(arena.matrix(K, V)),
          dST(arena.matrix(V, K)), XY(arena.matrix(2 * C, C)), dQK(arena.matrix(2 * C, K)), dK(arena.matrix(C, K)),
          dg(arena.matrix(C, K)), rows(arena.matrix(2 * C, K)), dbeta(arena.row(C)), carried(arena.row(K)) {}
};

// Computes dO, dv, dP and dkk, and writes dv; from f.dS, the gradient of the chunk's last state.
void backward_values(const Head &h, Backward &f, long chunk, long m) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), row = c.HV * c.V;
    Chunk &x = f.x;
    const Matrix dR = f.Y.from(m), dkk = f.XY.from(m);
    fill(c.d_o + h.offset(c.do_strides, chunk, h.head), c.do_strides.time, count, c.V, m, f.Y, h.scale,
         -c.C * c.do_strides.time);
    fill(c.E + h.dense(chunk, c.V), row, count, c.V, m, f.E, 1.0f, -row * c.C);
    scale_rows(f.E, x.beta, m, h.V, f.U);
    transpose(m, h.V, f.U, f.UT);
    clear(dR, m);
    if (f.reads_dS) product<PLAIN, FULL>(m, h.V, h.K, x.written, f.dS, dR);
    product<TRANSPOSED, UPPER>(m, h.V, m, x.PN, f.Y, dR);
    solve<TRANSPOSED>(m, h.V, x.PN.from(m), dR);
    for (long i = 0; i < m; i++) f.dbeta[i] = dot(h.V, dR[i], f.E[i]);
    clear(f.XY, 2 * m);
    product<PLAIN, FULL, true>(m, m, h.V, f.Y, f.UT, f.XY);
    product<PLAIN, FULL, true>(m, m, h.V, dR, f.UT, dkk);
    scale_rows(dkk, x.beta, m, m, dkk, -1.0f);
    scale_rows(dR, x.beta, m, h.V, dR);
    put(dR, count, c.V, c.dv + h.dense(chunk, c.V), row, 1.0f, -row * c.C);
}

// Adds to dq, dk and dg what the pairs inside of the 16 tokens from `first` on give, W channels at a time.
void pairs_inside_back(Backward &f, long first, long m, long K) {
    const Matrix q = f.x.QK.from(first), k = q.from(m), a = f.x.a.from(first);
    const Matrix dP = f.XY.from(first, first), dkk = dP.from(m);
    for (long c = 0; c < K; c += W) {
        vec decay[BLOCK], column[BLOCK] = {}, ks[BLOCK], pairs[BLOCK][BLOCK], later[BLOCK] = {};
        for (long i = 0; i < BLOCK; i++) {
            const vec q_i = load(q[i] + c), k_i = load(k[i] + c), a_i = load(a[i] + c), own = all(dP[i][i]);
            vec row_q = own * k_i, row_k = own * q_i;  // a token reads its own write, which has not decayed
            for (long j = 0; j < i; j++) {
                const vec p = all(dP[i][j]), n = all(dkk[i][j]);
                decay[j] *= a_i;
                const vec k_j = decay[j] * ks[j], reader = p * q_i + n * k_i;
                row_q += p * k_j;
                row_k += n * k_j;
                column[j] += decay[j] * reader;
                pairs[i][j] = k_j * reader;
            }
            decay[i] = all(1.0f), ks[i] = k_i;
            store(f.dQK[first + i] + c, load(f.dQK[first + i] + c) + row_q);
            store(f.dK[first + i] + c, load(f.dK[first + i] + c) + row_k);
        }
        for (long t = BLOCK - 1; t >= 0; t--) {
            vec total = {};
            for (long j = 0; j < t; j++) later[j] += pairs[t][j], total += later[j];
            store(f.dg[first + t] + c, load(f.dg[first + t] + c) + total);
            store(f.dK[first + t] + c, load(f.dK[first + t] + c) + column[t]);
        }
    }
}

// Adds to dq, dk and dg what the pairs of a cut give.
void cut_back(Backward &f, int level, long start, long middle, long end, long m, long K) {
    Chunk &x = f.x;
    const long rows = end - middle, columns = middle - start;
    const Matrix dP = f.XY.from(middle, start), dkk = dP.from(m), FQ = x.FQK[level], FK = FQ.from(m), k = x.QK.from(m);
    const Matrix row_q = f.rows, row_k = row_q.from(m);
    clear(row_q.from(middle), rows);
    clear(row_k.from(start), end - start);
    product<PLAIN, FULL>(rows, K, columns, dP, FK.from(start), row_q.from(middle));
    product<PLAIN, FULL>(rows, K, columns, dkk, FK.from(start), row_k.from(middle));
    product<TRANSPOSED, FULL>(columns, K, rows, dP, FQ.from(middle), row_k.from(start));
    product<TRANSPOSED, FULL>(columns, K, rows, dkk, FK.from(middle), row_k.from(start));
    for (long c = 0; c < K; c += W) {
        vec later = {}, before = {};
        for (long i = end - 1; i >= middle; i--) {
            const vec factor = load(x.f[level][i] + c);
            const vec dq = load(row_q[i] + c) * factor, dk = load(row_k[i] + c) * factor;
            later += load(x.QK[i] + c) * dq + load(k[i] + c) * dk;
            store(f.dg[i] + c, load(f.dg[i] + c) + later);
            store(f.dQK[i] + c, load(f.dQK[i] + c) + dq);
            store(f.dK[i] + c, load(f.dK[i] + c) + dk);
        }
        for (long j = start; j < middle; j++) {
            const vec dk = load(row_k[j] + c) * load(x.f[level][j] + c);
            store(f.dg[j] + c, load(f.dg[j] + c) + before);
            before += load(k[j] + c) * dk;
            store(f.dK[j] + c, load(f.dK[j] + c) + dk);
        }
    }
}

// Computes and writes dq and dk, dg and dbeta.
void backward_keys(const Head &h, Backward &f, long chunk, long m) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), row = c.HV * c.K;
    Chunk &x = f.x;
    const Matrix k = x.QK.from(m), dk_S = f.dQK.from(m);
    clear(f.dQK, 2 * m);
    if (f.reads_S) product<PLAIN, FULL>(2 * m, h.K, h.V, f.Y, f.ST, f.dQK);
    multiply(f.dQK, x.gam, m, h.K, f.dQK);
    multiply(dk_S, x.gam, m, h.K, dk_S);
    clear(f.dK, m);
    if (f.reads_dS) product<PLAIN, FULL>(m, h.K, h.V, f.U, f.dST, f.dK);
    multiply(f.dK, x.lam, m, h.K, f.dK);
    for (long i = 0; i < h.K; i++)
        f.carried[i] = f.reads_S && f.reads_dS ? x.gam[m - 1][i] * dot(h.V, f.dS[i], f.S[i]) : 0.0f;
    for (long j = 0; j < h.K; j += W) {
        vec later = load(f.carried + j), before = {};
        for (long i = m - 1; i >= 0; i--) {
            later += load(f.dQK[i] + j) * load(x.QK[i] + j) - load(dk_S[i] + j) * load(k[i] + j);
            store(f.dg[i] + j, later);
        }
        for (long i = 0; i < m; i++) {
            const vec written = load(f.dK[i] + j);
            store(f.dg[i] + j, load(f.dg[i] + j) + before);
            before += written * load(k[i] + j);
            store(f.dK[i] + j, written - load(dk_S[i] + j));
        }
    }
    for_cuts(m, [&](int level, long start, long middle, long end) { cut_back(f, level, start, middle, end, m, h.K); });
    for (long i = 0; i < m; i += BLOCK) pairs_inside_back(f, i, m, h.K);
    if (c.normalize) {
        normalize_back(f.dQK, x.QK, x.rq, m, h.K);
        normalize_back(f.dK, k, x.rk, m, h.K);
    }
    put(f.dQK, count, c.K, c.dq + h.dense(chunk, c.K), row, 1.0f, -row * c.C);
    put(f.dK, count, c.K, c.dk + h.dense(chunk, c.K), row, 1.0f, -row * c.C);
    put(f.dg, count, c.K, c.dg + h.dense(chunk, c.K), row, 1.0f, -row * c.C);
    put({f.dbeta, 1}, count, 1, c.dbeta + h.dense(chunk, 1), c.HV);
}

void backward_head(const Head &h, Backward &f) {
    const Call &c = h.c;
    if (h.chunks() > 1 || c.dfinal_state || c.dinitial_state)
        fill(c.dfinal_state ? c.dfinal_state + h.state() : nullptr, c.V, c.dfinal_state ? c.K : 0, c.V, h.K, f.dS);
    for (long chunk = h.chunks() - 1; chunk >= 0; chunk--) {
        const long m = round_up(h.tokens(chunk));
        f.reads_S = h.reads_state(chunk), f.reads_dS = c.dfinal_state || !h.is_last(chunk);
        prepare(h, f.x, chunk, m, true);
        if (f.reads_S) {
            fill(chunk > 0 ? h.saved_state(chunk) : c.initial_state + h.state(), c.V, c.K, c.V, h.K, f.S);
            transpose(h.K, h.V, f.S, f.ST);
        }
        if (f.reads_dS) transpose(h.K, h.V, f.dS, f.dST);
        backward_values(h, f, chunk, m);
        backward_keys(h, f, chunk, m);
        if (chunk == 0 && !c.dinitial_state) return;
        scale_rows(f.dS, f.x.gam[m - 1], h.K, h.V, f.dS);
        product<TRANSPOSED, FULL>(h.K, h.V, 2 * m, f.x.G, f.Y, f.dS);
    }
    if (c.dinitial_state) put(f.dS, c.K, c.V, c.dinitial_state + h.state(), c.V);
}

// One token: S <- Diag(gam) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, as it is written.
void step_head(const Head &h, Matrix x) {
    const Call &c = h.c;
    const float *S = c.initial_state + h.state(), *v = c.v + h.offset(c.v_strides, 0, h.head);
    float *after = c.final_state + h.state(), *out = c.o + h.dense(0, c.V), *gam = x[2], *u = x[3], *o = x[4];
    const Token t(h, x, x.from(1));
    fill(c.g + h.offset(c.g_strides, 0, h.head), 0, 1, c.K, 1, x.from(2));
    for (long i = 0; i < h.K; i += W) store(gam + i, exponential(load(gam + i), vec{}));
    // columns in pieces that stay in the cache
    for (long first = 0; first < c.V; first += h.K) {
        const long n = first + h.K < c.V ? h.K : c.V - first;
        for (long j = 0; j < n; j++) u[j] = o[j] = 0.0f;
        for (long i = 0; i < c.K; i++)
            for (long j = 0; j < n; j++) u[j] += t.k[i] * (gam[i] * S[i * c.V + first + j]);
        for (long j = 0; j < n; j++) u[j] = t.beta * (v[first + j] - u[j]);
        for (long i = 0; i < c.K; i++)
            for (long j = 0; j < n; j++) {
                const float s = gam[i] * S[i * c.V + first + j] + t.k[i] * u[j];
                after[i * c.V + first + j] = s;
                o[j] += t.q[i] * s;
            }
        for (long j = 0; j < n; j++) out[first + j] = h.scale * o[j];
    }
}

}  // namespace

extern "C" {
void kimi_delta_attention_forward(const Call *c, double scale) { run<Forward>(*c, scale, forward_head); }
void kimi_delta_attention_backward(const Call *c, double scale) { run<Backward>(*c, scale, backward_head); }
void kimi_delta_attention_step(const Call *c, double scale) {
    const long tasks = c->N * c->HV;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1 && tasks * c->K * c->V > 1 << 17)
    for (long task = 0; task < tasks; task++) {
        const Head h(*c, scale, task);
        step_head(h, {scratch(5 * h.K), h.K});
    }
}
}
