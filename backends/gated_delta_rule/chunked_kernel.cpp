// The gated delta rule in chunks on a CPU, forward and backward, and one step of it; float32.
//
// The equations are those of chunked.py, in the notation of `backends.gated_delta_rule`, with two differences. A
// chunk goes through all stages while it lies in the cache, one after the other, so that nothing but a chunk's first
// state and E leave it, and neither T nor A is needed. E is what a token finds missing before beta weighs it,
//
//     E = V - diag(gam) K S - overlap U       U = diag(beta) E        (I + overlap diag(beta)) E = V - diag(gam) K S
//
// by substitution; dbeta is the row sums of dR . E, whatever beta is. One thread computes one value head of
// one sequence from the first token to the last, so that results depend neither on the number of threads nor on the
// other sequences. A chunk of fewer tokens is filled up to a multiple of 16 with rows of zeros.
#include "chunked_head.h"

namespace {

// What forward and backward both hold of a chunk; m rows, a multiple of 16.
struct Chunk {
    Matrix QK, G, written, KT, D, PN;  // [q; k], [gam q; -gam k], lam k, k^T, D, [P; N]
    float *gam, *lam, *beta, *rq, *rk;
    double *b;

    Chunk(Arena &arena, long C, long K)
        : QK(arena.matrix(2 * C, K)), G(arena.matrix(2 * C, K)), written(arena.matrix(C, K)), KT(arena.matrix(K, C)),
          D(arena.matrix(C, C)), PN(arena.matrix(2 * C, C)), gam(arena.row(C)), lam(arena.row(C)), beta(arena.row(C)),
          rq(arena.row(C)), rk(arena.row(C)), b(reinterpret_cast<double *>(arena.row(2 * C))) {}
};

// Computes b, gam, lam and beta of a chunk, and D, all of m rows.
void gates(const Head &h, Chunk &x, long chunk, long m) {
    const long count = h.tokens(chunk);
    const float *g = h.c.g + h.offset(h.c.g_strides, chunk, h.head);
    const float *beta = h.c.beta + h.offset(h.c.beta_strides, chunk, h.head);
    double running = 0.0;
    for (long i = 0; i < m; i++) {
        const double g_i = i < count ? g[i * h.c.g_strides.time] : 0.0;
        running += g_i < RESET ? RESET : g_i;
        x.b[i] = running;
        x.beta[i] = i < count ? beta[i * h.c.beta_strides.time] : 0.0f;
    }
    exponentials(m, x.b, 0.0, 1.0, x.gam);
    exponentials(m, x.b, running, -1.0, x.lam);
    for (long i = 0; i < m; i++) {
        memset(x.D[i], 0, m * sizeof(float));
        const long n = (i + W) / W * W;
        exponentials(n, x.b, x.b[i], -1.0, x.D[i]);
        store(x.D[i] + n - W, places(n - W) <= static_cast<int32_t>(i) ? load(x.D[i] + n - W) : vec{});
    }
}

// Loads a chunk's q, k and gates, and computes all that depends on them: P, and N = -strict_lower(K K^T . D), whose
// columns (forward) or rows (backward) beta multiplies.
void prepare(const Head &h, Chunk &x, long chunk, long m, bool backward) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), head = h.head / (c.HV / c.H), next = backward ? -c.C : c.C;
    const Matrix k = {x.QK[m], x.QK.stride}, N = {x.PN[m], x.PN.stride}, G = x.G, Gk = {G[m], G.stride};
    fill(c.q + h.offset(c.q_strides, chunk, head), c.q_strides.time, count, c.K, m, x.QK, 1.0f,
         next * c.q_strides.time);
    fill(c.k + h.offset(c.k_strides, chunk, head), c.k_strides.time, count, c.K, m, k, 1.0f,
         next * c.k_strides.time);
    if (c.normalize) {
        normalize(x.QK, m, h.K, x.rq);
        normalize(k, m, h.K, x.rk);
    }
    gates(h, x, chunk, m);
    scale_rows(x.QK, x.gam, m, h.K, G);
    scale_rows(k, x.gam, m, h.K, Gk, -1.0f);
    if (!backward) scale_rows(k, x.lam, m, h.K, x.written);
    transpose(m, h.K, k, x.KT);
    clear(x.PN, 2 * m);
    product<PLAIN, FULL, true>(m, m, h.K, x.QK, x.KT, x.PN);
    product<PLAIN, FULL, true>(m, m, h.K, k, x.KT, N);
    for (long i = 0; i < m; i++)
        for (long j = 0; j < m; j += W) {
            const vec D = load(x.D[i] + j), factor = backward ? all(x.beta[i]) : load(x.beta + j);
            const vec strict = places(j) < static_cast<int32_t>(i) ? D : vec{};
            store(x.PN[i] + j, load(x.PN[i] + j) * D);
            store(N[i] + j, -(load(N[i] + j) * strict) * factor);
        }
}

struct Forward {
    Chunk x;
    Matrix S, OE, U;  // the state, [o; E], U
    Forward(Arena &arena, long C, long K, long V)
        : x(arena, C, K), S(arena.matrix(K, V)), OE(arena.matrix(2 * C, V)), U(arena.matrix(C, V)) {}
};

// A sequence of one token: as a chunk it would be filled up with 15 rows of zeros. o = gam S^T q + (q . k) u
void forward_token(const Head &h, Forward &f) {
    const Call &c = h.c;
    const Matrix QK = f.x.QK, E = {f.OE[1], f.OE.stride};
    const Token t(h, QK, {QK[1], QK.stride});
    float *read = f.U[1], *u = f.U[0];
    fill(c.v + h.offset(c.v_strides, 0, h.head), 0, 1, c.V, 1, E);
    clear(f.OE, 1);
    if (c.initial_state || c.final_state)
        fill(c.initial_state ? c.initial_state + h.state() : nullptr, c.V, c.initial_state ? c.K : 0, c.V, h.K, f.S);
    if (c.initial_state) {
        memset(read, 0, h.V * sizeof(float));
        for (long i = 0; i < c.K; i++) {
            add_row(f.OE[0], t.q[i], f.S[i], h.V);
            add_row(read, t.k[i], f.S[i], h.V);
        }
        scale_rows(f.OE, &t.gam, 1, h.V, f.OE);
        add_row(E[0], -t.gam, read, h.V);
    }
    scale_rows(E, &t.beta, 1, h.V, f.U);
    add_row(f.OE[0], dot(h.K, t.q, t.k), u, h.V);
    put(f.OE, 1, c.V, c.o + h.dense(0, c.V), 0, h.scale);
    if (c.E) put(E, 1, c.V, c.E + h.dense(0, c.V), 0);
    if (!c.final_state) return;
    scale_state(f.S, h.K, h.V, t.gam);
    for (long i = 0; i < c.K; i++) add_row(f.S[i], t.k[i], u, h.V);
    put(f.S, c.K, c.V, c.final_state + h.state(), c.V);
}

void forward_head(const Head &h, Forward &f) {
    const Call &c = h.c;
    if (h.last_token - h.first_token == 1) return forward_token(h, f);
    Chunk &x = f.x;
    if (h.chunks() > 1 || c.initial_state || c.final_state)
        fill(c.initial_state ? c.initial_state + h.state() : nullptr, c.V, c.initial_state ? c.K : 0, c.V, h.K, f.S);
    for (long chunk = 0; chunk < h.chunks(); chunk++) {
        const long count = h.tokens(chunk), m = round_up(count), row = c.HV * c.V;
        const Matrix E = {f.OE[m], f.OE.stride};
        if (c.states && chunk > 0) put(f.S, c.K, c.V, h.saved_state(chunk), c.V);
        prepare(h, x, chunk, m, false);
        clear(f.OE, m);
        fill(c.v + h.offset(c.v_strides, chunk, h.head), c.v_strides.time, count, c.V, m, E, 1.0f,
             c.C * c.v_strides.time);
        // o = diag(gam) q S and V - diag(gam) k S in one product
        if (h.reads_state(chunk)) product<PLAIN, FULL>(2 * m, h.V, h.K, x.G, f.S, f.OE);
        solve<PLAIN>(m, h.V, {x.PN[m], x.PN.stride}, E);
        if (c.E) put(E, count, c.V, c.E + h.dense(chunk, c.V), row, 1.0f, row * c.C);
        scale_rows(E, x.beta, m, h.V, f.U);
        product<PLAIN, LOWER>(m, h.V, m, x.PN, f.U, f.OE);
        put(f.OE, count, c.V, c.o + h.dense(chunk, c.V), row, h.scale, row * c.C);
        if (h.is_last(chunk) && !c.final_state) return;
        scale_state(f.S, h.K, h.V, x.gam[m - 1]);
        product<TRANSPOSED, FULL>(h.K, h.V, m, x.written, f.U, f.S);
    }
    if (c.final_state) put(f.S, c.K, c.V, c.final_state + h.state(), c.V);
}

struct Backward {
    Chunk x;
    Matrix Y, E, U, UT, S, ST, dS, dST;  // Y [dO; dR, later dv]
    Matrix XY, dQK, dK;                  // [dP; -dkk], [dq; what S passes on to k], dk
    float *reads, *written, *column, *dg, *dbeta;
    bool reads_S = true, reads_dS = true;  // of the chunk; else they are zeros, and nothing is in them
    Backward(Arena &arena, long C, long K, long V)
        : x(arena, C, K), Y(arena.matrix(2 * C, V)), E(arena.matrix(C, V)), U(arena.matrix(C, V)),
          UT(arena.matrix(V, C)), S(arena.matrix(K, V)), ST(arena.matrix(V, K)), dS(arena.matrix(K, V)),
          dST(arena.matrix(V, K)), XY(arena.matrix(2 * C, C)), dQK(arena.matrix(2 * C, K)), dK(arena.matrix(C, K)),
          reads(arena.row(C)), written(arena.row(C)), column(arena.row(C)), dg(arena.row(C)), dbeta(arena.row(C)) {}
};

// Computes dg like `chunked.log_decay_gradient`, from XY = [dO U^T; dR U^T] and [P; N].
void log_decay_gradient(Backward &f, long m, float carried) {
    memset(f.column, 0, m * sizeof(float));
    float later = 0.0f, before = 0.0f;
    for (long t = m - 1; t >= 0; t--) {
        // column_j: what tokens from t on read of j's write; nothing decays from a token to itself
        vec behind = {};
        for (long j = 0; j <= t; j += W) {
            const vec pairs =
                load(f.XY[t] + j) * load(f.x.PN[t] + j) + load(f.XY[m + t] + j) * load(f.x.PN[m + t] + j);
            const vec column = load(f.column + j) + (places(j) < static_cast<int32_t>(t) ? pairs : vec{});
            store(f.column + j, column);
            behind += places(j) < static_cast<int32_t>(t) ? column : vec{};
        }
        later += f.reads[t];
        f.dg[t] = sum(behind) + later + carried;
    }
    for (long t = 0; t < m; t++) {
        f.dg[t] += before;
        before += f.written[t];
    }
}

// Computes dO, dv and what depends on them, and writes dv; from f.dS, the gradient of the chunk's last state.
void backward_values(const Head &h, Backward &f, long chunk, long m) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), row = c.HV * c.V;
    Chunk &x = f.x;
    const Matrix dR = {f.Y[m], f.Y.stride}, N = {x.PN[m], x.PN.stride}, XY = f.XY;
    fill(c.d_o + h.offset(c.do_strides, chunk, h.head), c.do_strides.time, count, c.V, m, f.Y, h.scale,
         -c.C * c.do_strides.time);
    fill(c.E + h.dense(chunk, c.V), row, count, c.V, m, f.E, 1.0f, -row * c.C);
    scale_rows(f.E, x.beta, m, h.V, f.U);
    transpose(m, h.V, f.U, f.UT);
    clear(dR, m);
    // lam follows the product, and <dR, U> is not <U dS'^T, k>: equal keys have equal rows here, whose roundings
    // cancel where their writes do
    if (f.reads_dS) product<PLAIN, FULL>(m, h.V, h.K, {x.QK[m], x.QK.stride}, f.dS, dR);
    scale_rows(dR, x.lam, m, h.V, dR);
    for (long i = 0; i < m; i++) f.written[i] = dot(h.V, dR[i], f.U[i]);
    product<TRANSPOSED, UPPER>(m, h.V, m, x.PN, f.Y, dR);
    solve<TRANSPOSED>(m, h.V, N, dR);
    for (long i = 0; i < m; i++) f.dbeta[i] = dot(h.V, dR[i], f.E[i]);
    clear(XY, 2 * m);
    product<PLAIN, FULL, true>(m, m, h.V, f.Y, f.UT, XY);
    product<PLAIN, FULL, true>(m, m, h.V, dR, f.UT, {XY[m], XY.stride});
    scale_rows(dR, x.beta, m, h.V, dR);
    put(dR, count, c.V, c.dv + h.dense(chunk, c.V), row, 1.0f, -row * c.C);
}

// Computes and writes dq and dk, dg and dbeta.
void backward_keys(const Head &h, Backward &f, long chunk, long m) {
    const Call &c = h.c;
    const long count = h.tokens(chunk), row = c.HV * c.K;
    Chunk &x = f.x;
    const Matrix k = {x.QK[m], x.QK.stride}, dk_S = {f.dQK[m], f.dQK.stride}, dkk = {f.XY[m], f.XY.stride};
    clear(f.dQK, 2 * m);
    if (f.reads_S) product<PLAIN, FULL>(2 * m, h.K, h.V, f.Y, f.ST, f.dQK);
    scale_rows(f.dQK, x.gam, m, h.K, f.dQK);
    scale_rows(dk_S, x.gam, m, h.K, dk_S);
    float carried = 0.0f;
    for (long i = 0; i < h.K && f.reads_S && f.reads_dS; i++) carried += dot(h.V, f.dS[i], f.S[i]);
    for (long i = 0; i < m; i++) f.reads[i] = dot(h.K, f.dQK[i], x.QK[i]) - dot(h.K, dk_S[i], k[i]);
    log_decay_gradient(f, m, x.gam[m - 1] * carried);
    for (long i = 0; i < m; i++)
        for (long j = 0; j < m; j += W) {
            const vec D = load(x.D[i] + j), strict = places(j) < static_cast<int32_t>(i) ? D : vec{};
            store(f.XY[i] + j, load(f.XY[i] + j) * D);
            store(dkk[i] + j, load(dkk[i] + j) * strict * -x.beta[i]);
        }
    clear(f.dK, m);
    if (f.reads_dS) product<PLAIN, FULL>(m, h.K, h.V, f.U, f.dST, f.dK);
    for (long i = 0; i < m; i++)
        for (long j = 0; j < h.K; j += W) store(f.dK[i] + j, load(f.dK[i] + j) * x.lam[i] - load(dk_S[i] + j));
    product<PLAIN, LOWER>(m, h.K, m, f.XY, k, f.dQK);
    product<TRANSPOSED, UPPER>(m, h.K, m, f.XY, x.QK, f.dK);
    product<TRANSPOSED, UPPER>(m, h.K, m, dkk, k, f.dK);
    product<PLAIN, LOWER>(m, h.K, m, dkk, k, f.dK);
    if (c.normalize) {
        normalize_back(f.dQK, x.QK, x.rq, m, h.K);
        normalize_back(f.dK, k, x.rk, m, h.K);
    }
    put(f.dQK, count, c.K, c.dq + h.dense(chunk, c.K), row, 1.0f, -row * c.C);
    put(f.dK, count, c.K, c.dk + h.dense(chunk, c.K), row, 1.0f, -row * c.C);
    put({f.dg, 1}, count, 1, c.dg + h.dense(chunk, 1), c.HV);
    put({f.dbeta, 1}, count, 1, c.dbeta + h.dense(chunk, 1), c.HV);
}

// The gradients of `forward_token`, from dU = (q . k) dO + dS^T k.
void backward_token(const Head &h, Backward &f) {
    const Call &c = h.c;
    const Matrix QK = f.x.QK, k = {QK[1], QK.stride}, dU = {f.Y[1], f.Y.stride}, dk = f.dK;
    const Token t(h, QK, k);
    float *dO = f.Y[0], *dq = f.dQK[0];
    fill(c.d_o + h.offset(c.do_strides, 0, h.head), 0, 1, c.V, 1, f.Y, h.scale);
    fill(c.E + h.dense(0, c.V), 0, 1, c.V, 1, f.E);
    scale_rows(f.E, &t.beta, 1, h.V, f.U);
    if (c.dfinal_state || c.dinitial_state)
        fill(c.dfinal_state ? c.dfinal_state + h.state() : nullptr, c.V, c.dfinal_state ? c.K : 0, c.V, h.K, f.dS);
    if (c.initial_state) fill(c.initial_state + h.state(), c.V, c.K, c.V, h.K, f.S);
    clear(dU, 1);
    for (long i = 0; i < c.K && c.dfinal_state; i++) add_row(dU[0], t.k[i], f.dS[i], h.V);
    add_row(dU[0], dot(h.K, t.q, t.k), dO, h.V);
    const float dbeta = dot(h.V, dU[0], f.E[0]), dP = dot(h.V, dO, f.U[0]);
    scale_rows(dU, &t.beta, 1, h.V, dU);  // dv
    scale_rows(k, &dP, 1, h.K, f.dQK);
    scale_rows(QK, &dP, 1, h.K, dk);
    float reads = 0.0f, carried = 0.0f;
    for (long i = 0; i < c.K; i++) {
        if (c.initial_state) {
            const float dq_S = t.gam * dot(h.V, f.S[i], dO), dk_S = t.gam * dot(h.V, f.S[i], dU[0]);
            dq[i] += dq_S, dk.x[i] -= dk_S, reads += t.q[i] * dq_S - t.k[i] * dk_S;
            if (c.dfinal_state) carried += dot(h.V, f.dS[i], f.S[i]);
        }
        if (c.dfinal_state) dk.x[i] += dot(h.V, f.dS[i], f.U[0]);
    }
    if (c.normalize) {
        normalize_back(f.dQK, QK, &t.rq, 1, h.K);
        normalize_back(dk, k, &t.rk, 1, h.K);
    }
    put(f.dQK, 1, c.K, c.dq + h.dense(0, c.K), 0);
    put(dk, 1, c.K, c.dk + h.dense(0, c.K), 0);
    put(dU, 1, c.V, c.dv + h.dense(0, c.V), 0);
    c.dg[h.dense(0, 1)] = reads + t.gam * carried;
    c.dbeta[h.dense(0, 1)] = dbeta;
    if (!c.dinitial_state) return;
    for (long i = 0; i < c.K; i++) {
        add_row(f.dS[i], t.q[i], dO, h.V);
        add_row(f.dS[i], -t.k[i], dU[0], h.V);
    }
    scale_state(f.dS, h.K, h.V, t.gam);
    put(f.dS, c.K, c.V, c.dinitial_state + h.state(), c.V);
}

void backward_head(const Head &h, Backward &f) {
    const Call &c = h.c;
    if (h.last_token - h.first_token == 1) return backward_token(h, f);
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
        // dS = gam_C dS' + (diag(gam) q)^T dO - (diag(gam) k)^T dv
        scale_state(f.dS, h.K, h.V, f.x.gam[m - 1]);
        product<TRANSPOSED, FULL>(h.K, h.V, 2 * m, f.x.G, f.Y, f.dS);
    }
    if (c.dinitial_state) put(f.dS, c.K, c.V, c.dinitial_state + h.state(), c.V);
}

// One token for NV vectors of columns: S <- gam S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, as it is written.
template <int NV>
INLINE void step_columns(
    const Call &c, const float *q, const float *k, float gam, float beta, const float *S, const float *v,
    float *after, vec (&o)[NV]) {
    vec u[NV] = {};
    for (long i = 0; i < c.K; i++)
        for (int n = 0; n < NV; n++) u[n] += k[i] * (gam * load(S + i * c.V + n * W));
    for (int n = 0; n < NV; n++) u[n] = beta * (load(v + n * W) - u[n]), o[n] = vec{};
    for (long i = 0; i < c.K; i++)
        for (int n = 0; n < NV; n++) {
            const vec s = gam * load(S + i * c.V + n * W) + k[i] * u[n];
            store(after + i * c.V + n * W, s);
            o[n] += q[i] * s;
        }
}

void step_head(const Head &h, float *x) {
    const Call &c = h.c;
    const float *S = c.initial_state + h.state(), *v = c.v + h.offset(c.v_strides, 0, h.head);
    float *after = c.final_state + h.state(), *out = c.o + h.dense(0, c.V);
    const Token t(h, {x, h.K}, {x + h.K, h.K});
    auto columns = [&](auto width, long j) {
        constexpr int NV = decltype(width)::value;
        vec o[NV];
        step_columns<NV>(c, t.q, t.k, t.gam, t.beta, S + j, v + j, after + j, o);
        for (int n = 0; n < NV; n++) store(out + j + n * W, o[n] * h.scale);
    };
    // the last columns may be computed twice, from the same numbers
    long j = 0;
    for (; c.V >= 4 * W && j < c.V; j += 4 * W)
        columns(std::integral_constant<int, 4>(), j + 4 * W > c.V ? c.V - 4 * W : j);
    for (; c.V >= W && j < c.V; j += W)
        columns(std::integral_constant<int, 1>(), j + W > c.V ? c.V - W : j);
    for (; j < c.V; j++) {
        float u = 0.0f, o = 0.0f;
        for (long i = 0; i < c.K; i++) u += t.k[i] * (t.gam * S[i * c.V + j]);
        u = t.beta * (v[j] - u);
        for (long i = 0; i < c.K; i++) {
            const float s = t.gam * S[i * c.V + j] + t.k[i] * u;
            after[i * c.V + j] = s;
            o += t.q[i] * s;
        }
        out[j] = h.scale * o;
    }
}

}  // namespace

extern "C" {
void gated_delta_rule_forward(const Call *c, double scale) { run<Forward>(*c, scale, forward_head); }
void gated_delta_rule_backward(const Call *c, double scale) { run<Backward>(*c, scale, backward_head); }
void gated_delta_rule_step(const Call *c, double scale) {
    const long tasks = c->N * c->HV;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1 && tasks * c->K * c->V > 1 << 17)
    for (long task = 0; task < tasks; task++) {
        const Head h(*c, scale, task);
        step_head(h, scratch(2 * h.K));
    }
}
}
