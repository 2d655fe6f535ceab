// Mixed collectives of ranks on several nodes. Behind slots.cuh and reduce.cuh; the slots themselves are not used.
//
// Rank r is rank r % WORLD of node r / WORLD. The ranks of a node write into each other's regions; the ranks at one place of their nodes, a
// rail, into each other's symmetric memory: by stores where they reach it, otherwise by puts with signals. A group has TP ranks on each
// of `inter_tp` nodes that follow each other.
//
// A call goes in rounds, and in each a block of the grid has a piece of all groups' blocks. It talks to the blocks of the other ranks
// that have its own number, in up to four hops:
//
//   INPUTS   to the ranks of the node: what they add up
//   SUMS     along the rail: the sums of the node, not rounded, to those that combine the sums of the nodes
//   PARTS    along the rail, if ranks of a rail divide its sums: what each has combined, rounded
//   RESULTS  to the ranks of the node: what they receive
//
// What a rank adds up is a share of `adders` of some groups' blocks, by its place among the adders; with one adder, each adds up all that
// it needs. Where one node contributes to a block, its sums are whole and are rounded at once (`whole`).
//
// How they wait. Every round of every call has a number, which grows by one and is in device memory, so that graphs may be replayed between
// other calls. In each hop a block has a mailbox of two slots for each sender; a round uses the one of its number's parity. The sender
// fills the mailbox, and then sets its signal to the number; the receiver waits for exactly this number. In INPUTS every rank tells each
// rank of its node, and in SUMS each of its rail, if only that it has begun. So a rank that begins round n + 2 has heard of round n + 1
// from all, hence they have ended round n and read what it sent then: mailboxes, and the memory from which puts are read, are free again.
// A wait is for what a rank sends before it waits for anything later. So of all blocks that wait, one whose round and hop come first
// waits for none of the others, and no order of arrival stops them all. model.rs goes through the orders. A rank that does not come is
// the end of a wait by the deadline or by the host, and then no call sends any more.

constexpr u32 INPUTS = 0, RESULTS = 1; // of a region
constexpr u32 SUMS = 0, PARTS = 1;     // of symmetric memory
constexpr u32 HEADER = 16;             // a mailbox begins with the tag of the call
constexpr u32 MAIL = HEADER + MAIL_BYTES;
constexpr u32 WIDE = COPIES ? 16 : LANES * 4; // bytes of a vector's sum

// At the start of each block's part of a region.
struct progress {
    u64 round; // the last
    u32 busy;  // whether a grid uses the mailboxes
};
constexpr u32 LOCAL_BYTES = 1024 + 2 * 2 * WORLD * MAIL;

struct span {
    u32 start, end;
    DEVICE u32 len() const { return end - start; }
};
// One of `shares` shares, which differ by one vector at most.
DEVICE span divided(span s, u32 index, u32 shares) {
    const u64 len = s.len();
    return span{s.start + (u32)(len * index / shares), s.start + (u32)(len * (index + 1) / shares)};
}

DEVICE wide_vec<T> load_sum(const u8* from) {
    wide_vec<T> sum;
    if constexpr (!COPIES)
#pragma unroll
        for (u32 k = 0; k < LANES; k += 4) {
            const uint4 v = load16_volatile(from + k * 4);
            sum.lane[k] = __uint_as_float(v.x);
            sum.lane[k + 1] = __uint_as_float(v.y);
            sum.lane[k + 2] = __uint_as_float(v.z);
            sum.lane[k + 3] = __uint_as_float(v.w);
        }
    return sum;
}
DEVICE void store_sum(u8* to, const wide_vec<T>& sum) {
    if constexpr (!COPIES)
#pragma unroll
        for (u32 k = 0; k < LANES; k += 4)
            store16(to + k * 4, make_uint4(__float_as_uint(sum.lane[k]), __float_as_uint(sum.lane[k + 1]),
                                           __float_as_uint(sum.lane[k + 2]), __float_as_uint(sum.lane[k + 3])));
}
DEVICE void add(wide_vec<T>& sum, const wide_vec<T>& x) {
    if constexpr (!COPIES)
#pragma unroll
        for (u32 k = 0; k < LANES; ++k) sum.lane[k] = OPERATOR<A>()(sum.lane[k], x.lane[k]);
}
DEVICE wide_vec<T> widened(uint4 words) {
    vec16<T> v;
    v.words = words;
    return widen_vec(v);
}

// A block's part in a call. GATHERS: inputs are a group's own block, and outputs the row of all; otherwise the reverse.
template <bool GATHERS> struct part {
    const arguments& a;
    const between& b;
    u64 round;
    u32 piece;
    u32 stride, part_stride; // vectors from block to block: of a share of the longest block, and of a part of that

    DEVICE part(const arguments& a, const between& b) : a(a), b(b) {}

    // ----------------------------------------------------------------------------------------------------------- ranks and blocks

    DEVICE u32 place() const { return a.rank % b.local_tp; }               // in the group, on this node
    DEVICE u32 local_group() const { return a.rank / b.local_tp; }         // among those of the node
    DEVICE u32 local_groups() const { return WORLD / b.local_tp; }
    DEVICE u32 of_nodes(u32 node) const { return node / b.inter_tp; }      // which nodes share groups
    DEVICE u32 node_groups() const { return b.nodes / b.inter_tp; }
    DEVICE u32 own_group() const { return of_nodes(b.node) * local_groups() + local_group(); }
    DEVICE u32 rank_of(u32 node, u32 local) const { return node * WORLD + local; }
    DEVICE bool is_shared() const { return b.adders > 1; }

    // What a rank of this node adds up: this many blocks, and which.
    DEVICE u32 added() const { return GATHERS ? 1 : is_shared() ? b.groups : node_groups(); }
    DEVICE u32 added_block(u32 local, u32 k) const {
        const u32 group = local / b.local_tp;
        return GATHERS ? of_nodes(b.node) * local_groups() + group : is_shared() ? k : k * local_groups() + group;
    }
    DEVICE u32 adder(u32 local) const { return is_shared() ? local % b.adders : 0; }
    // Whose inputs it adds up: neighbours on the node.
    DEVICE span contributors(u32 local) const {
        const u32 first = local / b.local_tp * b.local_tp;
        return GATHERS ? span{first, first + b.local_tp} : span{0, WORLD};
    }
    // Of these blocks, those for one node lie together: which nodes they are for, and how many there are.
    DEVICE u32 for_nodes(u32 k) const { return GATHERS ? 0 : k / in_message(); }
    DEVICE u32 in_message() const { return GATHERS || !is_shared() ? 1 : local_groups(); }
    DEVICE u32 owner_on(u32 node) const { return node % b.owners; }

    // The vectors of a block that lie in this piece, and of a share of them.
    DEVICE span clipped(u32 block) const {
        const u32 end = vectors_of(b.count[block]), from = piece * b.step;
        return span{from < end ? from : end, from + b.step < end ? from + b.step : end};
    }
    DEVICE span share(u32 block, u32 local) const { return divided(clipped(block), adder(local), b.adders); }

    DEVICE elements<false> in(u32 block) const {
        return elements<false>(a.input + (GATHERS ? 0 : b.at[block]), b.count[block]);
    }
    DEVICE elements<false> out(u32 block) const {
        return elements<false>(a.output + (GATHERS ? b.at[block] : 0), b.count[block]);
    }

    // -------------------------------------------------------------------------------------------------------------------- memory

    DEVICE u32 slot() const { return round & 1; }
    // This block's part of a region.
    DEVICE u8* region(u32 local) const {
        u8* const arena = local == a.rank ? a.own : a.peer[(local + WORLD - 1 - a.rank) % WORLD];
        return arena + b.region + blockIdx.x * LOCAL_BYTES;
    }
    DEVICE progress* own_progress() const { return (progress*)region(a.rank); }
    static DEVICE u64* local_signal(u8* region, u32 hop, u32 slot, u32 sender) {
        return (u64*)(region + 64) + (hop * 2 + slot) * WORLD + sender;
    }
    static DEVICE u8* local_mail(u8* region, u32 hop, u32 slot, u32 sender) {
        return region + 1024 + ((hop * 2 + slot) * WORLD + sender) * MAIL;
    }
    // This block's part of a rank's symmetric memory: signals, mailboxes, and what is put from there.
    DEVICE u32 rail_bytes() const { return 2048 + (4 * b.nodes + 2 * (b.nodes + 1)) * MAIL; }
    DEVICE u8* rail(u8* heap) const { return heap + blockIdx.x * rail_bytes(); }
    DEVICE u64* rail_signal(u8* rail, u32 hop, u32 sender) const {
        return (u64*)rail + (hop * 2 + slot()) * MAX_NODES + sender;
    }
    DEVICE u8* rail_mail(u8* rail, u32 hop, u32 sender) const {
        return rail + 2048 + ((hop * 2 + slot()) * b.nodes + sender) * MAIL;
    }
    // The message for an owner among some nodes, and that of the parts.
    DEVICE u8* sums_for(u32 nodes, u32 owner) const { return outbox(nodes * b.owners + owner); }
    DEVICE u8* parts() const { return outbox(b.nodes); }
    DEVICE u8* outbox(u32 message) const {
        return rail(b.heap) + 2048 + (4 * b.nodes + slot() * (b.nodes + 1) + message) * MAIL;
    }
    // Where a vector of a message is.
    DEVICE u32 sum_at(u32 block, u32 i) const { return HEADER + (block * part_stride + i) * (b.whole ? 16 : WIDE); }
    DEVICE u32 part_at(u32 block, u32 i) const { return HEADER + (block * part_stride + i) * 16; }
    DEVICE u32 result_at(u32 block, u32 i) const { return HEADER + (block * stride + i) * 16; }

    // --------------------------------------------------------------------------------------------------------------------- waits

    DEVICE void write_tag(u8* mail) const { store16(mail, make_uint4((u32)a.doing.low, (u32)(a.doing.low >> 32),
                                                                     (u32)a.doing.high, (u32)(a.doing.high >> 32))); }

    // Waits for a message, and compares its tag. By one thread.
    DEVICE bool hear(const u64* signal, const u8* mail, u32 peer, bool is_put) const {
        const waiter patience = start_waiting(a.limit_ns, a.board, rank_of(b.node, a.rank), a.doing);
        u32 missing = peer;
        const bool came = wait_until(patience, missing, round, [&](tag& seen) {
            seen.low = ld_acquire_sys(signal);
            return seen.low == round;
        });
        if (!came) return false;
        if (is_put) nvshmemi_transfer_syncapi_update_mem();
        const uint4 words = load16_volatile(mail);
        const tag theirs{words.x | (u64)words.y << 32, words.z | (u64)words.w << 32};
        if (theirs.low == a.doing.low && theirs.high == a.doing.high) return true;
        record_wait(a.board, DISAGREED, rank_of(b.node, a.rank), peer, a.doing, 0, theirs);
        return false;
    }

    // Tells the ranks of the node that their mailboxes of a hop are filled, and waits for those of this rank. For the whole block.
    DEVICE bool meet_node(u32 hop) const {
        const u32 local = threadIdx.x;
        const bool is_mine = local < WORLD && local != a.rank;
        __syncthreads();
        if (is_mine) {
            write_tag(local_mail(region(local), hop, slot(), a.rank));
            fence_sys();
            st_release_sys(local_signal(region(local), hop, slot(), a.rank), round);
        }
        bool came = true;
        if (is_mine) {
            u8* const own = region(a.rank);
            came = hear(local_signal(own, hop, slot(), local), local_mail(own, hop, slot(), local),
                        rank_of(b.node, local), false);
        }
        return __syncthreads_and(came);
    }

    // Sends each rank of the rail `bytes(node)` bytes of the message `message(node)`, and waits for theirs. For the whole block.
    template <class Message, class Bytes> DEVICE bool meet_rail(u32 hop, Message message, Bytes bytes) const {
        __syncthreads(); // the messages are written
        for (u32 node = 0; node < b.nodes; ++node)
            if (node != b.node && b.near[node]) {
                u8* const to = rail_mail(rail(b.near[node]), hop, b.node);
                for (u32 i = HEADER + threadIdx.x * 16; i < bytes(node); i += blockDim.x * 16)
                    store16(to + i, load16_volatile(message(node) + i));
            }
        const u32 node = threadIdx.x;
        const bool is_mine = node < b.nodes && node != b.node;
        if (is_mine) write_tag(b.near[node] ? rail_mail(rail(b.near[node]), hop, b.node) : message(node)); // races: several write the same
        __syncthreads();
        bool came = true;
        if (is_mine) {
            u8* const own = rail(b.heap);
            fence_sys();
            if (b.near[node])
                st_release_sys(rail_signal(rail(b.near[node]), hop, b.node), round);
            else
                nvshmemi_transfer_put_signal<nvshmemi_threadgroup_thread>(
                    rail_mail(own, hop, b.node), message(node), bytes(node), rail_signal(own, hop, b.node), round,
                    NVSHMEMI_AMO_SIGNAL_SET, (int)rank_of(node, a.rank), true);
            came = hear(rail_signal(own, hop, node), rail_mail(own, hop, node), rank_of(node, a.rank), !b.near[node]);
        }
        return __syncthreads_and(came);
    }

    // ---------------------------------------------------------------------------------------------------------------------- hops

    // Writes what the other ranks of the node add up into their mailboxes.
    DEVICE void send_inputs() const {
        for (u32 local = 0; local < WORLD; ++local) {
            const span from = contributors(local);
            if (local == a.rank || a.rank < from.start || a.rank >= from.end) continue;
            u8* const to = local_mail(region(local), INPUTS, slot(), a.rank);
            for (u32 k = 0; k < added(); ++k) {
                const u32 block = added_block(local, k);
                const span s = share(block, local);
                for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x)
                    store16(to + result_at(k, i), in(block).load(s.start + i));
            }
        }
    }

    // Adds up this rank's share of the node's inputs, into the messages for its rail.
    DEVICE void add_up() const {
        const span from = contributors(a.rank);
        for (u32 k = 0; k < added(); ++k) {
            const u32 block = added_block(a.rank, k), index = k % in_message();
            for (u32 owner = 0; owner < b.owners; ++owner) {
                const u32 start = share(block, a.rank).start;
                const span s = divided(share(block, a.rank), owner, b.owners);
                u8* const to = sums_for(for_nodes(k), owner);
                for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x) {
                    const auto input = [&](u32 local) {
                        if (local == a.rank) return in(block).load(s.start + i);
                        const u8* const mail = local_mail(region(a.rank), INPUTS, slot(), local);
                        return load16_volatile(mail + result_at(k, s.start - start + i));
                    };
                    if constexpr (COPIES) {
                        store16(to + sum_at(index, i), input(a.rank));
                    } else {
                        wide_vec<T> sum = widened(input(from.start));
                        for (u32 local = from.start + 1; local < from.end; ++local) add(sum, widened(input(local)));
                        if (b.whole) store16(to + sum_at(index, i), narrow_vec<T>(sum).words);
                        else store_sum(to + sum_at(index, i), sum);
                    }
                }
            }
        }
    }

    // Sends the sums to the ranks of the rail that combine them.
    DEVICE bool exchange_sums() const {
        const auto message = [&](u32 node) { return sums_for(GATHERS ? 0 : of_nodes(node), owner_on(node)); };
        const auto bytes = [&](u32 node) {
            const bool owns = !GATHERS || b.owners == 1 || of_nodes(node) == of_nodes(b.node);
            return owns ? sum_at(in_message(), 0) : HEADER;
        };
        return meet_rail(SUMS, message, bytes);
    }

    // The sum of all nodes that contribute, of a vector of a message: of all nodes, or of those of a group. Rounded.
    DEVICE uint4 combined(u32 nodes, u32 index, u32 i) const {
        const span from = GATHERS ? span{nodes * b.inter_tp, (nodes + 1) * b.inter_tp} : span{0, b.nodes};
        const auto at = [&](u32 node) {
            const u8* const message = node == b.node ? sums_for(GATHERS ? 0 : of_nodes(b.node), owner_on(b.node))
                                                     : rail_mail(rail(b.heap), SUMS, node);
            return message + sum_at(index, i);
        };
        if (COPIES || b.whole) return load16_volatile(at(from.start));
        wide_vec<T> sum = load_sum(at(from.start));
        for (u32 node = from.start + 1; node < from.end; ++node) add(sum, load_sum(at(node)));
        return narrow_vec<T>(sum).words;
    }

    // A vector of a block is complete: it is stored, and sent to the ranks of the node that receive it. `i` is its place in the share.
    DEVICE void emit(u32 block, u32 nodes, u32 start, u32 i, uint4 v) const {
        if (GATHERS || block == own_group()) out(block).store(start + i, v);
        if (!b.hears_results) return;
        const u32 group = block % local_groups();
        for (u32 local = 0; local < WORLD; ++local) {
            const bool receives = GATHERS ? is_shared() || local % b.local_tp == place() : local / b.local_tp == group;
            if (local == a.rank || !receives) continue;
            store16(local_mail(region(local), RESULTS, slot(), a.rank) + result_at(GATHERS ? nodes : 0, i), v);
        }
    }

    // The blocks of which this rank has results from some nodes, if those are for it.
    DEVICE bool has_results_of(u32 nodes) const { return GATHERS || nodes == of_nodes(b.node); }
    DEVICE u32 result_block(u32 nodes, u32 index) const {
        const u32 group = !GATHERS && is_shared() ? index : local_group();
        return nodes * local_groups() + group;
    }

    // Combines the sums of the nodes, where no ranks of a rail divide them.
    DEVICE void conclude() const {
        for (u32 nodes = 0; nodes < node_groups(); ++nodes)
            for (u32 index = 0; has_results_of(nodes) && index < in_message(); ++index) {
                const u32 block = result_block(nodes, index);
                const span s = share(block, a.rank);
                for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x)
                    emit(block, nodes, s.start, i, combined(nodes, index, i));
            }
    }

    // Combines this rank's part of them, for the rail.
    DEVICE void conclude_part() const {
        const u32 nodes = of_nodes(b.node);
        for (u32 index = 0; index < in_message(); ++index) {
            const span s = divided(share(result_block(nodes, index), a.rank), owner_on(b.node), b.owners);
            for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x)
                store16(parts() + part_at(index, i), combined(nodes, index, i));
        }
    }
    DEVICE bool exchange_parts() const {
        const auto bytes = [&](u32 node) {
            return GATHERS || of_nodes(node) == of_nodes(b.node) ? part_at(in_message(), 0) : HEADER;
        };
        return meet_rail(PARTS, [&](u32) { return parts(); }, bytes);
    }
    DEVICE void gather_parts() const {
        for (u32 node = 0; node < b.nodes; ++node) {
            const u32 nodes = of_nodes(node);
            const u8* const from = node == b.node ? parts() : rail_mail(rail(b.heap), PARTS, node);
            for (u32 index = 0; has_results_of(nodes) && index < in_message(); ++index) {
                const u32 block = result_block(nodes, index);
                const span whole = share(block, a.rank), s = divided(whole, owner_on(node), b.owners);
                for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x)
                    emit(block, nodes, whole.start, s.start - whole.start + i, load16_volatile(from + part_at(index, i)));
            }
        }
    }

    // Takes what other ranks of the node have completed for this one.
    DEVICE void take_results() const {
        for (u32 local = 0; local < WORLD; ++local) {
            if (local == a.rank || (GATHERS && !is_shared() && local % b.local_tp != place())) continue;
            const u8* const mail = local_mail(region(a.rank), RESULTS, slot(), local);
            for (u32 nodes = 0; nodes < node_groups(); ++nodes) {
                if (!has_results_of(nodes)) continue;
                const u32 block = GATHERS ? nodes * local_groups() + local / b.local_tp : own_group();
                const span s = share(block, local);
                for (u32 i = threadIdx.x; i < s.len(); i += blockDim.x)
                    out(block).store(s.start + i, load16_volatile(mail + result_at(GATHERS ? nodes : 0, i)));
            }
        }
    }

    // One round. False for all threads if a wait was in vain.
    DEVICE bool go() const {
        if (WORLD > 1) {
            send_inputs();
            if (!meet_node(INPUTS)) return false;
        }
        add_up();
        if (!exchange_sums()) return false;
        if (b.owners == 1) {
            conclude();
        } else {
            conclude_part();
            if (!exchange_parts()) return false;
            gather_parts();
        }
        if (b.hears_results) {
            if (!meet_node(RESULTS)) return false;
            take_results();
        }
        __syncthreads(); // the next round, or the next call, writes what was read here
        return true;
    }

    // Whether this block may begin: no call has failed, and no other grid is at it. For the whole block.
    DEVICE bool begin() const {
        bool may = true;
        if (threadIdx.x == 0) {
            may = ld_relaxed_sys(&a.board->stopped) == 0;
            if (may && atomicExch(&own_progress()->busy, 1u) != 0) {
                const u32 rank = rank_of(b.node, a.rank);
                record_wait(a.board, OVERLAPPED, rank, rank, a.doing, 0, tag{0, 0});
                may = false;
            }
        }
        return __syncthreads_and(may);
    }

    DEVICE void fail() const {
        if constexpr (!COPIES)
            for (u32 block = 0; block < b.groups; ++block)
                if (GATHERS || block == own_group())
                    fill_nan(out(block), grid_thread(), grid_threads(), vectors_of(b.count[block]));
    }

    DEVICE void run() {
        if (!begin()) return fail();
        const u64 before = own_progress()->round;
        stride = (b.step + b.adders - 1) / b.adders;
        part_stride = (stride + b.owners - 1) / b.owners;
        for (u32 k = 0; k < b.rounds; ++k) {
            round = before + k + 1;
            piece = k * gridDim.x + blockIdx.x;
            if (!go()) return fail();
        }
        if (threadIdx.x == 0) {
            own_progress()->round = before + b.rounds;
            __threadfence();
            atomicExch(&own_progress()->busy, 0u);
        }
    }
};

#define BETWEEN(name, GATHERS)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)                                         \
    name(const __grid_constant__ arguments a, const __grid_constant__ between b) {                          \
        begin_kernel<AT_END>(a);                                                                            \
        part<GATHERS>(a, b).run();                                                                          \
    }

BETWEEN(gather_between, true)
BETWEEN(scatter_between, false)
