//! The layout of a tenant's memory: channels of slots, and slots of lanes. slots.cuh describes their use.

/// Sets of slots. Large messages go in pieces through both, in two streams: while one piece is reduced or stored, the next is
/// already on the links.
pub(super) const CHANNELS: usize = 2;
/// Calls in flight use three slots in turn.
const SLOTS: usize = 3;
const TAGS_BYTES: usize = 4096;
/// The most blocks of a grid on any device: each has control words.
pub const MAX_BLOCKS: u32 = 640;
/// Where the slots begin in a channel, behind the control words and a note of each block.
pub(super) const SLOTS_AT: usize = (MAX_BLOCKS as usize * (16 + 4)).next_multiple_of(4096);
/// The least memory for staging.
pub(super) const LEAST_BYTES: usize = 16 << 20;

/// The layout of one tenant's arena, which is the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Staging {
    world_size: usize,
    /// The first ones, which have slots. All have control words.
    pub(super) channels: usize,
    /// Bytes of a lane, which are also those from lane to lane.
    pub(super) lane_stride: usize,
}

impl Staging {
    /// The staging with the largest lanes such that the lanes of all `channels` channels fit `staging_bytes`; `None` for less than
    /// [`LEAST_BYTES`].
    pub(super) fn within(staging_bytes: usize, world_size: usize, channels: usize) -> Option<Self> {
        let lanes = channels * SLOTS * 2 * world_size;
        let others = Self { world_size, channels, lane_stride: 0 }.arena_bytes();
        let stride = staging_bytes.checked_sub(others)? / lanes / 4096 * 4096;
        // A kernel counts bytes of a channel in 32 bits.
        let most = (u32::MAX as usize / (SLOTS * 2 * world_size)) / 4096 * 4096 - 4096;
        (staging_bytes >= LEAST_BYTES).then_some(Self { world_size, channels, lane_stride: stride.min(most) })
    }

    /// Bytes from slot to slot.
    #[inline]
    pub(super) fn slot_stride(self) -> usize {
        TAGS_BYTES + 2 * self.world_size * self.lane_stride
    }

    /// Bytes of a set of slots with its control words.
    fn channel_bytes(self) -> usize {
        SLOTS_AT + SLOTS * self.slot_stride()
    }

    /// Where a channel begins in the arena, in bytes.
    #[inline]
    pub(super) fn channel_at(self, channel: usize) -> u64 {
        (channel * self.channel_bytes()) as u64
    }

    /// Bytes of the arena.
    pub(super) fn arena_bytes(self) -> usize {
        self.channels * self.channel_bytes() + (CHANNELS - self.channels) * SLOTS_AT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::MAX_WORLD;

    #[test]
    fn lanes_take_as_much_memory_as_there_is_and_no_more() {
        for world_size in 2..=MAX_WORLD {
            for (bytes, channels) in
                [(LEAST_BYTES, 2), (LEAST_BYTES, 1), (100_000_000, 2), (256 << 20, 1), (1 << 40, 2)]
            {
                let staging = Staging::within(bytes, world_size, channels).unwrap();
                let stride = staging.lane_stride;
                assert!(
                    stride >= 128 << 10 && stride.is_multiple_of(4096),
                    "{world_size} ranks, {bytes}: {stride}"
                );
                assert!(staging.arena_bytes() <= bytes && staging.channel_bytes() < 1 << 32);
                let next = Staging { lane_stride: stride + 4096, ..staging }.arena_bytes();
                assert!(
                    next > bytes || next / channels > u32::MAX as usize / 2,
                    "{world_size} ranks, {bytes}"
                );
            }
        }
        assert_eq!(Staging::within(LEAST_BYTES - 1, 2, 2), None);
    }

    #[test]
    fn channels_slots_and_lanes_lie_side_by_side() {
        let staging = Staging { world_size: 4, channels: CHANNELS, lane_stride: 1 << 20 };
        assert_eq!(staging.channel_at(0), 0);
        let slots: Vec<u64> = (0..CHANNELS)
            .flat_map(|channel| {
                (0..SLOTS).map(move |slot| {
                    staging.channel_at(channel) + (SLOTS_AT + slot * staging.slot_stride()) as u64
                })
            })
            .collect();
        let last_of_slot = (TAGS_BYTES + 2 * 4 * staging.lane_stride) as u64;
        for (slot, next) in slots.iter().zip(&slots[1..]) {
            assert!(slot + last_of_slot <= *next, "{slots:?}");
        }
        // The control words of the second channel lie behind the last slot of the first.
        assert_eq!(slots[SLOTS - 1] + last_of_slot, staging.channel_at(1));
        assert_eq!(slots[CHANNELS * SLOTS - 1] + last_of_slot, staging.arena_bytes() as u64);
    }
}
