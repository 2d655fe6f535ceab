// The steps of a plan as they lie in memory, where table.rs and engines.rs write them in the same layout; and what they count.

// An operand of a step, or the counter of a channel.
struct alignas(16) plan_item {
    u64 at;   // bytes from the base
    u32 base; // the number of the base of the launch; that of number 0 is 0
    u32 rank; // the rank that sends these packets, or through this channel
};

// A step of a thread block.
struct alignas(16) plan_step {
    u32 kind;
    u32 detail;   // the operator; or whether a signal is relaxed, how many blocks meet, how many steps a loop has
    u32 first;    // of the step's items: plain sources, packets, plain destinations, packets
    u32 by_turn;  // whether each turn of a loop does a part of the share
    u32 counts[4];
    u64 share[2]; // the block's bytes of the operation; of a loop, the number of turns and the bytes of each
    u64 span[2];  // the step's bytes of the operation, of one chunk if chunks are padded as packets
};
DEVICE u32 sources_of(const plan_step& s) { return s.counts[0] + s.counts[1]; }
DEVICE u32 items_of(const plan_step& s) { return s.counts[0] + s.counts[1] + s.counts[2] + s.counts[3]; }

// Signals of a channel, releases of a semaphore or arrivals at a barrier since the plan was loaded, and how many of them were taken.
struct alignas(16) plan_counter {
    u64 count, taken;
};

// Where the steps of a thread block are, and their items.
struct alignas(16) plan_block {
    u32 first_step, first_item, steps, items;
    u32 shape; // which case of a compiled kernel does them
};

// A request to a copy engine, in the host's memory: engines.rs. It copies bytes, or if there are none raises the count at `to`.
struct alignas(32) plan_request {
    u64 number, from, to, bytes;
};
