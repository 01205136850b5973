// Shared memory and tensors: loads, stores, cp.async, and who may touch what when.
//
// Only a barrier of the whole block orders its warps. So two warps race where they touch the same bytes between
// the same two barriers and one of them writes another value than what is there. Nothing orders two blocks.
#pragma once
#include "machine.h"

// Notes an access of two bytes, and returns a warp of the same block that it races with, or -1. `same`: writes what
// is there already.
static s32 touch(Warp &w, Cell &c, bool write, bool same) {
    const u32 me = 1u << w.id, began = w.block->began;
    const u32 writers = c.written >= began ? c.writers : 0, readers = c.read >= began ? c.readers : 0;
    u32 others = 0;
    if (!write) {
        others = writers & me ? 0 : writers;
        c.readers = readers | me;
        c.read = w.launch->now;
    } else {
        if (!same) others = (writers | readers) & ~me;
        c.writers = same ? writers | me : me;
        c.readers = 0;
        c.written = w.launch->now;
    }
    return others ? __builtin_ctz(others) : -1;
}

// Whether the tensor core of warp w sees what was written by other instructions, for which a fence is needed.
static bool is_fenced(const Warp &w, const Cell &c) {
    for (u32 set = c.writers; set; set &= set - 1)
        if (w.fenced[__builtin_ctz(set)] >= c.written) return true;
    return false;
}

enum class Access { read, write, product };  // product: of a tensor core, which reads

// Notes an access of shared memory. data: what is written; nullptr: not known yet, or nothing is written.
static void note_shared(Warp &w, u32 offset, u32 bytes, Access access, s32 line, const u8 *data = nullptr) {
    Launch &l = *w.launch;
    Block &b = *w.block;
    const bool write = access == Access::write;
    const char *does = write ? "writes" : "reads";
    for (u32 k = offset / 2; k <= (offset + bytes - 1) / 2; k++) {
        Cell &c = b.cells[k];
        if (c.written < b.born) c.writers = 0, c.writing = -1;  // it is of a block before
        if (c.writing >= 0)
            l.report("race with cp.async", line, "shared byte %u: warp %d %s it while a copy of warp %d is under way",
                     2 * k, w.id, does, c.writing);
        if (!write && !c.writers)
            l.report("unwritten shared memory", line, "byte %u is read by warp %d", 2 * k, w.id);
        if (access == Access::product && c.writers && !is_fenced(w, c))
            l.report("missing proxy fence", line, "shared byte %u, written by warp %d, is read by wgmma of warp %d",
                     2 * k, __builtin_ctz(c.writers), w.id);
        const bool same = data && c.writers && !memcmp(&b.shared[2 * k], data + (2 * k - offset), bytes < 2 ? 1 : 2);
        const s32 other = touch(w, c, write, same);
        if (other >= 0)
            l.report("race in shared memory", line, "byte %u: warp %d %s it, warp %d too, and no barrier is between",
                     2 * k, w.id, does, other);
    }
}

// Notes an access of the tensor that is the launch's pointer number `range`.
static void note_tensor(Warp &w, s32 range, u64 address, u32 bytes, s32 line, const u8 *data) {
    Launch &l = *w.launch;
    const u64 start = address - l.ranges[range].begin;
    const s32 block = w.block->number;
    const bool write = data != nullptr;
    const char *does = write ? "writes" : "reads";
    for (u64 k = start / 2; k <= (start + bytes - 1) / 2; k++) {
        Cell &c = l.cells[range][k];
        const u8 *there = reinterpret_cast<const u8 *>(l.ranges[range].begin + 2 * k);
        const bool same = write && c.writing != -1 && !memcmp(there, data + (2 * k - start), bytes < 2 ? 1 : 2);
        auto foreign = [&](s32 number) { return number != -1 && number != block; };
        if (foreign(c.writing) || (write && !same && foreign(c.reading)))
            l.report("race of programs", line, "tensor %d, byte %llu: program %d %s it, %d too", range, 2ull * k, block,
                     does, foreign(c.writing) ? c.writing : c.reading);
        if (const s32 other = touch(w, c, write, same); other >= 0)
            l.report("race in a tensor", line, "tensor %d, byte %llu: warp %d %s it, warp %d too, no barrier between",
                     range, 2ull * k, w.id, does, other);
        if (write)
            c.writing = block;
        else
            c.reading = foreign(c.reading) ? -2 : block;
    }
}

static s32 range_of(Launch &l, u64 address, u32 bytes) {
    auto holds = [&](s32 i) { return address >= l.ranges[i].begin && address + bytes <= l.ranges[i].end; };
    const s32 count = s32(l.ranges.size());
    if (l.last_range < count && holds(l.last_range)) return l.last_range;
    for (s32 i = 0; i < count; i++)
        if (holds(i)) return l.last_range = i;
    return -1;
}

// Returns where bytes of a tensor lie, or nullptr after a report. data: what will be written; nullptr: they are read.
static u8 *tensor_bytes(Warp &w, u64 address, u32 bytes, const u8 *data, s32 line) {
    Launch &l = *w.launch;
    const char *does = data ? "writes" : "reads";
    if (address % bytes) {
        l.report("misaligned", line, "%s %u bytes of a tensor at %llx", does, bytes, 0ull + address);
        return nullptr;
    }
    const s32 range = range_of(l, address, bytes);
    if (range < 0) {
        auto distance = [&](const Range &r) { return address < r.begin ? r.begin - address : address - r.end; };
        const auto nearest = std::min_element(l.ranges.begin(), l.ranges.end(), [&](const Range &a, const Range &b) {
            return distance(a) < distance(b);
        });
        l.report("out of bounds", line, "%s %u bytes, %llu bytes %s tensor %td", does, bytes, 0ull + distance(*nearest),
                 address < nearest->begin ? "before" : "past the end of", nearest - l.ranges.begin());
        return nullptr;
    }
    if (l.options.check) note_tensor(w, range, address, bytes, line, data);
    return reinterpret_cast<u8 *>(address);
}

// Returns whether bytes lie in shared memory, at a multiple of their number; else reports it.
static bool lies_in_shared(Warp &w, u32 address, u32 bytes, s32 line) {
    Launch &l = *w.launch;
    if (address % bytes) {
        l.report("misaligned", line, "%u bytes of shared memory at %u", bytes, address);
        return false;
    }
    if (address < WINDOW || address - WINDOW + bytes > l.shared_bytes) {
        l.report("out of bounds", line, "%u bytes at %d of %u of shared memory", bytes,
                 s32(address - WINDOW), l.shared_bytes);
        return false;
    }
    return true;
}

// As tensor_bytes, of shared memory.
static u8 *shared_bytes(Warp &w, u32 address, u32 bytes, const u8 *data, s32 line) {
    if (!lies_in_shared(w, address, bytes, line)) return nullptr;
    const u32 offset = address - WINDOW;
    if (w.launch->options.check)
        note_shared(w, offset, bytes, data ? Access::write : Access::read, line, data);
    return &w.block->shared[offset];
}

// Loads and stores: args[0] the address, [1] bytes of an element; list: the registers; value: added to the address.
template <bool SHARED> static u8 *find(Warp &w, const Instruction &x, int lane, const u8 *data) {
    const u32 bytes = x.args[1] * x.count;
    if (SHARED)
        return shared_bytes(w, w.slot<u32>(x.args[0])[lane] + u32(x.value), bytes, data, x.line);
    return tensor_bytes(w, w.slot<u64>(x.args[0])[lane] + x.value, bytes, data, x.line);
}

static void *place_of_lane(Warp &w, s32 slot, u32 bytes, int lane) {
    return bytes == 8 ? static_cast<void *>(w.slot<u64>(slot) + lane) : w.slot<u32>(slot) + lane;
}

template <bool SHARED, bool STORES> static void access(Warp &w, const Instruction &x) {
    const s32 *list = w.launch->program->pool.data() + x.list;
    const u32 bytes = x.args[1];
    u8 data[32];
    for (int i = 0; i < LANES; i++) {
        if (!w.has(i)) continue;
        for (int j = 0; STORES && j < x.count; j++) memcpy(data + j * bytes, place_of_lane(w, list[j], bytes, i), bytes);
        u8 *there = find<SHARED>(w, x, i, STORES ? data : nullptr);
        if (STORES && there) memcpy(there, data, bytes * x.count);
        for (int j = 0; !STORES && j < x.count; j++) {
            u64 value = there ? 0 : ~0ull;
            if (there) memcpy(&value, there + j * bytes, bytes);
            if (list[j] >= 0) memcpy(place_of_lane(w, list[j], bytes, i), &value, std::max(bytes, 4u));
        }
    }
}

// ---- cp.async

static void mark_copying(Warp &w, const Copy &c, s32 warp) {
    for (u32 k = (c.to - WINDOW) / 2; k < (c.to - WINDOW + c.bytes) / 2; k++) w.block->cells[k].writing = warp;
}

static void move(Warp &w, const Copy &c) {
    u8 *to = &w.block->shared[c.to - WINDOW];
    memset(to, c.zeros ? 0 : 0xff, c.bytes);
    if (c.zeros) return;
    if (const u8 *from = tensor_bytes(w, c.from, c.bytes, nullptr, c.line)) memcpy(to, from, c.bytes);
}

// args[0] to, [1] from, [2] bytes that are read, or none; [3], [4] are added to the addresses; value: bytes. Nobody
// may look at the place until the copy is waited for, and the source must stay as it is.
static void cp_async(Warp &w, const Instruction &x) {
    Launch &l = *w.launch;
    for (int i = 0; i < LANES; i++) {
        if (!w.has(i)) continue;
        const u32 bytes = u32(x.value), given = x.args[2] < 0 ? bytes : w.slot<u32>(x.args[2])[i];
        if (given && given != bytes) l.report("unsupported", x.line, "a copy of %u of %u bytes", given, bytes);
        const u64 from = w.slot<u64>(x.args[1])[i] + x.args[4];
        const Copy c = {w.slot<u32>(x.args[0])[i] + x.args[3], bytes, from, !given, x.line};
        if (!lies_in_shared(w, c.to, bytes, x.line)) continue;
        if (l.options.check) {
            note_shared(w, c.to - WINDOW, bytes, Access::write, x.line);
            mark_copying(w, c, w.id);
            if (given && l.options.late_copies) tensor_bytes(w, c.from, bytes, nullptr, x.line);
        }
        if (!l.options.late_copies) move(w, c);
        w.copies.issued.push_back(c);
    }
}

static void cp_async_commit(Warp &w, const Instruction &) { w.copies.commit(); }

// value: groups that may stay under way; -1: none, and what is not committed either
static void cp_async_wait(Warp &w, const Instruction &x) {
    if (x.value < 0) w.copies.commit();
    w.copies.wait(std::max<s64>(x.value, 0), [&](const Copy &c) {
        if (w.launch->options.check) {
            mark_copying(w, c, -1);
            note_shared(w, c.to - WINDOW, c.bytes, Access::write, c.line);
        }
        if (w.launch->options.late_copies) move(w, c);
    });
}
