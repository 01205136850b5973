// What the emulator's files share: instructions, warps, blocks, launches and their reports.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

constexpr int LANES = 32, MOST_WARPS = 32;
constexpr u32 ALL = 0xffffffffu;  // every lane
constexpr u32 WINDOW = 1024;      // the address of a block's first byte of shared memory, as on Hopper

// One decoded instruction, as decode.py's INSTRUCTION. Registers are numbers of slots; -1 stands for none.
struct Instruction {
    s32 op, line;
    s32 guard, negated;  // the predicate that lanes need
    s32 args[8];         // what an operation needs, see there
    s32 list, count;     // registers, in Program::pool
    s32 writes, copies;  // the first of them are written, the others read; copies: it is a mov
    s64 value;
};

struct Constant {
    u64 value;
    s32 slot, wide;
};
struct Program {
    std::vector<Instruction> code;
    std::vector<s32> pool;
    std::vector<Constant> constants;
    s32 slots;
};

struct Options {
    s32 check;          // looks for races and missing fences
    s32 late_copies;    // cp.async copies when it is waited for, else when it is issued
    s32 late_products;  // wgmma multiplies when it is waited for, else when it is issued
    s32 order;          // of warps: 0 ascending, 1 descending, 2 shuffled
    s32 quantum;        // instructions before a warp yields; 0: until it waits
};

// What two bytes of shared memory, or of a tensor, remember. Times are counted by Launch::now.
struct Cell {
    u32 written = 0, read = 0;     // when last; 0: never
    u32 writers = 0, readers = 0;  // warps, a bit each; several writers wrote the same value
    s32 writing = -1, reading = -1;  // a tensor's blocks (-2: several); shared memory: the warp whose copy runs
};

struct Copy {
    u32 to, bytes;
    u64 from;
    bool zeros;  // nothing is read
    s32 line;
};

struct Product {
    const Instruction *x;
    u64 descriptors[2];
    bool adds;
    u32 issued;  // when
};

// Asynchronous work of a warp: issued, then committed in groups, which are waited for in their order.
template <class T> struct Queue {
    std::vector<T> issued;
    std::deque<std::vector<T>> groups;
    void commit() {
        groups.push_back(std::move(issued));
        issued.clear();
    }
    template <class F> void wait(s64 left, F finish) {
        for (; s64(groups.size()) > left; groups.pop_front())
            for (const T &work : groups.front()) finish(work);
    }
};

// Lanes that stand at the same instruction.
struct Strand {
    s32 at;
    u32 mask;
};

struct Launch;
struct Block;

struct Warp {
    Launch *launch;
    Block *block;
    s32 id;
    u32 mask;                     // the lanes that the current instruction is for
    std::vector<u32> registers;   // a slot has 32 words; registers of 64 bits have two slots
    std::vector<Strand> strands;  // the last one runs
    bool ended, waits, open;      // waits: at a barrier; open: wgmma.fence was, the group of products is not closed
    Queue<Copy> copies;
    Queue<Product> products;
    std::vector<u8> pending, dirty;  // registers that products will write; those written since wgmma.fence
    u32 fenced[MOST_WARPS];  // until when the writes of each warp are known to this one's tensor core

    template <class T> T *slot(s32 number) {
        return reinterpret_cast<T *>(registers.data() + LANES * static_cast<size_t>(number));
    }
    u32 lanes_where(s32 predicate) {
        const s32 *p = slot<s32>(predicate);
        u32 bits = 0;
        for (int i = 0; i < LANES; i++) bits |= u32(p[i] & 1) << i;
        return bits;
    }
    bool has(int lane) const { return mask >> lane & 1; }
};

struct Block {
    u32 index[3];
    s32 number;
    u32 born, began;  // when the block began, and what lies between two barriers
    std::vector<u8> shared;
    std::vector<Cell> cells;
    std::vector<Warp> warps;
};

struct Report {
    std::string text;
    s64 count = 0;
};
struct Range {
    u64 begin, end;
};

struct Launch {
    const Program *program;
    Options options;
    u32 grid[3], shared_bytes;
    s32 warps;
    std::vector<Range> ranges;             // of the tensors
    std::vector<std::vector<Cell>> cells;  // of each
    std::map<std::string, Report> reports;
    u32 now = 1;
    std::minstd_rand random;
    s32 last_range = 0;

    // Reports a kind of fault once for each line, and counts it.
    __attribute__((format(printf, 4, 5))) void report(const char *kind, s32 line, const char *format, ...) {
        Report &entry = reports[std::string(kind) + "@" + std::to_string(line)];
        if (entry.count++) return;
        char text[400];
        va_list values;
        va_start(values, format);
        vsnprintf(text, sizeof text, format, values);
        va_end(values);
        entry.text = std::string(kind) + "\t" + std::to_string(line) + "\t" + text;
    }
};
