// Dispatch to slots: moves tokens to the slots of their experts. Included behind choices.cuh.
//
// A token goes once to each rank of its experts, as a message at a place that its number gives, in chunks that a warp sends and a
// warp receives. No word of a chunk is EMPTY: codes of E4M3 have one NaN, scales are positive or one NaN, and rows of bf16 go
// masked. The rank that has received a chunk empties it.
//
// FORMAT, as Rust's SlotFormat: 1 bf16, 2 codes with f32 scales, 3 with powers of two, 4 with these packed.

constexpr bool IS_CODED = FORMAT != 1;
// Vectors of x that a warp takes at once: as codes half as many.
constexpr u32 CHUNK_VECTORS = IS_CODED ? 64 : ROW;
constexpr u32 CHUNK_BYTES = IS_CODED ? 33 * 16 : 32 * 16;

// A chunk of a row: what a lane has of it, and, of codes, the scale of one of the warp's four groups.
struct chunk {
    uint4 v;
    u32 scale; // of group lane % 4
};
// The same as it is in x.
struct source {
    uint4 v[IS_CODED ? 2 : 1];
};

DEVICE u32 chunks_of_row(const slot_call& k) { return (k.hidden / 8 + CHUNK_VECTORS - 1) / CHUNK_VECTORS; }

DEVICE source load_source(const slot_call& k, u32 token, u32 index) {
    source from;
    const u32 end = k.hidden / 8, count = IS_CODED ? 2 : 1, first = index * CHUNK_VECTORS + lane_id() * count;
#pragma unroll
    for (u32 n = 0; n < count; ++n) {
        const bool is_there = first + n < end && lane_id() * count < CHUNK_VECTORS;
        from.v[n] = is_there ? load16(k.x + ((u64)token * end + first + n) * 16) : make_uint4(0, 0, 0, 0);
    }
    return from;
}

// What a chunk's codes and scales are; a group is eight lanes'.
DEVICE chunk quantised(const source& from) {
    chunk made;
    wide_vec<bf16> x[2];
    float amax = 0;
#pragma unroll
    for (u32 n = 0; n < 2; ++n) {
        vec16<bf16> v;
        v.words = from.v[n % (IS_CODED ? 2 : 1)];
        x[n] = widen_vec(v);
        amax = fmaxf(amax, __uint_as_float(most_of_numbers(x[n])));
    }
#pragma unroll
    for (u32 lanes = 1; lanes < 8; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(WHOLE_WARP, amax, lanes));
    // As GroupRule::DeepEp.
    amax = fmaxf(amax, 1e-4f);
    float scale = amax * (1.0f / 448.0f), factor;
    if (FORMAT == 2) {
        factor = __fdiv_rn(448.0f, amax);
    } else {
        const u32 exponent = (__float_as_uint(scale) + 0x7FFFFF) >> 23;
        scale = __uint_as_float(exponent << 23);
        factor = inverse_power(exponent);
    }
    u32 words[4];
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
        const float* four = x[n / 2].lane + n % 2 * 4;
        words[n] = narrow_e4m3x2(four[0] * factor, four[1] * factor) |
                   (u32)narrow_e4m3x2(four[2] * factor, four[3] * factor) << 16;
    }
    made.v = make_uint4(words[0], words[1], words[2], words[3]);
    const u32 bits = __float_as_uint(scale);
    made.scale = __shfl_sync(WHOLE_WARP, bits, lane_id() % 4 * 8);
    return made;
}

DEVICE chunk made_of(const source& from) {
    if constexpr (IS_CODED) return quantised(from);
    else return chunk{from.v[0], 0};
}

// Where a chunk of a token is in the upper lane of its rank.
DEVICE u32 chunk_at(const arguments& a, const slot_call& k, u32 slot, u32 from, u32 token, u32 index) {
    return lane_at(a, slot, WORLD + from) + (token * chunks_of_row(k) + index) * CHUNK_BYTES;
}

// Sends a chunk to the ranks whose bits are set.
DEVICE void send_chunk(const arguments& a, const turn& t, const slot_call& k, u32 token, u32 index, u32 ranks, chunk made) {
    if (!IS_CODED) made.v = masked(made.v);
    const u32 at = chunk_at(a, k, t.slot, a.rank, token, index);
#pragma unroll
    for (u32 to = 0; to < TARGETS; ++to) {
        if (!(ranks >> rank_of(a, to) & 1)) continue;
        store16_volatile(arena_of(a, to) + at + lane_id() * 16, made.v);
        if (IS_CODED && lane_id() < 4) *(volatile u32*)(arena_of(a, to) + at + 512 + lane_id() * 4) = made.scale;
    }
}

// Loads what has arrived of a chunk.
DEVICE void look_at_chunk(const u8* at, chunk& got) {
    got.v = load16_volatile(at + lane_id() * 16);
    if (IS_CODED) got.scale = *(const volatile u32*)(at + 512 + lane_id() % 4 * 4);
}

// Waits for a chunk of a rank, and empties its place. `is_loaded`: the warp has looked at it before.
DEVICE bool receive_chunk(reader& r, u32 from, u8* at, bool is_loaded, chunk& got) {
    const bool came = r.wait<true>([&](u32& missing) {
        if (!is_loaded) look_at_chunk(at, got);
        is_loaded = false;
        const bool complete = !has_empty(got.v) && !(IS_CODED && got.scale == EMPTY);
        if (!complete) missing = from;
        return complete;
    });
    if (!came) return false;
    const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    store16(at + lane_id() * 16, empty);
    if (IS_CODED && lane_id() == 0) store16(at + 512, empty); // races: a lane votes when it has its scale, and this follows the vote
    if (!IS_CODED) got.v = unmasked(got.v);
    return true;
}

// Stores a chunk in a slot of an expert.
DEVICE void store_chunk(const slot_call& k, u32 expert, u32 slot, u32 slots, u32 index, const chunk& got) {
    if (discards(k)) return;
    const u32 lane = lane_id(), of_row = k.hidden / (IS_CODED ? 16 : 8);
    const u32 at = index * (IS_CODED ? 32 : ROW) + lane;
    if (at < of_row && (IS_CODED || lane < ROW))
        store16(k.to_x + (((u64)expert * slots + slot) * of_row + at) * 16, got.v);
    const u32 groups = k.hidden / 128, group = index * 4 + lane;
    if (FORMAT == 2 || FORMAT == 3) {
        if (lane < 4 && group < groups) k.to_scales[((u64)expert * groups + group) * slots + slot] = got.scale;
    }
    if (FORMAT == 4) {
        const u32 packed = __reduce_or_sync(WHOLE_WARP, got.scale >> 23 << lane % 4 * 8);
        if (lane == 0) k.to_scales[((u64)expert * (groups / 4) + index) * slots + slot] = packed;
    }
}

// The n-th rank from this one on.
DEVICE u32 nth_rank(const arguments& a, u32 n) { return a.rank + n < WORLD ? a.rank + n : a.rank + n - WORLD; }

// The ranks of a token's experts that it is sent to, as bits.
DEVICE u32 ranks_of(const arguments& a, const slot_call& k, u32 token) {
    const u32 entry = lane_id() < k.top_k ? own_entry(k, token * k.top_k + lane_id()) : 0;
    const u32 bit = entry == 0 ? 0 : 1u << (entry - 1) / (k.experts / WORLD);
    return __reduce_or_sync(WHOLE_WARP, bit) & ~(IS_SPLIT ? 0 : 1u << a.rank);
}

// Writes the outputs that describe the slots.
DEVICE void describe(const arguments& a, const slot_call& k, const choices& all) {
    const marks& m = all.chose;
    const u32 local = k.experts / WORLD, thread = THREADS - 1 - threadIdx.x; // the last warps have the fewest rows
    for (u32 i = blockIdx.x + thread * gridDim.x; i < local * WORLD && !discards(k); i += gridDim.x * THREADS) {
        const u32 expert = i / WORLD, from = i % WORLD;
        const u32 begin = m.among(expert, 0, from * m.of_rank), count = m.among(expert, from * m.of_rank, m.of_rank);
        k.layout_range[i] = (u64)begin << 32 | count;
        if (from == WORLD - 1) {
            k.counts[expert] = begin + count;
            if (k.statistics != nullptr) k.statistics[expert] += begin + count;
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < WORLD) k.held_tokens[threadIdx.x] = all.tokens[threadIdx.x];
}

// Profilers show the kernel by this name, and tools that were made for DeepEP look for "::dispatch" there.
namespace slots {
__global__ void __launch_bounds__(THREADS, RESIDENT)
dispatch(const __grid_constant__ arguments a, const __grid_constant__ slot_call k) {
    extern __shared__ u32 words[]; // of marks
    __shared__ u16 kept[MAX_KEPT];
    __shared__ u32 tokens[WORLD];
    begin_kernel<WHEN_CERTAIN>(a);
    const block_end end(a, SENDS);
    const u32 chunks = chunks_of_row(k), step = gridDim.x * (THREADS / 32);
    const u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x; // neighbours are on different multiprocessors
    const u32 to_send = k.tokens * chunks;
    const uint4 control_words = load_control(a);
    const bool has_choices = SENDS && blockIdx.x == gridDim.x - 1;
    uint4 first_choices;
    if (has_choices) first_choices = vector_of_choices(k, threadIdx.x);
    u32 item = warp, ranks = 0;
    source from;
    const auto load = [&] {
        if (item >= to_send) return;
        from = load_source(k, item / chunks, item % chunks);
        ranks = ranks_of(a, k, item / chunks);
    };
    if (SENDS) load();
    const turn t = begin_phase(a, control_words);
    if (t.has_failed()) item = to_send;
    else if (has_choices) send_choices(a, t, k, first_choices);
    chunk got;
    while (SENDS && item < to_send) {
        const chunk made = made_of(from);
        if (item == warp) got = made;
        if (ranks != 0) send_chunk(a, t, k, item / chunks, item % chunks, ranks, made);
        item += step;
        load();
    }
    if (!begins(a, t, vectors_of_choices(k.most_tokens * k.top_k) | (IS_SPLIT ? OWN_TOO : 0), 0)) return;
    if (!RECEIVES) return;

    const u32 local = k.experts / WORLD, slots = WORLD * k.most_tokens, first = a.rank * local;
    const marks m{words, words_of_rank(k)};
    const choices all{m, tokens, kept, slots * k.top_k <= MAX_KEPT};
    for (u32 i = threadIdx.x; i < local * m.of_expert(); i += THREADS) words[i] = 0;
    __syncthreads();
    reader r(a, t);
    time_waits(a, r, k);
    // The warps begin with a share of the items of each rank, so that few tokens of all ranks are different warps'. Before it knows the
    // choices, a warp has its first own chunk, or else looks at one that may come.
    const u32 share = step / WORLD, n = min(warp / share, WORLD - 1), item_of_n = warp - n * share;
    const bool has_own = !IS_SPLIT && (n == 0 || warp < to_send);
    const bool looks = !has_own && item_of_n < k.most_tokens * chunks;
    u32 ahead_at = looks ? chunk_at(a, k, r.slot, nth_rank(a, n), item_of_n / chunks, item_of_n % chunks) : 0;
    const bool came = mark_choices(a, r, k, all, [&] { if (ahead_at != 0) look_at_chunk(a.own + ahead_at, got); });
    if (!__syncthreads_and(came)) return;
    // The last block of every peer's grid has sent, and blocks start in their order.
    release_dependents(a);
    r.ask_for_tag();

#pragma unroll 1
    for (u32 n = 0; n < WORLD; ++n) {
        const u32 from = nth_rank(a, n), end = tokens[from] * chunks;
        for (u32 i = (warp + step - n * share) % step; i < end; i += step) {
            const u32 token = i / chunks, index = i % chunks, lane = lane_id();
            // A lane has a choice.
            const u32 entry = lane < k.top_k ? entry_of(a, r.slot, k, all, from, token * k.top_k + lane) : 0;
            const u32 same = __match_any_sync(WHOLE_WARP, entry), earliest = __ffs(same) - 1;
            const u32 expert = entry - 1 - first;
            const bool is_here = entry != 0 && expert < local;
            const u32 slot = is_here ? m.before(expert, from, token) : 0;
            u32 here = __ballot_sync(WHOLE_WARP, is_here && earliest == lane);
            if (index == 0 && lane < k.top_k) {
                const i32 row = expert * slots + slot;
                const bool has_row = is_here && (from == a.rank || earliest == lane);
                i32 place = has_row ? row : NOWHERE;
                if (from == a.rank && entry != 0 && !is_here) place = ELSEWHERE - (i32)((entry - 1) / local * 32 + earliest);
                k.places[((u64)from * k.most_tokens + token) * k.top_k + lane] = place;
                if (is_here && earliest == lane && !discards(k)) k.source_tokens[row] = token;
            }
            if (here == 0) continue;
            if (from == a.rank && !IS_SPLIT) {
                if (i != warp) got = made_of(load_source(k, token, index));
            } else {
                const u32 at = chunk_at(a, k, r.slot, from, token, index);
                if (!receive_chunk(r, from, a.own + at, at == ahead_at, got)) return;
            }
            ahead_at = 0;
            while (here != 0) {
                const u32 of = __ffs(here) - 1;
                here &= here - 1;
                store_chunk(k, __shfl_sync(WHOLE_WARP, expert, of), __shfl_sync(WHOLE_WARP, slot, of), slots, index, got);
            }
        }
    }
    describe(a, k, all);
    r.finish();
}
} // namespace slots
