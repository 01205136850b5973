// Tensor cores, and how warps bring matrices from and to shared memory: wgmma, mma, ldmatrix, stmatrix.
#pragma once
#include "memory.h"
#include "numbers.h"

enum { BF16 = 0, F16 = 1, TF32 = 2 };  // as decode.py's PRODUCT_TYPES

static float element(const u8 *p, int type) {
    u32 b = 0;
    memcpy(&b, p, type == TF32 ? 4 : 2);
    if (type == TF32) return tf32(b);
    return type == BF16 ? float(bits_as<bf16>(u16(b))) : float(bits_as<half>(u16(b)));
}

// An operand of wgmma in shared memory, as its descriptor says. Its rows are those of A or the columns of B.
struct Operand {
    u32 start, leading, stride, span, swizzle;
    int rows, first, K, type, size;
    bool transposed;  // rows, not k, lie side by side

    Operand(const Warp &w, const Product &p, bool right)
        : rows(right ? p.x->args[4] : 16), first(right ? 0 : 16 * (w.id % 4)), K(int(p.x->value)), type(p.x->args[3]),
          size(type == TF32 ? 4 : 2), transposed(p.x->args[5] >> right & 1) {
        const u64 d = p.descriptors[right], mode = d >> 62;  // 0: no swizzle, 1: of 128 bytes, 2: 64, 3: 32
        start = (d & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
        span = mode ? 256 >> mode : 16;
        swizzle = mode ? (8 >> (mode - 1)) - 1 : 0;
        if (!mode && transposed) std::swap(leading, stride);
    }
    // Calls f(address in shared memory, row, k) for every 16 bytes, which lie side by side.
    template <class F> void visit(F f) const {
        const int count = 16 / size, along = transposed ? rows : K, across = transposed ? K : rows;
        for (int a = 0; a < across; a++)
            for (int b = 0; b < along; b += count) {
                const u32 minor = a + (transposed ? 0 : first), major = (b + (transposed ? first : 0)) * size;
                u32 address = start + major / span * leading + minor / 8 * stride + minor % 8 * span + major % span;
                address ^= (address >> 7 & swizzle) << 4;
                f(address, transposed ? b : a, transposed ? a : b);
            }
    }
};

static void note_operand(Warp &w, const Operand &x, s32 line) {
    x.visit([&](u32 address, int, int) {
        if (lies_in_shared(w, address, 16, line)) note_shared(w, address - WINDOW, 16, Access::product, line);
    });
}

// Copies an operand to out[row * by_row + k * by_k].
static void gather(Warp &w, const Operand &x, float *out, int by_row, int by_k, s32 line) {
    const int count = 16 / x.size, step = x.transposed ? by_row : by_k;
    x.visit([&](u32 address, int row, int k) {
        const bool inside = lies_in_shared(w, address, 16, line);
        const u8 *from = &w.block->shared[inside ? address - WINDOW : 0];
        float *to = out + row * by_row + k * by_k;
        for (int e = 0; e < count; e++) to[e * step] = inside ? element(from + e * x.size, x.type) : NAN;
    });
}

// A's fragment of a warp, in four registers (two for k = 8 halves) -> A [16, K]
static void gather_registers(Warp &w, const s32 *list, int count, int K, int type, float *A) {
    for (int i = 0; i < LANES; i++)
        for (int a = 0; a < count; a++) {
            const u8 *bytes = reinterpret_cast<const u8 *>(w.slot<u32>(list[a]) + i);
            float *row = A + (i / 4 + (a & 1) * 8) * K;
            if (type == TF32) row[i % 4 + a / 2 * 4] = element(bytes, type);
            for (int e = 0; type != TF32 && e < 2; e++)
                row[i % 4 * 2 + a / 2 * 8 + e] = element(bytes + 2 * e, type);
        }
}

// Where a lane's register j of an accumulator lies in [16, N]
static int place_of(int j, int lane, int N) {
    return (lane / 4 + (j >> 1 & 1) * 8) * N + j / 4 * 8 + (j & 1) + lane % 4 * 2;
}

// wgmma: args[0], [1] registers of the descriptors of A and B, [0] < 0: A is in registers; [2] whether D is added to;
// [3] type; [4] N; [5] A transposed | B transposed << 1; list: D's registers, A's; value: K
static void multiply_now(Warp &w, const Product &p) {
    const Instruction &x = *p.x;
    const int N = x.args[4], K = int(x.value), registers = N / 2;
    const s32 *list = w.launch->program->pool.data() + x.list;
    static thread_local float A[16 * 16], B[16 * 256], D[16 * 256];
    if (x.args[0] >= 0)
        gather(w, Operand(w, p, false), A, K, 1, x.line);
    else
        gather_registers(w, list + registers, 4, K, x.args[3], A);
    gather(w, Operand(w, p, true), B, 1, N, x.line);
    for (int j = 0; j < registers; j++)
        for (int i = 0; i < LANES; i++) D[place_of(j, i, N)] = p.adds ? w.slot<float>(list[j])[i] : 0.0f;
    multiply(D, A, B, 16, N, K);
    for (int j = 0; j < registers; j++)
        for (int i = 0; i < LANES; i++) w.slot<float>(list[j])[i] = D[place_of(j, i, N)];
}

// Marks the accumulators of a product that is under way: nobody else may touch them.
static void mark_pending(Warp &w, const Product &p) {
    for (int j = 0; j < p.x->args[4] / 2; j++) w.pending[w.launch->program->pool[p.x->list + j]] = 1;
}

static void check_issue(Warp &w, const Product &p) {
    const Instruction &x = *p.x;
    const s32 *list = w.launch->program->pool.data() + x.list;
    for (int j = p.adds ? 0 : x.args[4] / 2; j < x.count; j++)
        if (w.dirty[list[j]] && !w.pending[list[j]]) {
            w.launch->report("missing wgmma.fence", x.line, "a register was written after the last one");
            break;
        }
    if (x.args[0] >= 0) note_operand(w, Operand(w, p, false), x.line);
    note_operand(w, Operand(w, p, true), x.line);
}

static void wgmma(Warp &w, const Instruction &x) {
    Launch &l = *w.launch;
    if (w.mask != ALL) l.report("divergent code", x.line, "wgmma by lanes %08x", w.mask);
    Product p = {&x, {0, 0}, w.slot<s32>(x.args[2])[0] != 0, l.now};
    for (int side = 0; side < 2; side++) {
        if (x.args[side] < 0) continue;
        const u64 *descriptor = w.slot<u64>(x.args[side]);
        p.descriptors[side] = descriptor[0];
        if (descriptor[0] >> 49 & 7) l.report("unsupported", x.line, "a descriptor with a base offset");
        if (std::any_of(descriptor, descriptor + LANES, [&](u64 d) { return d != descriptor[0]; }))
            l.report("divergent code", x.line, "lanes have different descriptors");
    }
    if (l.options.check) check_issue(w, p);
    l.now++;  // what is written from here on is written after the issue
    if (!l.options.late_products) multiply_now(w, p);
    w.products.issued.push_back(p);
    if (l.options.check) mark_pending(w, p);
}

static void wgmma_commit(Warp &w, const Instruction &) { w.products.commit(), w.open = false; }

// Nobody may have written to an operand since the product was issued: it may have been read until now.
static void check_end(Warp &w, const Product &p, const Operand &x) {
    x.visit([&](u32 address, int, int) {
        for (u32 k = 0; k < 8 && lies_in_shared(w, address, 16, p.x->line); k++) {
            Cell &c = w.block->cells[(address - WINDOW) / 2 + k];
            if (c.written > p.issued || c.writing >= 0)
                w.launch->report("race with wgmma", p.x->line, "warp %d writes shared memory before the product is waited for",
                                 c.writing >= 0 ? c.writing : __builtin_ctz(c.writers));
            c.readers = (c.read >= w.block->began ? c.readers : 0) | 1u << w.id;
            c.read = w.launch->now;
        }
    });
}

static void wgmma_wait(Warp &w, const Instruction &x) {
    const Options &options = w.launch->options;
    w.products.wait(x.value, [&](const Product &p) {
        if (options.late_products) multiply_now(w, p);
        if (options.check && p.x->args[0] >= 0) check_end(w, p, Operand(w, p, false));
        if (options.check) check_end(w, p, Operand(w, p, true));
    });
    if (!options.check) return;
    std::fill(w.pending.begin(), w.pending.end(), 0);
    for (auto &group : w.products.groups)
        for (const Product &p : group) mark_pending(w, p);
    for (const Product &p : w.products.issued) mark_pending(w, p);
}

static void wgmma_fence(Warp &w, const Instruction &) { std::fill(w.dirty.begin(), w.dirty.end(), 0), w.open = true; }

// From here on the tensor core sees this warp's writes, and those that a barrier has ordered before.
static void fence_proxy(Warp &w, const Instruction &) {
    for (u32 &until : w.fenced) until = std::max(until, w.block->began - 1);
    w.fenced[w.id] = w.launch->now++;
}

// mma: list: D (4 registers), A, B, C (4); args[0] type; value: K
static void mma(Warp &w, const Instruction &x) {
    const int K = int(x.value), type = x.args[0], of_A = type == TF32 ? K / 2 : K / 4, of_B = of_A / 2;
    const s32 *list = w.launch->program->pool.data() + x.list, *b = list + 4 + of_A, *c = b + of_B;
    if (w.mask != ALL) w.launch->report("divergent code", x.line, "mma by lanes %08x", w.mask);
    float A[16 * 16], columns[16 * 16], B[16 * 8], D[16 * 8];
    gather_registers(w, list + 4, of_A, K, type, A);
    // B's fragment is that of A's first eight rows, transposed: each register takes the place of two
    s32 doubled[4];
    for (int j = 0; j < of_B; j++) doubled[2 * j] = doubled[2 * j + 1] = b[j];
    gather_registers(w, doubled, 2 * of_B, K, type, columns);
    for (int k = 0; k < K; k++)
        for (int n = 0; n < 8; n++) B[k * 8 + n] = columns[n * K + k];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < LANES; i++) D[place_of(j, i, 8)] = w.slot<float>(c[j])[i];
    multiply(D, A, B, 16, 8, K);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < LANES; i++) w.slot<float>(list[j])[i] = D[place_of(j, i, 8)];
}

// ldmatrix, stmatrix: args[0] addresses of rows, of matrix j in lanes 8 j to 8 j + 7; [1] transposed; value: offset
template <bool LOADS> static void move_matrices(Warp &w, const Instruction &x) {
    const s32 *list = w.launch->program->pool.data() + x.list;
    if (w.mask != ALL) w.launch->report("divergent code", x.line, "ldmatrix or stmatrix by lanes %08x", w.mask);
    for (int j = 0; j < x.count; j++) {
        u16 matrix[8][8];
        u32 *v = w.slot<u32>(list[j]);
        auto at = [&](int lane, int e) -> u16 & {
            const int row = lane / 4, column = lane % 4 * 2 + e;
            return x.args[1] ? matrix[column][row] : matrix[row][column];
        };
        if (!LOADS)
            for (int i = 0; i < LANES; i++) at(i, 0) = u16(v[i]), at(i, 1) = u16(v[i] >> 16);
        for (int r = 0; r < 8; r++) {
            u8 *row = reinterpret_cast<u8 *>(matrix[r]);
            const u32 address = w.slot<u32>(x.args[0])[8 * j + r] + u32(x.value);
            u8 *there = shared_bytes(w, address, 16, LOADS ? nullptr : row, x.line);
            if (LOADS && there)
                memcpy(row, there, 16);
            else if (LOADS)
                memset(row, 0xff, 16);
            else if (there)
                memcpy(there, row, 16);
        }
        if (LOADS)
            for (int i = 0; i < LANES; i++) v[i] = at(i, 0) | u32(at(i, 1)) << 16;
    }
}
