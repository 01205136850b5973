// Times a kernel's instructions in a given order, as packages/nki-simulator/src/nki_simulator/cost.py does, and finds what they
// hold of SBUF and PSUM at most.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {
const int64_t BANK = 2048;                       // bytes of PSUM in a partition
const int QUEUES = 10;                           // as tools/instruction_times.py numbers them
const int READS = 1, WRITES = 2, STORES = 4;     // how a tensor is used: stores to HBM wait for nothing

struct Units {  // what a kernel issues, as places [first, stop) among the recorded instructions
    const int *of_entry;  // [entries][chunks][2]
    const int *of_step;   // of the convolution: [3][steps][2]
    int steps;
    std::vector<int> sequence;

    void issue(const int *unit) {
        for (int i = unit[0]; i < unit[1]; i++) sequence.push_back(i);
    }
};

// As cells.plan_steps and cells.list_layer_work: a layer's convolution is spread over the turns before the
// one that needs it.
struct Convolution {
    std::vector<int> turns;  // by cell: the first turn that loads of it
    int done[3] = {0, 0, 0}, step = 0, stop = 0;

    void begin(int turn, Units &units) {
        int last = turns.size() + 2, first = stop, count = 0;
        step = first;
        for (int c = 0; c < int(turns.size()); c++)
            if (turns[c] <= turn) step = std::max(step, c + 3);
        for (int i = step; i < last; i++) {
            int left = turns[std::max(0, i - 2)] - turn;
            count = std::max(count, (i - step + left) / std::max(1, left));
        }
        stop = std::min(step + count, last);
        done[0] = done[1] = done[2] = first;
        for (int i = first; i < step; i++) advance_all(i + 1, units);
    }

    void advance(int to, int kind, Units &units) {
        for (; done[kind] < to; done[kind]++)
            units.issue(units.of_step + 2 * (kind * units.steps + done[kind]));
    }

    void advance_all(int to, Units &units) {
        for (int kind = 0; kind < 3; kind++) advance(to, kind, units);
    }
};

// As _pack_banks in packages/nki-simulator/src/nki_simulator/core/machine.py.
struct Banks {
    struct Tile {
        int64_t begin, end;
        int storage;
    };
    std::vector<std::vector<Tile>> banks;

    void place(int storage, int64_t size) {
        for (int64_t left = size; size > BANK && left > 0; left -= BANK) add_whole(storage);
        if (size > BANK) return;
        for (auto &bank : banks) {
            int64_t at = 0;
            auto next = bank.begin();
            for (; next != bank.end() && next->begin - at < size; ++next) at = next->end;
            if (next == bank.end() && BANK - at < size) continue;
            bank.insert(next, {at, at + size, storage});
            return;
        }
        banks.push_back({{0, size, storage}});
    }

    void add_whole(int storage) {
        for (auto &bank : banks)
            if (bank.empty()) {
                bank.push_back({0, BANK, storage});
                return;
            }
        banks.push_back({{0, BANK, storage}});
    }

    void remove(int storage) {
        for (auto &bank : banks)
            bank.erase(std::remove_if(bank.begin(), bank.end(), [&](const Tile &own) { return own.storage == storage; }),
                       bank.end());
    }

    int64_t count() const {
        return std::count_if(banks.begin(), banks.end(), [](const auto &bank) { return !bank.empty(); });
    }
};
}  // namespace

// An entry is (its number, turns late, stage of the convolution or -1, share, shares).
extern "C" double time_order(
    int entries, const int *entry, int64_t *peaks, int chunks, const int *of_entry, const int *of_step, int steps,
    int cells, const int *cell_chunk, const int *cell_load, int first, int rest, int n, const int *queue,
    const int *ports, const double *busy, const double *latency, const uint64_t *tables, double load_us,
    int dma_from, const int *needs_from, const int *needs, const char *waits, const int *uses_from, const int *uses,
    const double *wait, const int *tiles_from, const int *tiles, int storages, const int64_t *sbuf,
    const int64_t *psum) {
    Units units{of_entry, of_step, steps, {}};
    units.sequence.reserve(n);
    Convolution convolution;
    int turns = 0;
    std::vector<int> late_of(entries);
    for (int e = 0; e < entries; e++) {
        late_of[entry[5 * e]] = entry[5 * e + 1];
        turns = std::max(turns, chunks + entry[5 * e + 1]);
    }
    for (int c = 0; c < cells; c++) convolution.turns.push_back(cell_chunk[c] + late_of[cell_load[c]]);
    for (int i = 0; i < first; i++) units.sequence.push_back(i);
    for (int turn = 0; turn < turns; turn++) {
        if (cells) convolution.begin(turn, units);
        for (const int *own = entry; own != entry + 5 * entries; own += 5) {
            int chunk = turn - own[1], kind = own[2];
            if (kind >= 0) {  // a stage takes what the one before made a step earlier
                int due = convolution.step + (convolution.stop - convolution.step) * own[3] / own[4];
                if (kind > 0) due = std::min(due, convolution.done[kind - 1] + 1);
                convolution.advance(due, kind, units);
            } else if (chunk >= 0 && chunk < chunks) {
                units.issue(of_entry + 2 * (own[0] * chunks + chunk));
            }
        }
        if (cells) convolution.advance_all(convolution.stop, units);
    }
    for (int i = rest; i < n; i++) units.sequence.push_back(i);
    const std::vector<int> &order = units.sequence;
    if (int(order.size()) != n) return NAN;  // a unit is missing or twice

    std::vector<double> end(n, -1.0), free_at(16, 0.0);
    std::vector<std::pair<double, double>> transfers;
    uint64_t resident = 0;
    double total = 0.0;
    // of each tensor, by queue: the last instruction that wrote it and that read it; engines wait for tensors
    std::vector<int> wrote(storages * QUEUES, -1), read(storages * QUEUES, -1), place(n, -1);
    int known[QUEUES][QUEUES];  // up to which place a queue has waited for another one
    std::fill(&known[0][0], &known[0][0] + QUEUES * QUEUES, -1);
    for (int at = 0; at < n; at++) {
        int i = order[at];
        if (tables[i]) {
            resident &= tables[i];
            if (!resident) {
                resident = tables[i];
                free_at[queue[i]] += load_us;
            }
        }
        double start = free_at[queue[i]];
        for (int p = 0; p < 2; p++)
            if (ports[i] >> p & 1) start = std::max(start, free_at[14 + p]);
        for (int k = needs_from[i]; k < needs_from[i + 1]; k++) {
            int j = needs[k];
            if (end[j] >= 0) start = std::max(start, end[j] + (waits[k] ? latency[j] : 0.0));
        }
        bool others = false;
        int own = queue[i];
        place[i] = at;
        auto need = [&](int j, int q) {
            if (j < 0 || q == own) return;
            start = std::max(start, end[j] + latency[j]);
            if (place[j] > known[own][q]) {
                known[own][q] = place[j];
                others = true;
            }
        };
        for (int k = uses_from[i]; k < uses_from[i + 1]; k++) {
            int tensor = uses[k] / 8 * QUEUES, how = uses[k] % 8;
            for (int q = 0; q < QUEUES; q++) {
                if (how & (READS | WRITES)) need(wrote[tensor + q], q);
                if (how & WRITES) need(read[tensor + q], q);
            }
        }
        for (int k = uses_from[i]; k < uses_from[i + 1]; k++) {
            int tensor = uses[k] / 8 * QUEUES + own, how = uses[k] % 8;
            if (how & READS) read[tensor] = i;
            if (how & (WRITES | STORES)) wrote[tensor] = i;
        }
        double busy_i = busy[i] + (others ? wait[i] : 0.0);
        if (queue[i] >= dma_from) {  // the first gap that holds it
            std::pair<double, double> key(start, -1.0);
            auto gap = std::upper_bound(transfers.begin(), transfers.end(), key);
            if (gap != transfers.begin()) --gap;
            for (; gap != transfers.end() && gap->first < start + busy_i; ++gap)
                start = std::max(start, gap->second);
            std::pair<double, double> span(start, start + busy_i);
            transfers.insert(std::upper_bound(transfers.begin(), transfers.end(), span), span);
        }
        end[i] = start + busy_i;
        free_at[queue[i]] = end[i];
        for (int p = 0; p < 2; p++)
            if (ports[i] >> p & 1) free_at[14 + p] = end[i];
        total = std::max(total, end[i] + latency[i]);
    }
    if (!peaks) return total;

    std::vector<int> last(storages, -1);
    for (int at = 0; at < n; at++)
        for (int k = tiles_from[order[at]]; k < tiles_from[order[at] + 1]; k++) last[tiles[k]] = at;
    std::vector<char> live(storages, 0);
    int64_t in_sbuf = 0;
    Banks banks;
    peaks[0] = peaks[1] = 0;
    for (int at = 0; at < n; at++) {
        int i = order[at];
        for (int k = tiles_from[i]; k < tiles_from[i + 1]; k++)
            if (!live[tiles[k]]) {
                live[tiles[k]] = 1;
                in_sbuf += sbuf[tiles[k]];
                if (psum[tiles[k]]) banks.place(tiles[k], psum[tiles[k]]);
            }
        peaks[0] = std::max(peaks[0], in_sbuf);
        peaks[1] = std::max(peaks[1], banks.count());
        for (int k = tiles_from[i]; k < tiles_from[i + 1]; k++)
            if (last[tiles[k]] == at && live[tiles[k]] == 1) {
                live[tiles[k]] = 2;
                in_sbuf -= sbuf[tiles[k]];
                if (psum[tiles[k]]) banks.remove(tiles[k]);
            }
    }
    return total;
}
