//! The room of a GPU: which blocks its multiprocessors hold, and which grids wait for it.
//!
//! Grids queue by priority, and those of one priority in the order in which they come. The blocks of the first are placed as long as there is
//! room; those of the next grid come when all of them are placed. What runs is not preempted.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Condvar, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    circle::{self, Resident, Watch},
    lock,
};

pub(crate) const SHARED_BYTES_PER_MULTIPROCESSOR: u32 = 233_472;
pub(crate) const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
/// The shared memory that each block takes besides what its kernel asks for.
const RESERVED_BYTES: u32 = 1024;
const BLOCKS: u32 = 32;
const PARTITIONS: usize = 4;
const WARPS_PER_PARTITION: u32 = THREADS_PER_MULTIPROCESSOR / 32 / PARTITIONS as u32;
const REGISTERS_PER_PARTITION: u32 = 16 << 10;
/// Registers of a warp come in these.
const REGISTER_UNIT: u32 = 256;
/// The most multiprocessors of a processing cluster, in which a cluster of blocks lies.
const MOST_OF_A_PROCESSING_CLUSTER: u32 = 18;

/// The multiprocessors of a GPU: `ANTIPHON_EMULATOR_MULTIPROCESSORS`, or those of an H100.
pub(crate) fn multiprocessors() -> u32 {
    static COUNT: OnceLock<u32> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let given = std::env::var("ANTIPHON_EMULATOR_MULTIPROCESSORS").ok();
        given.and_then(|count| count.parse().ok()).filter(|count| *count > 0).unwrap_or(132)
    })
}

/// The multiprocessors of each processing cluster: as equal as they can be, in pairs.
fn processing_clusters(all: u32) -> Vec<u32> {
    let count = all.div_ceil(MOST_OF_A_PROCESSING_CLUSTER);
    let pairs = |until: u32| all / 2 * until / count * 2;
    let mut clusters: Vec<u32> = (0..count).map(|at| pairs(at + 1) - pairs(at)).collect();
    clusters[0] += all % 2;
    clusters
}

/// Whether the grids of a GPU share its room, as `ANTIPHON_EMULATOR_ROOM=shared` says; else each grid has a GPU of its own. This crate's own
/// tests share.
pub(crate) fn is_shared() -> bool {
    static IS_SHARED: OnceLock<bool> = OnceLock::new();
    *IS_SHARED.get_or_init(|| match std::env::var("ANTIPHON_EMULATOR_ROOM").as_deref() {
        Ok("shared") => true,
        Ok("" | "own") | Err(_) => cfg!(test),
        Ok(other) => panic!("ANTIPHON_EMULATOR_ROOM is shared or own, not {other}"),
    })
}

/// What the blocks of a grid need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    pub threads: u32,
    /// The registers of one thread.
    pub registers: u32,
    /// Static and dynamic.
    pub shared_bytes: u32,
    /// The blocks of a cluster, which are placed together.
    pub cluster_size: u32,
}

impl Needs {
    fn warps(&self) -> u32 {
        self.threads.div_ceil(32)
    }

    fn registers_of_warp(&self) -> u32 {
        (self.registers * 32).next_multiple_of(REGISTER_UNIT)
    }

    /// How many blocks fit a multiprocessor that has no others.
    pub(crate) fn blocks_per_multiprocessor(&self) -> u32 {
        let mut empty = Multiprocessor::default();
        std::iter::from_fn(|| empty.place(self)).count() as u32
    }

    /// How many clusters fit a GPU that has no other blocks.
    pub(crate) fn clusters(&self) -> u32 {
        let per_multiprocessor = self.blocks_per_multiprocessor();
        let clusters = processing_clusters(multiprocessors()).into_iter();
        clusters.map(|count| count * per_multiprocessor / self.cluster_size).sum()
    }
}

/// The warps of a block in each partition.
type Warps = [u32; PARTITIONS];

#[derive(Debug, Clone, Default)]
struct Multiprocessor {
    blocks: u32,
    warps: Warps,
    registers: [u32; PARTITIONS],
    shared_bytes: u32,
}

impl Multiprocessor {
    /// Takes a block, if there is room: each warp goes to the partition that has the fewest.
    fn place(&mut self, needs: &Needs) -> Option<Warps> {
        let (mut then, mut placed) = (self.clone(), [0; PARTITIONS]);
        then.blocks += 1;
        then.shared_bytes += needs.shared_bytes + RESERVED_BYTES;
        if then.blocks > BLOCKS || then.shared_bytes > SHARED_BYTES_PER_MULTIPROCESSOR {
            return None;
        }
        for _ in 0..needs.warps() {
            let of = (0..PARTITIONS).min_by_key(|&of| then.warps[of])?;
            then.warps[of] += 1;
            then.registers[of] += needs.registers_of_warp();
            placed[of] += 1;
            if then.warps[of] > WARPS_PER_PARTITION || then.registers[of] > REGISTERS_PER_PARTITION {
                return None;
            }
        }
        *self = then;
        Some(placed)
    }

    fn leave(&mut self, needs: &Needs, warps: Warps) {
        self.blocks -= 1;
        self.shared_bytes -= needs.shared_bytes + RESERVED_BYTES;
        for (of, count) in warps.into_iter().enumerate() {
            self.warps[of] -= count;
            self.registers[of] -= count * needs.registers_of_warp();
        }
    }

    fn load(&self) -> u32 {
        self.warps.iter().sum()
    }
}

#[derive(Debug)]
struct Gpu {
    multiprocessors: Vec<Multiprocessor>,
    /// The grids with blocks that wait, by priority and in the order in which they came. The highest priority is the least number.
    queue: BTreeSet<(i32, u64)>,
}

impl Gpu {
    fn new() -> Self {
        Self {
            multiprocessors: vec![Multiprocessor::default(); multiprocessors() as usize],
            queue: BTreeSet::new(),
        }
    }

    /// Places for all blocks of a cluster, on the multiprocessors that have the fewest warps.
    fn place(&mut self, needs: &Needs) -> Option<Vec<Place>> {
        if needs.cluster_size == 1 {
            return self.place_in(needs, 0, multiprocessors() as usize);
        }
        let mut first = 0;
        processing_clusters(multiprocessors()).into_iter().find_map(|count| {
            let from = first;
            first += count as usize;
            self.place_in(needs, from, first)
        })
    }

    fn place_in(&mut self, needs: &Needs, from: usize, to: usize) -> Option<Vec<Place>> {
        let mut places = Vec::new();
        while places.len() < needs.cluster_size as usize {
            let mut order: Vec<usize> = (from..to).collect();
            order.sort_by_key(|&at| self.multiprocessors[at].load());
            let placed = order.into_iter().find_map(|multiprocessor| {
                let warps = self.multiprocessors[multiprocessor].place(needs)?;
                Some(Place { multiprocessor, warps })
            });
            match placed {
                Some(place) => places.push(place),
                None => {
                    self.leave(needs, &places);
                    return None;
                }
            }
        }
        Some(places)
    }

    fn leave(&mut self, needs: &Needs, places: &[Place]) {
        for place in places {
            self.multiprocessors[place.multiprocessor].leave(needs, place.warps);
        }
    }
}

/// Where a block runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    multiprocessor: usize,
    warps: Warps,
}

#[derive(Debug, Default)]
struct Room {
    /// How much was done when nothing had moved, and since when.
    still: Option<(u64, Instant)>,
    /// The GPUs, by device, and by the grid if it has its own.
    gpus: HashMap<(usize, Option<u64>), Gpu>,
    /// The grids that have not ended.
    grids: BTreeMap<u64, Resident>,
}

static ROOM: Mutex<Option<Room>> = Mutex::new(None);
/// A block has ended, or a grid has left a queue.
static CHANGED: Condvar = Condvar::new();
/// When nothing has moved for so long, there is a report.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Reports a circle if nothing has moved for long. A waiting thread calls this.
pub(crate) fn look_for_circle() {
    lock(&ROOM).get_or_insert_default().look_for_circle();
}
/// As above, where the schedule knows that nothing has moved.
pub(crate) fn report_circle(has_no_deadline: bool) {
    let mut room = lock(&ROOM);
    let grids = &room.get_or_insert_default().grids;
    if has_no_deadline || circle::waits_for_room(grids) {
        circle::report(grids);
    }
}
impl Room {
    fn look_for_circle(&mut self) {
        let now = circle::still(self.grids.values());
        match (now, self.still) {
            (Some(now), Some((before, since))) if now == before => {
                if since.elapsed() >= PATIENCE {
                    circle::report(&self.grids);
                }
            }
            _ => self.still = now.map(|now| (now, Instant::now())),
        }
    }
}

/// A grid, from its start to its end.
pub(crate) struct Ticket {
    number: u64,
    priority: i32,
    gpu: (usize, Option<u64>),
    needs: Needs,
}

impl Ticket {
    /// The grid queues, with all its blocks.
    pub(crate) fn new(
        name: &str,
        device: usize,
        stream: u64,
        priority: i32,
        blocks: u32,
        needs: Needs,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let mut room = lock(&ROOM);
        let room = room.get_or_insert_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let gpu = (device, (!is_shared()).then_some(number));
        room.gpus.entry(gpu).or_insert_with(Gpu::new).queue.insert((priority, number));
        let (name, running) = (name.to_owned(), Vec::new());
        room.grids.insert(number, Resident { name, device, stream, needs, waiting: blocks, running });
        Self { number, priority, gpu, needs }
    }

    /// Waits for room for the next cluster: the place of each block, and where it says what it does.
    pub(crate) fn place(&self) -> Vec<(Place, Arc<Watch>)> {
        let mut guard = lock(&ROOM);
        loop {
            let room = guard.get_or_insert_default();
            if let Some(placed) = self.try_place(room) {
                return placed;
            }
            let (changed, timed_out) =
                CHANGED.wait_timeout(guard, PATIENCE).unwrap_or_else(|poisoned| poisoned.into_inner());
            guard = changed;
            if timed_out.timed_out() {
                guard.get_or_insert_default().look_for_circle();
            }
        }
    }

    /// As [`place`](Self::place), if there is room now.
    pub(crate) fn try_now(&self) -> Option<Vec<(Place, Arc<Watch>)>> {
        self.try_place(lock(&ROOM).get_or_insert_default())
    }

    fn try_place(&self, room: &mut Room) -> Option<Vec<(Place, Arc<Watch>)>> {
        let gpu = room.gpus.get_mut(&self.gpu)?;
        if gpu.queue.first() != Some(&(self.priority, self.number)) {
            return None;
        }
        let places = gpu.place(&self.needs)?;
        let grid = room.grids.get_mut(&self.number)?;
        grid.waiting -= self.needs.cluster_size;
        if grid.waiting == 0 {
            gpu.queue.remove(&(self.priority, self.number));
            CHANGED.notify_all();
        }
        let watched: Vec<_> = places.into_iter().map(|place| (place, Arc::<Watch>::default())).collect();
        grid.running.extend(watched.iter().map(|(_, watch)| watch.clone()));
        Some(watched)
    }

    /// A block has ended.
    pub(crate) fn leave(&self, place: Place, watch: &Arc<Watch>) {
        let mut room = lock(&ROOM);
        let room = room.get_or_insert_default();
        if let Some(gpu) = room.gpus.get_mut(&self.gpu) {
            gpu.leave(&self.needs, &[place]);
        }
        if let Some(grid) = room.grids.get_mut(&self.number) {
            grid.running.retain(|other| !Arc::ptr_eq(other, watch));
        }
        CHANGED.notify_all();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut room = lock(&ROOM);
        let room = room.get_or_insert_default();
        room.grids.remove(&self.number);
        if self.gpu.1.is_some() {
            room.gpus.remove(&self.gpu);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Gpu, Needs, processing_clusters};

    const PLAIN: Needs = Needs { threads: 512, registers: 32, shared_bytes: 0, cluster_size: 1 };

    #[test]
    fn each_limit_counts() {
        let fit = |needs: Needs| needs.blocks_per_multiprocessor();
        assert_eq!(fit(PLAIN), 4, "threads");
        assert_eq!(fit(Needs { threads: 32, ..PLAIN }), 32, "blocks");
        assert_eq!(fit(Needs { threads: 33, ..PLAIN }), 32, "warps");
        assert_eq!(fit(Needs { registers: 64, ..PLAIN }), 2, "registers");
        assert_eq!(fit(Needs { registers: 65, ..PLAIN }), 1, "registers, of which a warp gets whole units");
        assert_eq!(
            fit(Needs { threads: 64, registers: 255, ..PLAIN }),
            4,
            "two warps in each of two partitions"
        );
        assert_eq!(fit(Needs { shared_bytes: 115_712, ..PLAIN }), 2, "shared memory");
        assert_eq!(fit(Needs { shared_bytes: 115_713, ..PLAIN }), 1, "shared memory, with what is reserved");
        assert_eq!(fit(Needs { threads: 1024, registers: 128, ..PLAIN }), 0, "none");
    }

    #[test]
    fn grids_share_a_gpu() {
        let mut gpu = Gpu::new();
        let half = Needs { threads: 1024, ..PLAIN };
        let places: Vec<_> = (0..132).filter_map(|_| gpu.place(&half)).collect();
        assert_eq!(places.len(), 132);
        let other = Needs { threads: 1024, registers: 16, ..PLAIN };
        assert_eq!(std::iter::from_fn(|| gpu.place(&other)).count(), 132, "beside them");
        assert!(gpu.place(&PLAIN).is_none());
        gpu.leave(&half, &places[7]);
        assert!(gpu.place(&PLAIN).is_some());
    }

    #[test]
    fn processing_clusters_have_all_multiprocessors() {
        assert_eq!(processing_clusters(132), [16, 16, 16, 18, 16, 16, 16, 18]);
        assert_eq!(processing_clusters(37).iter().sum::<u32>(), 37);
    }

    #[test]
    fn clusters_lie_in_one_processing_cluster() {
        let needs = Needs { threads: 1024, registers: 64, cluster_size: 8, ..PLAIN };
        let mut gpu = Gpu::new();
        assert_eq!(std::iter::from_fn(|| gpu.place(&needs)).count(), 16);
        assert_eq!(needs.clusters(), 16, "of 132 multiprocessors, 4 are left over");
        assert!(gpu.place(&Needs { cluster_size: 1, ..needs }).is_some());
    }
}
