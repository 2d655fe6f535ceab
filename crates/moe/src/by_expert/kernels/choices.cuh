// What a routing map says. Behind slots.cuh.
//
// A *choice* is one of a token's experts of one rank: the expert's number there, and the token's position among those of its rank
// that choose this expert.

constexpr u32 POSITION_BITS = 22;
constexpr u32 NO_CHOICE = ~0u;

DEVICE u32 choice_of(u32 expert, u32 position) { return expert << POSITION_BITS | position; }
DEVICE u32 expert_of(u32 choice) { return choice >> POSITION_BITS; }
DEVICE u32 position_of(u32 choice) { return choice & ((1u << POSITION_BITS) - 1); }

// The choices of all tokens.
struct choices {
    const u32* all;    // [tokens, WORLD, local]: those of each rank, in the order of experts
    const u16* number; // [tokens, WORLD]: how many
    u32 local;

    // The index-th of a token's at a rank.
    DEVICE u32 at(u32 token, u32 rank, u32 index) const {
        if (index >= number[(u64)token * WORLD + rank]) return NO_CHOICE;
        return all[((u64)token * WORLD + rank) * local + index];
    }
};
