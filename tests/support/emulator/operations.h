// The table of operations by name. Most compute each lane by itself, and are functions of a lane's numbers.
//
// Names are those of PTX without what changes nothing here: `rn`, the rounding that is always meant, and the
// signedness where it does not matter stands for both.
#pragma once
#include <sstream>
#include <tuple>
#include <utility>

#include "products.h"

struct Operation {
    void (*run)(Warp &, const Instruction &);
    std::string sizes;  // bytes of the result and the arguments, a digit each; empty: it is decoded in its own way
};
static std::vector<Operation> table;
static std::map<std::string, s32> numbers;
static const char *type = "";  // stands for # in names

// Adds an operation under several names, separated by blanks. Where it is inlined, the compiler takes minutes.
__attribute__((noinline, cold)) static void add(const char *names, void (*run)(Warp &, const Instruction &),
                                                std::initializer_list<size_t> sizes = {}) {
    Operation operation{run, ""};
    for (size_t size : sizes) operation.sizes += std::to_string(size);
    std::istringstream words(names);
    for (std::string name; words >> name; numbers[name] = s32(table.size()))
        if (const size_t at = name.find('#'); at != name.npos) name.replace(at, 1, type);
    table.push_back(operation);
}

// A lane's number: of 64 bits, or in the lower bits of a word.
template <class T> using Words = std::conditional_t<sizeof(T) == 8, T, u32>;
template <class T> static T get(const Words<T> *slot, int lane) {
    T x;
    memcpy(&x, slot + lane, sizeof x);
    return x;
}
template <class T> static void put(Words<T> *slot, int lane, T x) {
    Words<T> word{};
    memcpy(&word, &x, sizeof x);
    slot[lane] = word;
}
template <class Word> static void keep(Warp &w, s32 slot, const Word *results) {
    Word *d = w.slot<Word>(slot);
    if (w.mask == ALL) return void(memcpy(d, results, LANES * sizeof(Word)));
    for (int i = 0; i < LANES; i++)
        if (w.has(i)) d[i] = results[i];
}

// Runs a lambda F on every lane. It has no state, so that any place will do for it, and calls are inlined.
template <class F, class Call> struct Lanes;
template <class F, class D, class... A> struct Lanes<F, D (F::*)(A...) const> {
    alignas(F) static constexpr char place[sizeof(F)] = {};
    template <size_t... I> static void compute(Warp &w, const Instruction &x, std::index_sequence<I...>) {
        const std::tuple<const Words<A> *...> a{w.slot<Words<A>>(x.args[I + 1])...};
        Words<D> results[LANES];
        const F &f = reinterpret_cast<const F &>(place);
        for (int i = 0; i < LANES; i++) put<D>(results, i, f(get<A>(std::get<I>(a), i)...));
        keep(w, x.args[0], results);
    }
    static void run(Warp &w, const Instruction &x) { compute(w, x, std::index_sequence_for<A...>()); }
    static void define(const char *names) { add(names, run, {sizeof(D), sizeof(A)...}); }
};

// Defines an operation on every lane: the lambda's types are those of the result and of the arguments.
template <class F> static void lanes(const char *names, F) { Lanes<F, decltype(&F::operator())>::define(names); }

// ---- integers

template <class U, class S, class Wide> static void integers() {
    constexpr u32 BITS = 8 * sizeof(U);
    typedef std::make_signed_t<Wide> SignedWide;
    lanes("add.u# add.s# add.b#", [](U a, U b) { return U(a + b); });
    lanes("sub.u# sub.s# sub.b#", [](U a, U b) { return U(a - b); });
    lanes("mul.lo.u# mul.lo.s# mul.lo.b#", [](U a, U b) { return U(u64(a) * b); });
    lanes("mad.lo.u# mad.lo.s# mad.lo.b#", [](U a, U b, U c) { return U(u64(a) * b + c); });
    lanes("mul.hi.u#", [](U a, U b) { return U(static_cast<__uint128_t>(a) * b >> BITS); });
    lanes("mul.hi.s#", [](S a, S b) { return S(static_cast<__int128>(a) * b >> BITS); });
    lanes("mul.wide.u#", [](U a, U b) { return Wide(a) * b; });
    lanes("mul.wide.s#", [](S a, S b) { return SignedWide(a) * b; });
    lanes("mad.wide.u#", [](U a, U b, Wide c) { return Wide(a) * b + c; });
    lanes("mad.wide.s#", [](S a, S b, SignedWide c) { return SignedWide(a) * b + c; });
    lanes("and.b#", [](U a, U b) { return U(a & b); });
    lanes("or.b#", [](U a, U b) { return U(a | b); });
    lanes("xor.b#", [](U a, U b) { return U(a ^ b); });
    lanes("not.b#", [](U a) { return U(~a); });
    lanes("neg.s#", [](U a) { return U(0 - a); });
    lanes("min.u#", [](U a, U b) { return std::min(a, b); });
    lanes("max.u#", [](U a, U b) { return std::max(a, b); });
    lanes("min.s#", [](S a, S b) { return std::min(a, b); });
    lanes("max.s#", [](S a, S b) { return std::max(a, b); });
    lanes("shl.b#", [](U a, u32 b) { return U(b < BITS ? a << b : 0); });
    lanes("shr.u# shr.b#", [](U a, u32 b) { return U(b < BITS ? a >> b : 0); });
    lanes("shr.s#", [](S a, u32 b) { return S(a >> std::min<u32>(b, 8 * sizeof(U) - 1)); });
    lanes("div.s#", [](S a, S b) { return S(b == 0 ? -1 : b == -1 ? 0 - U(a) : a / b); });
    lanes("div.u#", [](U a, U b) { return U(b ? a / b : ~U(0)); });
    lanes("rem.u#", [](U a, U b) { return U(b ? a % b : a); });
    lanes("mov.u# mov.s# mov.b# mov.f#", [](U a) { return a; });
    lanes("selp.u# selp.s# selp.b# selp.f#", [](U a, U b, Predicate c) { return c ? a : b; });
    lanes("setp.eq.u# setp.eq.s# setp.eq.b#", [](U a, U b) { return Predicate(a == b); });
    lanes("setp.ne.u# setp.ne.s# setp.ne.b#", [](U a, U b) { return Predicate(a != b); });
    lanes("setp.lt.u#", [](U a, U b) { return Predicate(a < b); });
    lanes("setp.le.u#", [](U a, U b) { return Predicate(a <= b); });
    lanes("setp.gt.u#", [](U a, U b) { return Predicate(a > b); });
    lanes("setp.ge.u#", [](U a, U b) { return Predicate(a >= b); });
    lanes("setp.lt.s#", [](S a, S b) { return Predicate(a < b); });
    lanes("setp.le.s#", [](S a, S b) { return Predicate(a <= b); });
    lanes("setp.gt.s#", [](S a, S b) { return Predicate(a > b); });
    lanes("setp.ge.s#", [](S a, S b) { return Predicate(a >= b); });
}

template <class U, class S> static void bit_fields() {
    constexpr u32 BITS = 8 * sizeof(U);
    auto low = [](U a, u32 count) { return count < BITS ? U(a & ((U(1) << count) - 1)) : a; };
    lanes("bfe.u#", [low](U a, u32 first, u32 count) {
        return (first & 255) < BITS ? low(a >> (first & 255), count & 255) : 0;
    });
    lanes("bfe.s#", [](S a, u32 first, u32 count) {
        const u32 from = first & 255, end = std::min<u32>(8 * sizeof(U), from + (count & 255));
        if (!(count & 255)) return S(0);
        if (from >= BITS) return S(a < 0 ? -1 : 0);
        return S(S(U(a) << (BITS - end)) >> (BITS - end + from));
    });
}

static void bits() {
    type = "32", bit_fields<u32, s32>();
    type = "64", bit_fields<u64, s64>();
    lanes("prmt.b32", [](u32 a, u32 b, u32 which) {
        const u64 all = u64(b) << 32 | a;
        u32 picked = 0;
        for (int i = 0; i < 4; i++) {
            const u32 from = which >> (4 * i) & 15, byte = u32(all >> (8 * (from & 7))) & 255;
            picked |= (from & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * i);
        }
        return picked;
    });
    // whole registers and their parts
    lanes("pack.2.b32", [](u16 a, u16 b) { return a | u32(b) << 16; });
    lanes("pack.2.b64", [](u32 a, u32 b) { return a | u64(b) << 32; });
    lanes("part.2.b32", [](u32 a, u32 place) { return u16(a >> (16 * place)); });
    lanes("part.2.b64", [](u64 a, u32 place) { return u32(a >> (32 * place)); });
    lanes("and.pred", [](Predicate a, Predicate b) { return Predicate(a && b); });
    lanes("or.pred", [](Predicate a, Predicate b) { return Predicate(a || b); });
    lanes("xor.pred", [](Predicate a, Predicate b) { return Predicate((a != 0) != (b != 0)); });
    lanes("not.pred", [](Predicate a) { return Predicate(!a); });
    lanes("mov.pred", [](Predicate a) { return Predicate(a != 0); });
}

// ---- floats

static double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
static float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <class T> static void floats() {
    typedef std::conditional_t<sizeof(T) == 8, double, float> F;
    lanes("add.#", [](T a, T b) { return T(F(a) + F(b)); });
    lanes("sub.#", [](T a, T b) { return T(F(a) - F(b)); });
    lanes("mul.#", [](T a, T b) { return T(F(a) * F(b)); });
    lanes("fma.#", [](T a, T b, T c) { return T(fused(F(a), F(b), F(c))); });
    lanes("neg.#", [](T a) { return T(-F(a)); });
    lanes("abs.#", [](T a) { return T(std::fabs(F(a))); });
    lanes("min.#", [](T a, T b) { return T(std::fmin(F(a), F(b))); });
    lanes("max.#", [](T a, T b) { return T(std::fmax(F(a), F(b))); });
    lanes("min3.#", [](T a, T b, T c) { return T(std::fmin(std::fmin(F(a), F(b)), F(c))); });
    lanes("max3.#", [](T a, T b, T c) { return T(std::fmax(std::fmax(F(a), F(b)), F(c))); });
    lanes("setp.lt.#", [](T a, T b) { return Predicate(a < b); });
    lanes("setp.le.#", [](T a, T b) { return Predicate(a <= b); });
    lanes("setp.gt.#", [](T a, T b) { return Predicate(a > b); });
    lanes("setp.ge.#", [](T a, T b) { return Predicate(a >= b); });
}

template <class T> static void approximations() {
    lanes("div.full.# div.approx.#", [](T a, T b) { return T(double(a) / double(b)); });
    lanes("ex2.approx.#", [](T a) { return T(std::exp2(double(a))); });
    lanes("rcp.approx.#", [](T a) { return T(1 / double(a)); });
    lanes("rsqrt.approx.#", [](T a) { return T(1 / std::sqrt(double(a))); });
    lanes("cvt.rmi.#.f32", [](T a) { return T(std::floor(float(a))); });
}

// pairs of float32, which Blackwell's cores take
static void pairs() {
    typedef Pair<float> P;
    lanes("add.f32x2", [](P a, P b) { return P{a.low + b.low, a.high + b.high}; });
    lanes("sub.f32x2", [](P a, P b) { return P{a.low - b.low, a.high - b.high}; });
    lanes("mul.f32x2", [](P a, P b) { return P{a.low * b.low, a.high * b.high}; });
    lanes("fma.f32x2", [](P a, P b, P c) { return P{fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)}; });
}

// 16-bit floats, pairs of them in a word, and to and from float32
template <class T> static void halves() {
    typedef Pair<T> P;
    floats<T>();
    lanes("abs.#x2", [](P a) { return P{T(std::fabs(float(a.low))), T(std::fabs(float(a.high)))}; });
    lanes("add.#x2", [](P a, P b) { return P{T(a.low + b.low), T(a.high + b.high)}; });
    lanes("fma.#x2", [](P a, P b, P c) {
        return P{T(fused(float(a.low), float(b.low), float(c.low))), T(fused(float(a.high), float(b.high), float(c.high)))};
    });
    lanes("add.f32.#", [](T a, float b) { return float(a) + b; });
    lanes("sub.f32.#", [](T a, float b) { return float(a) - b; });
    lanes("fma.f32.#", [](T a, T b, float c) { return fused(float(a), float(b), c); });
    lanes("cvt.f32.#", [](T a) { return float(a); });
    lanes("cvt.f64.#", [](T a) { return double(float(a)); });
    lanes("cvt.#.f32", [](float a) { return T(a); });
    lanes("cvt.#x2.f32", [](float high, float low) { return P{T(low), T(high)}; });
}

// ---- conversions

template <class From> static void conversions() {
    lanes("cvt.u16.# cvt.s16.#", [](From a) { return u16(a); });
    lanes("cvt.u32.# cvt.s32.#", [](From a) { return u32(a); });
    lanes("cvt.u64.# cvt.s64.#", [](From a) { return u64(a); });
    lanes("cvt.f32.#", [](From a) { return float(a); });
    lanes("cvt.f64.#", [](From a) { return double(a); });
}

// ---- between lanes

// args: result, value, lane, clamp, members, predicate or none; value: 0 idx, 1 up, 2 down, 3 bfly
static void shuffle(Warp &w, const Instruction &x) {
    u32 values[LANES];
    memcpy(values, w.slot<u32>(x.args[1]), sizeof values);
    for (int i = 0; i < LANES; i++) {
        if (!w.has(i)) continue;
        const s32 by = w.slot<s32>(x.args[2])[i] & 31;
        const u32 c = w.slot<u32>(x.args[3])[i], members = w.slot<u32>(x.args[4])[i];
        const s32 segment = c >> 8 & 31, least = i & segment, most = least | (c & 31 & ~segment);
        const s32 places[] = {least | (by & ~segment), i - by, i + by, i ^ by}, from = places[x.value];
        const bool inside = x.value == 1 ? from >= most : from <= most;
        if ((members & w.mask) != members)
            w.launch->report("divergent code", x.line, "a shuffle of lanes %08x by %08x", members, w.mask);
        w.slot<u32>(x.args[0])[i] = values[inside ? from & 31 : i];
        if (x.args[5] >= 0) w.slot<s32>(x.args[5])[i] = -s32(inside);
    }
}

enum { BRANCH, RETURN, BARRIER };  // the first of the table: `run` does them itself

static bool fill_table() {
    for (const char *name : {"bra", "ret", "bar"}) add(name, nullptr);
    type = "16", integers<u16, s16, u32>();
    type = "32", integers<u32, s32, u64>();
    type = "64", integers<u64, s64, u64>();
    bits();
    type = "f32", floats<float>();
    lanes("div.f32", [](float a, float b) { return a / b; });
    lanes("setp.eq.f32", [](float a, float b) { return Predicate(a == b); });
    lanes("setp.ne.f32", [](float a, float b) { return Predicate(a < b || a > b); });
    // also true where a number is missing
    lanes("setp.ltu.f32", [](float a, float b) { return Predicate(!(a >= b)); });
    lanes("setp.leu.f32", [](float a, float b) { return Predicate(!(a > b)); });
    lanes("setp.gtu.f32", [](float a, float b) { return Predicate(!(a <= b)); });
    type = "ftz.f32", floats<Flushed>();
    type = "f64", floats<double>();
    type = "f32", approximations<float>();
    type = "ftz.f32", approximations<Flushed>();
    type = "bf16", halves<bf16>();
    type = "f16", halves<half>();
    pairs();
    type = "u16", conversions<u16>();
    type = "u32", conversions<u32>();
    type = "s32", conversions<s32>();
    type = "u64", conversions<u64>();
    type = "s64", conversions<s64>();
    lanes("cvt.f64.f32", [](float a) { return double(a); });
    lanes("cvt.f32.f64", [](double a) { return float(a); });
    lanes("cvta.to.global.u64 cvta.global.u64 cvta.to.shared.u64", [](u64 a) { return a; });
    add("ld.global", access<false, false>);
    add("ld.shared", access<true, false>);
    add("st.global", access<false, true>);
    add("st.shared", access<true, true>);
    add("cp.async", cp_async);
    add("cp.async.commit_group", cp_async_commit);
    add("cp.async.wait_group", cp_async_wait);
    add("wgmma", wgmma);
    add("wgmma.commit_group", wgmma_commit);
    add("wgmma.wait_group", wgmma_wait);
    add("wgmma.fence", wgmma_fence);
    add("fence.proxy.async", fence_proxy);
    add("mma", mma);
    add("ldmatrix", move_matrices<true>);
    add("stmatrix", move_matrices<false>);
    add("shfl", shuffle);
    return true;
}
static const bool filled = fill_table();
