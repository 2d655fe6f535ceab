// What a plan's steps count in memory, and what they have of the structs that table.rs makes.

DEVICE u32 sources_of(const plan_step& s) { return s.counts[0] + s.counts[1]; }
DEVICE u32 items_of(const plan_step& s) { return s.counts[0] + s.counts[1] + s.counts[2] + s.counts[3]; }

// Signals of a channel, releases of a semaphore or arrivals at a barrier since the plan was loaded, and how many of them were taken.
struct alignas(16) plan_counter {
    u64 count, taken;
};

// A request to a copy engine, in the host's memory: engines.rs. It copies bytes, or if there are none raises the count at `to`.
struct alignas(32) plan_request {
    u64 number, from, to, bytes;
};
