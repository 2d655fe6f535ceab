// Notify: every rank tells all others how many tokens it has for each rank. Behind slots.cuh.

constexpr u32 MAX_LOCAL = 1024;
constexpr u32 HEADER = 3 + WORLD; // words before the experts': tokens, room, most, tokens for each rank

// One block. It numbers this rank's tokens for each rank, exchanges the counts, and computes where the rows of each rank begin.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
notify(const __grid_constant__ arguments a, const __grid_constant__ notify_call k) {
    __shared__ u32 said[WORLD][HEADER];
    __shared__ u32 chosen[MAX_LOCAL];
    __shared__ u32 of_warp[THREADS / 32][WORLD];
    __shared__ u32 totals[WORLD];
    begin_kernel<AT_END>(a);
    const block_end end(a);
    const uint4 control_words = load_control(a);
    // A warp has tokens that follow each other. It counts them, and when the counts are on their way to the peers, it numbers them.
    const u32 lane = lane_id(), warp = threadIdx.x / 32, share = (k.tokens + THREADS - 1) / THREADS * 32;
    const u32 begin_of_warp = min(warp * share, k.tokens), end_of_warp = min(begin_of_warp + share, k.tokens);
    u32 number[WORLD] = {};
#pragma unroll 4
    for (u32 token = begin_of_warp + lane; token < end_of_warp; token += 32)
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) number[rank] += __ldg(k.in_rank + (u64)token * WORLD + rank) != 0;
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u32 count = __reduce_add_sync(WHOLE_WARP, number[rank]);
        if (lane == 0) of_warp[warp][rank] = count;
    }
    __syncthreads();
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u32 count = lane < THREADS / 32 ? of_warp[lane][rank] : 0;
        number[rank] = __reduce_add_sync(WHOLE_WARP, lane < warp ? count : 0);
        const u32 total = __reduce_add_sync(WHOLE_WARP, count);
        if (threadIdx.x == 0) totals[rank] = total;
    }
    __syncthreads(); // the totals are there

    // No word is EMPTY: none has its highest bit.
    const u32 vectors = (HEADER + k.local + 3) / 4, own_most = k.own_most == nullptr ? 0 : *k.own_most;
    const auto word = [&](u32 to, u32 index) {
        if (index == 0) return k.tokens;
        if (index == 1) return k.room;
        if (index == 2) return own_most;
        if (index < HEADER) return totals[index - 3];
        return index < HEADER + k.local ? k.per_expert[to * k.local + index - HEADER] & ~(1u << 31) : 0;
    };
    const turn t = begin(a, control_words);
    for (u32 peer = 0; peer < PEERS && !t.has_failed(); ++peer) {
        const u32 to = rank_of(a, peer);
        for (u32 i = threadIdx.x; i < vectors; i += THREADS)
            store16_volatile(a.peer[peer] + lane_at(a, t.slot, a.rank) + i * 16,
                             make_uint4(word(to, i * 4), word(to, i * 4 + 1), word(to, i * 4 + 2), word(to, i * 4 + 3)));
    }
    if (!advance(a, t, vectors, 0)) return;
#pragma unroll 4
    for (u32 first = begin_of_warp; first < end_of_warp; first += 32) {
        const u32 token = first + lane;
        const bool is_token = token < end_of_warp;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 goes = __ballot_sync(WHOLE_WARP, is_token && __ldg(k.in_rank + (u64)token * WORLD + rank) != 0);
            const u32 its_number = number[rank] + __popc(goes & ((1u << lane) - 1));
            if (is_token) k.heads[(u64)token * WORLD + rank] = goes >> lane & 1 ? (i32)its_number : -1;
            number[rank] += __popc(goes);
        }
    }
    const auto hear = [&](u32 from, u32 index, u32 value) {
        if (index < HEADER) said[from][index] = value;
        else if (index < HEADER + k.local) {
            chosen[index - HEADER] = value + (from == a.rank ? 0 : chosen[index - HEADER]);
            if (k.chosen_by != nullptr) k.chosen_by[from * k.local + index - HEADER] = value;
        }
    };
    for (u32 i = threadIdx.x; i < vectors * 4; i += THREADS) hear(a.rank, i, word(a.rank, i));
    __syncthreads();
    reader r(a, t);
    bool came = true;
    for (u32 peer = 0; peer < PEERS; ++peer) {
        const u32 from = rank_of(a, peer);
        for (u32 i = threadIdx.x; came && is_warp_before(i, vectors); i += THREADS) {
            uint4 got[1];
            came = collect_from(r, from, from, i, THREADS, vectors, got);
            if (!came || i >= vectors) continue;
            // Words of an index are this thread's, whoever they come from.
            hear(from, i * 4, got[0].x);
            hear(from, i * 4 + 1, got[0].y);
            hear(from, i * 4 + 2, got[0].z);
            hear(from, i * 4 + 3, got[0].w);
        }
    }
    // Counts of a peer that called something else may be complete as well: the host must not hear of them before the tags are compared.
    if (!__syncthreads_and(came && r.finish())) return;
    for (u32 i = threadIdx.x; i < WORLD * WORLD; i += THREADS) {
        const u32 from = i / WORLD, to = i % WORLD, room = said[to][1];
        u32 start = 0;
        for (u32 before = 0; before < from; ++before) start += said[before][3 + to];
        const u32 end = start + said[from][3 + to];
        k.prefix[i] = end;
        k.counts[i] = min(end, room) - min(start, room);
        if (from == a.rank) k.routed[to] = end - start;
        if (to != a.rank) continue;
        k.starts[from] = min(start, room);
        if (from == WORLD - 1) *k.overflow = end > room;
    }
    for (u32 i = threadIdx.x; i < k.local; i += THREADS) k.chosen[i] = chosen[i];
    if (k.most != nullptr && threadIdx.x == 0) {
        u32 most = 0;
        for (u32 from = 0; from < WORLD; ++from) most = max(most, said[from][2]);
        *k.most = most;
    }
    if (k.result != nullptr) {
        u32* words = k.result + 1;
        for (u32 i = threadIdx.x; i < WORLD * HEADER; i += THREADS) words[i] = said[i / HEADER][i % HEADER];
        for (u32 i = threadIdx.x; i < k.local; i += THREADS) words[WORLD * HEADER + i] = chosen[i];
        __syncthreads();
        if (threadIdx.x == 0) st_release_sys(k.result, k.number);
    }
}
