// Runs the programs that one Hopper SM executes of a kernel, instruction by instruction, and prints JSON.
//
// Each warp issues in order. An instruction issues at the earliest cycle at which
//
//     its predecessor's stall count has passed,
//     every scoreboard of its wait mask has been released,
//     its quarter of the SM issues nothing else, and its unit is free.
//
// Quarters have pipes and tensor cores of their own; they share the pipe of shared memory, the port of L1, and
// the SM's part of the bandwidth of L2 and memory. machine.py has every number, simulate.py writes the input:
//
//     the number of settings, then per line a name and a value
//     the number of instructions, then per line the fields of struct Instruction

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include <vector>

using Time = double;
constexpr Time NEVER = std::numeric_limits<Time>::infinity();
constexpr int BOARDS = 6, QUARTERS = 4, PIPES = 7, CAUSES = 11;
enum Cause { ARITHMETIC, SHARED, LOADS, COPIES, SPECIAL, MATRIX, BARRIERS, CONSTANTS, READS, FENCES, BUSY };
enum Pipe { ALU, FMA, HEAVY, FP64, XU, UNIFORM, ADDRESS };
enum Kind {
    PLAIN, PIPE, SHARED_MEMORY, LOAD, STORE, COPY, COMMIT, AWAIT_COPIES, BARRIER, WGMMA, AWAIT_WGMMA, MMA, BRANCH, EXIT
};
const std::map<std::string, Kind> KINDS = {
    {"plain", PLAIN}, {"pipe", PIPE}, {"shared", SHARED_MEMORY}, {"load", LOAD}, {"store", STORE}, {"copy", COPY},
    {"commit", COMMIT}, {"await_copies", AWAIT_COPIES}, {"barrier", BARRIER}, {"wgmma", WGMMA},
    {"await_wgmma", AWAIT_WGMMA}, {"mma", MMA}, {"branch", BRANCH}, {"exit", EXIT}};

struct Instruction {
    Kind kind;
    int stall, write, read, wait;
    double interval, latency, reads, size, waves;
    int argument, cause, target, trips;
};

struct Board {
    Time free = 0;
    int cause = 0;
    void hold(Time until, int why) {
        if (until > free) free = until, cause = why;
    }
};

struct Warp {
    int program = 0, quarter = 0, at = 0;
    Time next = 0;      // when the last instruction's stall count has passed
    Time ready = 0;     // and the scoreboards are free
    int cause = 0;      // of the last scoreboard
    bool current = false, arrived = false, done = false;
    Board boards[BOARDS];
    Time copies = 0;               // when the last copy issued so far will be there
    std::vector<Time> commits;     // when each group of copies will be there
    Time products = 0;             // when the last matrix product issued so far will be there
    std::vector<Time> groups;      // and each group of them
    std::vector<int> turns;        // of each branch
};

struct Program {
    std::vector<int> warps;
    int left = 0, arrived = 0;
};

struct Machine {
    std::map<std::string, double> set;
    std::vector<Instruction> code;
    std::vector<Warp> warps;
    std::vector<Program> programs;
    std::vector<int> resident[QUARTERS];
    Time issue[QUARTERS] = {}, pipes[QUARTERS][PIPES] = {}, tensor[QUARTERS] = {};
    Time shared = 0, port = 0, memory = 0, end = 0;
    double tensor_busy = 0, shared_busy = 0, memory_busy = 0, issued = 0, waits[CAUSES] = {};
    int started = 0, finished = 0;

    double at(const char* name) const { return set.at(name); }

    void start(Time now) {
        int program = programs.size();
        programs.emplace_back();
        for (int i = 0; i < (int)at("warps"); i++) {
            int quarter = 0;
            for (int q = 1; q < QUARTERS; q++)
                if (resident[q].size() < resident[quarter].size()) quarter = q;
            Warp warp;
            warp.program = program;
            warp.quarter = quarter;
            warp.next = now + at("program_start") + at("stagger") * (program % 8);
            warp.turns.assign(code.size(), 0);
            resident[quarter].push_back(warps.size());
            programs[program].warps.push_back(warps.size());
            warps.push_back(std::move(warp));
        }
        programs[program].left = programs[program].warps.size();
        started++;
    }

    // Sets when the warp's next instruction may issue as far as its own scoreboards go, and what it waits for.
    void look(Warp& warp) {
        const Instruction& x = code[warp.at];
        warp.ready = warp.next;
        auto await = [&](Time time, int cause) {
            if (time > warp.ready) warp.ready = time, warp.cause = cause;
        };
        for (int i = 0; i < BOARDS; i++)
            if (x.wait >> i & 1) await(warp.boards[i].free, warp.boards[i].cause);
        if (x.kind == AWAIT_COPIES) {
            int open = x.argument & 255, board = x.argument >> 8;
            if (!open) await(warp.boards[board].free, warp.boards[board].cause);
            else if ((int)warp.commits.size() > open) await(warp.commits[warp.commits.size() - 1 - open], COPIES);
        }
        if (x.kind == AWAIT_WGMMA && (int)warp.groups.size() > x.argument)
            await(warp.groups[warp.groups.size() - 1 - x.argument], MATRIX);
        warp.current = true;
    }

    Time earliest(const Warp& warp) const {
        const Instruction& x = code[warp.at];
        int q = warp.quarter;
        Time time = std::max(warp.ready, issue[q]);
        switch (x.kind) {
            case PIPE:
                if (x.argument == FMA) return std::max(time, std::min(pipes[q][FMA], pipes[q][HEAVY]));
                return std::max(time, pipes[q][x.argument]);
            case SHARED_MEMORY: case LOAD: case STORE: case COPY:
                return std::max({time, pipes[q][ADDRESS], shared - at("shared_queue")});
            case WGMMA: return std::max(time, tensor[q] - at("wgmma_queue"));
            case MMA: return std::max(time, tensor[q]);
            default: return time;
        }
    }

    // Occupies the pipe of shared memory and returns when the access begins.
    Time pass(const Instruction& x, int quarter, Time now) {
        pipes[quarter][ADDRESS] = now + x.interval;
        Time begin = std::max(now, shared);
        shared = begin + x.waves;
        shared_busy += x.waves;
        return begin;
    }

    // Moves bytes over L1's port and the SM's part of the bandwidth; returns when the last has passed.
    Time move(const Instruction& x, Time begin, double rate) {
        port = std::max(begin, port) + x.size / at("l1_port");
        memory = std::max(memory, begin) + x.size / rate;
        memory_busy += x.size / rate;
        return std::max(port, memory - at("burst") / rate);
    }

    void issue_one(int id, Time now) {
        Warp& warp = warps[id];
        const Instruction& x = code[warp.at];
        int q = warp.quarter;
        if (warp.ready > warp.next) waits[warp.cause] += std::min(now, warp.ready) - warp.next;
        waits[BUSY] += std::max(0.0, now - std::max(warp.ready, warp.next));
        issue[q] = now + 1;
        issued++;
        warp.next = now + std::max(1, x.stall);
        warp.current = false;
        int next = warp.at + 1;
        auto result = [&](Time time, int cause) {
            if (x.write < BOARDS) warp.boards[x.write].hold(time, cause);
        };
        auto operands = [&](Time time, int cause) {
            if (x.read < BOARDS) warp.boards[x.read].hold(time, cause);
        };
        switch (x.kind) {
            case PIPE: {
                int pipe = x.argument;
                if (pipe == FMA && pipes[q][HEAVY] < pipes[q][FMA]) pipe = HEAVY;
                pipes[q][pipe] = now + x.interval;
                result(now + x.latency, x.cause);
                operands(now + x.reads, x.cause);
                break;
            }
            case SHARED_MEMORY: {
                Time begin = pass(x, q, now);
                result(begin + x.waves + x.latency, x.cause);
                operands(begin + x.waves + x.reads, READS);
                break;
            }
            case LOAD: case COPY: {
                Time begin = pass(x, q, now);
                Time there = move(x, begin, at("load_rate")) + at(x.argument ? "l2_latency" : "memory_latency");
                if (x.kind == LOAD) result(there, x.cause);
                else warp.copies = std::max(warp.copies, there);
                operands(begin + x.waves + x.reads, READS);
                break;
            }
            case STORE: {
                Time begin = pass(x, q, now);
                move(x, begin, at("store_rate"));
                Time behind = 2 * at("burst") / at("load_rate");
                if (memory - begin > behind) shared = std::max(shared, memory - behind);
                operands(begin + x.waves + x.reads, READS);
                break;
            }
            case COMMIT:
                warp.commits.push_back(std::max(now + at("commit"), warp.copies));
                result(warp.commits.back(), COPIES);
                break;
            case WGMMA:
                tensor[q] = std::max(now, tensor[q]) + x.interval;
                tensor_busy += x.interval;
                warp.products = std::max(warp.products, tensor[q] + at("wgmma_drain"));
                shared = std::max(shared, now) + x.waves;
                shared_busy += x.waves;
                if (x.argument) warp.groups.push_back(warp.products);
                operands(tensor[q] - x.interval + x.reads, MATRIX);
                break;
            case MMA:
                tensor[q] = std::max(now, tensor[q]) + x.interval;
                tensor_busy += x.interval;
                result(now + x.latency, MATRIX);
                break;
            case BRANCH:
                if (x.target < 0) break;
                if (x.target < warp.at) {
                    if (++warp.turns[warp.at] < x.trips) next = x.target;
                    else warp.turns[warp.at] = 0;
                } else if (x.argument) {
                    next = x.target;
                }
                if (next == x.target) warp.next = now + std::max<Time>(x.stall, at("branch"));
                break;
            case BARRIER:
                warp.arrived = true;
                programs[warp.program].arrived++;
                warp.at = next;
                release(warp.program, now);
                return;
            case EXIT: leave(id, now); return;
            default:
                result(now + x.latency, x.cause);
                operands(now + x.reads, x.cause);
        }
        warp.at = next;
    }

    // Lets a program's warps go on from a barrier once all that still run have arrived; `now` is the last one's time.
    void release(int id, Time now) {
        Program& program = programs[id];
        if (!program.left || program.arrived < program.left) return;
        program.arrived = 0;
        for (int i : program.warps) {
            Warp& warp = warps[i];
            if (warp.done || !warp.arrived) continue;
            Time free = now + at("barrier");
            if (free > warp.next) waits[BARRIERS] += free - warp.next, warp.next = free;
            warp.arrived = warp.current = false;
        }
    }

    void leave(int id, Time now) {
        Warp& warp = warps[id];
        warp.done = true;
        auto& here = resident[warp.quarter];
        here.erase(std::remove(here.begin(), here.end(), id), here.end());
        int program = warp.program;
        if (--programs[program].left) return release(program, now);
        finished++;
        end = std::max(end, now);
        if (started < (int)at("programs")) start(now);
    }

    bool run() {
        while (finished < (int)at("programs")) {
            Time best = NEVER;
            int chosen = -1;
            for (auto& quarter : resident)
                for (int id : quarter) {
                    Warp& warp = warps[id];
                    if (warp.arrived) continue;
                    if (!warp.current) look(warp);
                    Time time = earliest(warp);
                    if (time < best - 1e-9) best = time, chosen = id;
                }
            if (chosen < 0) return false;
            issue_one(chosen, std::ceil(best - 1e-9));
        }
        end = std::max({end, port, memory});
        return true;
    }
};

int main() {
    Machine machine;
    int count;
    std::string name;
    std::cin >> count;
    for (int i = 0; i < count; i++) {
        double value;
        std::cin >> name >> value;
        machine.set[name] = value;
    }
    std::cin >> count;
    for (int i = 0; i < count; i++) {
        Instruction x;
        std::cin >> name >> x.stall >> x.write >> x.read >> x.wait >> x.interval >> x.latency >> x.reads >> x.size >>
            x.waves >> x.argument >> x.cause >> x.target >> x.trips;
        x.kind = KINDS.at(name);
        machine.code.push_back(x);
    }
    if (!std::cin) {
        std::cerr << "the input ended early\n";
        return 1;
    }
    machine.warps.reserve((size_t)(machine.at("programs") * machine.at("warps")));
    for (int i = 0; i < (int)machine.at("resident"); i++) machine.start(0);
    if (!machine.run()) {
        std::cerr << "no warp can issue: a barrier that some warps never reach?\n";
        return 1;
    }
    double end = machine.end;
    std::printf("{\"cycles\": %.0f, \"issue\": %.4f, \"tensor\": %.4f, ", end, machine.issued / QUARTERS / end,
                machine.tensor_busy / QUARTERS / end);
    std::printf("\"shared\": %.4f, \"memory\": %.4f, \"waits\": [", machine.shared_busy / end,
                machine.memory_busy / end);
    for (int i = 0; i < CAUSES; i++) std::printf("%s%.0f", i ? ", " : "", machine.waits[i]);
    std::printf("]}\n");
}
