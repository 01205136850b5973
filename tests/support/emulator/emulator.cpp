// Executes the PTX that Triton emits for sm_90, a warp at a time, on this machine's memory.
//
// A program is a list of decoded instructions (decode.py). A register holds 32 lanes, and an operation loops over
// them. A warp runs until it waits at a barrier, ends, or has used up its quantum. Lanes that branch apart run as
// strands, that of the lowest address first, and become one again where they meet.
#include "operations.h"

static void merge(std::vector<Strand> &strands) {
    std::sort(strands.begin(), strands.end(), [](const Strand &a, const Strand &b) { return a.at > b.at; });
    for (size_t i = strands.size(); i-- > 1;)
        if (strands[i].at == strands[i - 1].at) {
            strands[i - 1].mask |= strands[i].mask;
            strands.erase(strands.begin() + i);
        }
}

// Nobody else may touch the accumulators of products under way, and what is written needs wgmma.fence before them. A
// copy after it of what was there before is let through: Triton makes such, and ptxas removes them.
static void check_registers(Warp &w, const Instruction &x) {
    const s32 *list = w.launch->program->pool.data() + x.list;
    for (int k = 0; k < x.count; k++) {
        if (list[k] < 0) continue;
        if (w.pending[list[k]])
            w.launch->report("race with wgmma", x.line, "a register of a product is %s before it is waited for",
                             k < x.writes ? "written" : "read");
        if (k < x.writes) w.dirty[list[k]] = !(x.copies && w.open) || w.dirty[list[1]];
    }
}

static void arrive(Warp &w, const Instruction &x, bool all) {
    Launch &l = *w.launch;
    if (!all || w.mask != ALL) l.report("divergent code", x.line, "lanes %08x alone reach a barrier", w.mask);
    const s32 barrier = w.slot<s32>(x.args[0])[0];
    const s32 threads = x.args[1] < 0 ? LANES * l.warps : w.slot<s32>(x.args[1])[0];
    if (barrier || threads != LANES * l.warps)
        l.report("unsupported", x.line, "barrier %d of %d threads, not of the whole block", barrier, threads);
    w.waits = true;
}

// Runs a warp until it waits, ends or yields.
static void run(Warp &w) {
    Launch &l = *w.launch;
    const Instruction *code = l.program->code.data();
    static const s32 product = numbers["wgmma"];
    s32 left = l.options.quantum ? l.options.quantum : std::numeric_limits<s32>::max();
    while (!w.strands.empty()) {
        if (w.strands.size() > 1) merge(w.strands);
        Strand s = w.strands.back();
        w.strands.pop_back();
        const s32 meeting = w.strands.empty() ? std::numeric_limits<s32>::max() : w.strands.back().at;
        while (s.at < meeting && s.mask && left-- > 0) {
            const Instruction &x = code[s.at++];
            w.mask = s.mask;
            if (x.guard >= 0) w.mask &= x.negated ? ~w.lanes_where(x.guard) : w.lanes_where(x.guard);
            const u32 others = s.mask & ~w.mask;
            if (!w.mask) continue;
            if (x.op == BRANCH && !others) {
                s.at = s32(x.value);
            } else if (x.op == BRANCH) {
                w.strands.push_back({s32(x.value), w.mask});
                s.mask = others;
                break;
            } else if (x.op == RETURN) {
                s.mask = others;
            } else if (x.op == BARRIER) {
                arrive(w, x, w.strands.empty());
                w.strands.push_back(s);
                return;
            } else {
                if (l.options.check && x.op != product) check_registers(w, x);
                table[x.op].run(w, x);
            }
        }
        if (s.mask) w.strands.push_back(s);
        if (left <= 0) return;
    }
    if (!w.products.groups.empty() || !w.products.issued.empty())
        l.report("unfinished", 0, "a warp ends before its products");
    w.ended = true;
}

// Lets the warps go on once all have arrived at the barrier or ended.
static void release(Block &b) {
    if (std::any_of(b.warps.begin(), b.warps.end(), [](Warp &w) { return !w.ended && !w.waits; })) return;
    u32 fenced[MOST_WARPS] = {};
    for (Warp &w : b.warps)
        for (int i = 0; i < MOST_WARPS; i++) fenced[i] = std::max(fenced[i], w.fenced[i]);
    for (Warp &w : b.warps) {
        memcpy(w.fenced, fenced, sizeof fenced);
        w.waits = false;
    }
    b.began = ++b.warps[0].launch->now;
}

static void start(Launch &l, Block &b, const u64 *params, s32 count) {
    b.warps.resize(l.warps);
    b.shared.resize(l.shared_bytes);
    if (l.options.check) b.cells.resize(l.shared_bytes / 2);
    const Program &p = *l.program;
    for (s32 id = 0; id < l.warps; id++) {
        Warp &w = b.warps[id];
        w.launch = &l, w.block = &b, w.id = id;
        w.registers.assign(LANES * static_cast<size_t>(p.slots), 0xdeadbeefu);
        if (l.options.check) w.pending.resize(p.slots), w.dirty.resize(p.slots);
        for (s32 c = 0; c < s32(p.constants.size()); c++) {
            const Constant &x = p.constants[c];
            const u64 value = c < count ? params[c] : x.value;
            if (x.wide)
                std::fill_n(w.slot<u64>(x.slot), LANES, value);
            else
                std::fill_n(w.slot<u32>(x.slot), LANES, u32(value));
        }
    }
}

static void run_block(Launch &l, Block &b, std::vector<s32> &order) {
    b.number = b.index[0] + l.grid[0] * (b.index[1] + l.grid[1] * b.index[2]);
    b.born = b.began = ++l.now;
    std::fill(b.shared.begin(), b.shared.end(), 0xff);
    for (Warp &w : b.warps) {
        w.strands = {{0, ALL}};
        w.ended = w.waits = w.open = false;
        w.copies = {}, w.products = {};
        std::fill(w.pending.begin(), w.pending.end(), 0), std::fill(w.dirty.begin(), w.dirty.end(), 0);
        std::fill(w.fenced, w.fenced + MOST_WARPS, 0);
        for (u32 i = 0; i < LANES; i++) {  // the special registers, as decode.py's SPECIAL
            const u32 values[] = {LANES * w.id + i, 0, 0, b.index[0], b.index[1], b.index[2], u32(LANES * l.warps), 1, 1,
                                  l.grid[0], l.grid[1], l.grid[2], i, u32(w.id)};
            for (int k = 0; k < 14; k++) w.slot<u32>(k)[i] = values[k];
        }
    }
    while (!std::all_of(b.warps.begin(), b.warps.end(), [](Warp &w) { return w.ended; })) {
        if (l.options.order == 2) std::shuffle(order.begin(), order.end(), l.random);
        for (s32 i : order)
            if (Warp &w = b.warps[i]; !w.ended && !w.waits) run(w);
        release(b);
    }
}

extern "C" {

// Returns the number of an operation, or -1, and the bytes of its result and arguments, a digit each.
int emulator_operation(const char *name, char *sizes, int length) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) return -1;
    snprintf(sizes, length, "%s", table[found->second].sizes.c_str());
    return found->second;
}

// Keeps a program for launches; it is never freed, as Triton keeps kernels.
Program *emulator_program(const Instruction *code, const s32 *pool, const Constant *constants, s32 instructions,
                          s32 pooled, s32 count, s32 slots) {
    return new Program{{code, code + instructions}, {pool, pool + pooled}, {constants, constants + count}, slots};
}

// Runs a grid. Reports, a line "kind, PTX line, text, times" each, go to `text`. params: the first constants.
void emulator_launch(const Program *program, const u32 *grid, s32 warps, u32 shared, const u64 *params, s32 count,
                     const u64 *ranges, s32 tensors, const Options *options, char *text, s32 length) {
    Launch l{};
    l.program = program, l.options = *options, l.warps = warps;
    l.shared_bytes = (shared + 15) / 16 * 16;
    std::copy(grid, grid + 3, l.grid);
    for (s32 i = 0; i < tensors; i++) {
        l.ranges.push_back({ranges[2 * i], ranges[2 * i + 1]});
        if (options->check) l.cells.emplace_back((ranges[2 * i + 1] - ranges[2 * i] + 1) / 2);
    }
    std::vector<s32> order(warps);
    for (s32 i = 0; i < warps; i++) order[i] = options->order == 1 ? warps - 1 - i : i;
    Block b{};
    start(l, b, params, count);
    for (b.index[2] = 0; b.index[2] < grid[2]; b.index[2]++)
        for (b.index[1] = 0; b.index[1] < grid[1]; b.index[1]++)
            for (b.index[0] = 0; b.index[0] < grid[0]; b.index[0]++) run_block(l, b, order);
    std::string all;
    for (auto &[key, entry] : l.reports) all += entry.text + "\t" + std::to_string(entry.count) + "\n";
    snprintf(text, length, "%s", all.c_str());
}
}
