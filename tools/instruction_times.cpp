// Times a kernel's instructions in a given order, as nki_kernels/simulator/cost.py does, and finds what they
// hold of SBUF and PSUM at most.
#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" double time_order(
    int n, const int *order, const int *queue, const int *ports, const double *busy, const double *latency,
    const uint64_t *tables, double load_us, int dma_from, const int *needs_from, const int *needs,
    const char *waits, const int *tiles_from, const int *tiles, int storages, const int64_t *sbuf,
    const int64_t *psum, int64_t *peaks) {
    std::vector<double> end(n, -1.0), free_at(16, 0.0);
    std::vector<std::pair<double, double>> transfers;
    uint64_t resident = 0;
    double total = 0.0;
    std::vector<int> last(storages, -1);
    for (int at = 0; at < n; at++) {
        int i = order[at];
        for (int k = tiles_from[i]; k < tiles_from[i + 1]; k++) last[tiles[k]] = at;
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
        if (queue[i] >= dma_from) {  // the first gap that holds it
            std::pair<double, double> key(start, -1.0);
            auto gap = std::upper_bound(transfers.begin(), transfers.end(), key);
            if (gap != transfers.begin()) --gap;
            for (; gap != transfers.end() && gap->first < start + busy[i]; ++gap)
                start = std::max(start, gap->second);
            std::pair<double, double> own(start, start + busy[i]);
            transfers.insert(std::upper_bound(transfers.begin(), transfers.end(), own), own);
        }
        end[i] = start + busy[i];
        free_at[queue[i]] = end[i];
        for (int p = 0; p < 2; p++)
            if (ports[i] >> p & 1) free_at[14 + p] = end[i];
        total = std::max(total, end[i] + latency[i]);
    }
    std::vector<char> live(storages, 0);
    int64_t in_sbuf = 0, in_psum = 0;
    peaks[0] = peaks[1] = 0;
    for (int at = 0; at < n; at++) {
        int i = order[at];
        for (int k = tiles_from[i]; k < tiles_from[i + 1]; k++)
            if (!live[tiles[k]]) {
                live[tiles[k]] = 1;
                in_sbuf += sbuf[tiles[k]];
                in_psum += psum[tiles[k]];
            }
        peaks[0] = std::max(peaks[0], in_sbuf);
        peaks[1] = std::max(peaks[1], in_psum);
        for (int k = tiles_from[i]; k < tiles_from[i + 1]; k++)
            if (last[tiles[k]] == at && live[tiles[k]] == 1) {
                live[tiles[k]] = 2;
                in_sbuf -= sbuf[tiles[k]];
                in_psum -= psum[tiles[k]];
            }
    }
    return total;
}
