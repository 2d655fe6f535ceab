//! The blocks that work on each row: the shape of a grid. See `team.cuh`.

use antiphon_device::cuda::LaunchConfig;

use crate::all_reduce::Algorithm;
use crate::fusion::{Quantization, Source, Validated};

/// Blocks of a cluster that every GPU with clusters can have.
const MOST_BLOCKS: usize = 8;
/// Bytes of shared memory of a multiprocessor: what every GPU lets a block have, and less than half of what data centres'
/// have. The rest is another communicator's, as half the registers are.
const SHARED_BYTES: usize = 99 << 10;
/// Lanes of a warp.
const WARP: usize = 32;
/// The number of rows from which on the throughput decides how long a call takes. With fewer rows the time of a row decides.
const MANY_ROWS: usize = 1024;

/// How a block is made, for which a program is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Few threads, with one vector of a row each.
    Short,
    /// Many threads, with one vector of a row each.
    ShortWide,
    /// Few threads, with several vectors of a row each.
    Long,
    /// Many threads, with several vectors of a row each.
    LongWide,
    /// As `LongWide`, where no team has two rows.
    LongOnce,
}

impl Shape {
    /// The most threads of a block.
    pub(crate) const fn threads(self) -> usize {
        match self {
            Self::Short | Self::Long => 128,
            Self::ShortWide | Self::LongWide | Self::LongOnce => 448,
        }
    }

    /// Whether a thread has one vector of a row at most.
    pub(crate) const fn is_short(self) -> bool {
        matches!(self, Self::Short | Self::ShortWide)
    }

    /// Whether some teams of a two-shot only reduce.
    pub(crate) const fn is_split(self) -> bool {
        matches!(self, Self::Long | Self::LongWide)
    }

    /// The most blocks of a multiprocessor, among `world_size` ranks: as many as fit half of its registers.
    pub(crate) const fn most_blocks(self, world_size: usize, algorithm: Algorithm) -> u32 {
        match self {
            Self::Short if world_size <= 4 => 3,
            Self::Long if world_size <= 4 && matches!(algorithm, Algorithm::TwoShot) => 4,
            Self::Short | Self::Long => 2,
            Self::ShortWide | Self::LongWide | Self::LongOnce => 1,
        }
    }

    /// Vectors that a thread of a team that only reduces has under way at a time, of every rank's: as many as keep the links busy.
    pub(crate) const fn at_once(world_size: usize) -> usize {
        if world_size <= 3 { 2 } else { 1 }
    }

    /// The percentage of teams that only reduce this rank's part. Measured on H200s, with two, three and four ranks.
    const fn reducing(
        self,
        world_size: usize,
        quantization: Option<Quantization<*mut u8>>,
        rows: usize,
    ) -> usize {
        use Quantization::{Fp8, Fp8Groups, NvFp4};
        match (quantization, world_size, self) {
            (None | Some(Fp8 { .. }), 2, Self::Long) => 32,
            (None | Some(Fp8 { .. }), 2, _) if rows >= 512 => 24,
            (Some(Fp8Groups { .. } | NvFp4 { .. }), 2, Self::Long) => 22,
            (Some(Fp8Groups { .. } | NvFp4 { .. }), 2, _) => 18,
            (_, 2, _) => 20,
            _ => 14,
        }
    }

    /// Whether there are registers for it.
    pub(crate) const fn serves(self, world_size: usize) -> bool {
        world_size <= 4 || matches!(self, Self::Short | Self::Long)
    }
}

/// The resources of a GPU that a call may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) world_size: usize,
    pub(crate) multiprocessors: u32,
    /// Whether blocks reach each other's shared memory.
    pub(crate) has_clusters: bool,
    /// The parts of it that are in use at a time.
    pub(crate) channels: usize,
}

/// The blocks of a grid, in teams of which each works on one row at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Teams {
    pub(crate) shape: Shape,
    teams: u32,
    blocks_of_team: u32,
    threads: u32,
    /// Vectors of a row that a thread has.
    pub(crate) rounds: u32,
    /// Teams that reduce, where others do the rest.
    pub(crate) reducing: u32,
    /// Whether the grid takes so little of the GPU that the kernel behind may come at once; see `KERNEL` in slots.cuh.
    pub(crate) is_small: bool,
    shared_bytes: u32,
}

impl Teams {
    /// For all rows of a call: a thread for each vector if there is room, else what is fastest; none if a row fits nothing.
    pub(crate) fn new(call: &Validated, algorithm: Algorithm, room: Room) -> Option<Self> {
        let rows = call.tokens;
        let all_at_once = |shape: Shape| {
            Self::of(shape, call, rows, algorithm, room).filter(|teams| teams.have_a_row_each(rows))
        };
        // Between two ranks each reduces half of all rows, which is best done by teams that do nothing else, while there are
        // enough.
        let once = if room.world_size == 2 { Shape::LongWide } else { Shape::LongOnce };
        // And where less is done with a vector than the links need for it, many small blocks hold each other up less.
        let is_light = matches!(call.source, Source::Tensor { .. })
            && !matches!(call.quantization, Some(Quantization::Fp8Tokens { .. }));
        let is_long =
            rows >= MANY_ROWS && algorithm == Algorithm::TwoShot && room.world_size == 2 && is_light;
        let [first, second] =
            if is_long { [Shape::Long, Shape::LongWide] } else { [Shape::LongWide, Shape::Long] };
        [Shape::Short, Shape::ShortWide, once, Shape::LongOnce]
            .into_iter()
            .find_map(all_at_once)
            .or_else(|| Self::of(first, call, rows, algorithm, room))
            .or_else(|| Self::of(second, call, rows, algorithm, room))
    }

    /// For some rows of a call, of blocks of this shape; none if a row does not fit.
    pub(crate) fn of(
        shape: Shape,
        call: &Validated,
        rows: usize,
        algorithm: Algorithm,
        room: Room,
    ) -> Option<Self> {
        let groups = call.odd_groups();
        if !shape.serves(room.world_size) || shape.is_short() && groups.is_some() {
            return None;
        }
        let (vectors, most_threads) = (call.vectors(), shape.threads());
        let per_multiprocessor = shape.most_blocks(room.world_size, algorithm);
        // A group that is not a warp's neighbouring lanes' is a block's.
        let most_of_team = if room.has_clusters && groups.is_none() { MOST_BLOCKS } else { 1 };
        let all = (room.multiprocessors * per_multiprocessor) as usize;
        let most = all / room.channels;
        let shared = |threads: usize, rounds: usize| {
            let word = if matches!(call.quantization, Some(Quantization::Fp8Tokens { .. })) { 2 } else { 1 };
            // What is kept of rows: see epilogue.cuh.
            let kept = match (shape.is_short(), groups) {
                (true, _) => 0,
                (false, Some(_)) => 1,
                (false, None) => 3,
            };
            let of_rows = kept * rounds * threads * 16 + groups.unwrap_or(0) * 4;
            // The same room serves teams that only reduce.
            let ahead = match algorithm {
                Algorithm::TwoShot if shape.is_split() => Shape::at_once(room.world_size) * room.world_size,
                _ => 0,
            };
            vectors.div_ceil(WARP) * 2 * word * 8 + of_rows.max(ahead * threads * 16)
        };
        let least_of_team = if shape.is_short() { vectors.div_ceil(most_threads) } else { 1 };
        let fitting = (least_of_team..=most_of_team).find_map(|blocks| {
            let threads = vectors.div_ceil(blocks).next_multiple_of(WARP).min(most_threads);
            // A block without any vector would leave the cluster before the others are done with it.
            let blocks = blocks.min(vectors.div_ceil(threads));
            let rounds = vectors.div_ceil(blocks * threads);
            let shared_bytes = shared(threads, rounds);
            let fits = shared_bytes <= Self::most_shared_bytes(per_multiprocessor) as usize;
            fits.then_some((blocks, threads, rounds, shared_bytes))
        });
        let (blocks, threads, rounds, shared_bytes) = fitting?;
        let (most, ranks) = (most / blocks, room.world_size);
        let (reducing, least) = match algorithm {
            Algorithm::OneShot => (0, 1),
            // Every rank's lane is some block's in the first step, in which all blocks send.
            Algorithm::TwoShot if shape.is_short() => (0, ranks.div_ceil(blocks)),
            Algorithm::TwoShot if !shape.is_split() => (0, most),
            Algorithm::TwoShot => {
                let useful = (rows.div_ceil(ranks) * vectors).div_ceil(blocks * threads);
                let share = most * shape.reducing(ranks, call.quantization, rows) / 100;
                (share.max(most.saturating_sub(rows)).min(useful).max(1), ranks.div_ceil(blocks))
            }
        };
        let teams = rows.max(least).min(most - reducing) + reducing;
        Some(Self {
            shape,
            teams: teams as u32,
            blocks_of_team: blocks as u32,
            threads: threads as u32,
            rounds: rounds as u32,
            reducing: reducing as u32,
            is_small: room.channels == 1 && 2 * teams * blocks <= all,
            shared_bytes: shared_bytes as u32,
        })
    }

    /// Whether each of `rows` rows has a team of its own, so that no row waits for another one.
    pub(crate) fn have_a_row_each(&self, rows: usize) -> bool {
        (self.teams - self.reducing) as usize >= rows
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.teams * self.blocks_of_team
    }

    pub(crate) fn config(&self) -> LaunchConfig {
        let config = LaunchConfig::new(self.blocks(), self.threads).shared_bytes(self.shared_bytes);
        if self.blocks_of_team == 1 { config } else { config.cluster(self.blocks_of_team) }
    }

    /// The most shared memory of a block, if a multiprocessor runs `per_multiprocessor` blocks.
    pub(crate) const fn most_shared_bytes(per_multiprocessor: u32) -> u32 {
        SHARED_BYTES as u32 / per_multiprocessor
    }
}

impl Validated {
    /// Vectors of 16 bytes of a row.
    pub(super) fn vectors(&self) -> usize {
        self.hidden * self.dtype.size() / 16
    }

    /// Slices of 32 vectors of a row.
    pub(super) fn slices(&self) -> usize {
        self.vectors().div_ceil(WARP)
    }

    /// How many groups a row has, if they are not those of some neighbouring lanes of a warp.
    pub(super) fn odd_groups(&self) -> Option<usize> {
        let Some(Quantization::Fp8Groups { group, .. }) = self.quantization else { return None };
        let (bytes, vectors) = (group * self.dtype.size(), group * self.dtype.size() / 16);
        let is_of_lanes = bytes.is_multiple_of(16) && vectors.is_power_of_two() && vectors <= WARP;
        (!is_of_lanes).then(|| self.hidden / group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fusion::FusedAllReduce;
    use antiphon_tensor::{Device, TensorView, TensorViewMut, bf16};

    /// The teams for `tokens` rows of bf16 on a GPU with 132 multiprocessors.
    fn teams(tokens: usize, hidden: usize, algorithm: Algorithm, world_size: usize) -> Teams {
        let (x, mut sum) = (vec![bf16::ZERO; tokens * hidden], vec![bf16::ZERO; tokens * hidden]);
        let call = FusedAllReduce::of(TensorView::new(&x, &[tokens, hidden]).unwrap())
            .sum_out(TensorViewMut::new(&mut sum, &[tokens, hidden]).unwrap());
        let call = Validated::new(Device::Host, &call).unwrap();
        let room = Room { world_size, multiprocessors: 132, has_clusters: true, channels: 1 };
        Teams::new(&call, algorithm, room).unwrap()
    }

    #[test]
    fn few_rows_have_a_thread_for_every_vector() {
        use Algorithm::{OneShot, TwoShot};
        use Shape::{Long, LongOnce, LongWide, Short, ShortWide};
        for (tokens, algorithm, world_size, shape) in [
            (1, OneShot, 4, Short),
            (56, TwoShot, 4, Short), // 7 blocks for each: 392 of 396
            (57, TwoShot, 4, ShortWide),
            (106, TwoShot, 2, LongWide), // 26 of 132 only reduce
            (107, TwoShot, 2, LongOnce),
            (67, TwoShot, 4, LongOnce),
            (132, TwoShot, 4, LongOnce),
            (133, TwoShot, 4, LongWide),
            (66, OneShot, 2, ShortWide),
            (67, OneShot, 2, LongWide),
            (1024, OneShot, 2, LongWide),
            (1023, TwoShot, 2, LongWide),
            (1024, TwoShot, 2, Long),
            (1024, TwoShot, 4, LongWide),
            (37, OneShot, 8, Short), // 259 of 264
            (38, OneShot, 8, Long),
        ] {
            let teams = teams(tokens, 7168, algorithm, world_size);
            assert_eq!(teams.shape, shape, "{tokens} tokens, {world_size} ranks: {teams:?}");
        }
    }

    #[test]
    fn no_block_is_without_a_vector_and_all_fit_the_gpu() {
        for hidden in [8, 1024, 1040, 7168, 8192, 16_384] {
            for tokens in [1, 2, 7, 64, 300, 2048] {
                for algorithm in Algorithm::ALL {
                    let teams = teams(tokens, hidden, algorithm, 4);
                    let vectors = (hidden / 8) as u32;
                    assert!((teams.blocks_of_team - 1) * teams.threads < vectors, "{teams:?}");
                    assert!(teams.blocks_of_team * teams.threads * teams.rounds >= vectors, "{teams:?}");
                    assert!(teams.blocks() <= 132 * teams.shape.most_blocks(4, algorithm), "{teams:?}");
                    assert!(teams.reducing < teams.teams, "{teams:?}");
                    let ahead = if teams.reducing > 0 {
                        Shape::at_once(4) * 4 * teams.threads as usize * 16
                    } else {
                        0
                    };
                    assert!((ahead..=SHARED_BYTES).contains(&(teams.shared_bytes as usize)), "{teams:?}");
                }
            }
        }
    }
}
