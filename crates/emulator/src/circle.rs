//! The circle of grids, streams and blocks that wait for each other when nothing can move.
//!
//! A grid whose blocks have no place waits for the grids that run on its GPU. Of a grid that looks at memory the emulator does not know who
//! would write there; kernels of one name wait for each other, so it is taken to wait for those grids of its name that lack room on other GPUs.

use std::{
    collections::{BTreeMap, HashSet},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
};

use crate::{lock, memory, queue, races, room::Needs, schedule};

/// The state that a block publishes while it runs; the device's side, types.hpp, has the same layout.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Rounds of its threads since one of them did other than look at memory.
    pub rests: AtomicU32,
    /// Rounds in which one did.
    pub moves: AtomicU32,
    /// Where a thread looked last, and the address of the instruction if it is known.
    pub looks_at: AtomicUsize,
    pub pc: AtomicUsize,
}

impl Watch {
    /// A thread of the block has looked there, and waits.
    pub(crate) fn set(&self, at: usize, pc: usize) {
        self.looks_at.store(at, Ordering::Relaxed);
        self.pc.store(pc, Ordering::Relaxed);
    }
}

/// A grid that has not ended.
#[derive(Debug)]
pub(crate) struct Resident {
    pub name: String,
    pub device: usize,
    pub stream: u64,
    pub needs: Needs,
    /// Blocks that have no place yet.
    pub waiting: u32,
    /// The blocks that run.
    pub running: Vec<Arc<Watch>>,
}

/// A block counts as waiting once it has looked at memory in this number of rounds, and has done nothing else.
const RESTS: u32 = 64;

/// How much has been done so far, if blocks run and all of them only look.
pub(crate) fn still<'r>(grids: impl Iterator<Item = &'r Resident>) -> Option<u64> {
    let mut moves = None;
    for watch in grids.flat_map(|grid| &grid.running) {
        if watch.rests.load(Ordering::Relaxed) < RESTS {
            return None;
        }
        *moves.get_or_insert(0) += u64::from(watch.moves.load(Ordering::Relaxed)) + 1;
    }
    moves
}

/// What was reported, for tests.
static TEXTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[cfg(test)]
pub(crate) fn texts() -> Vec<String> {
    lock(&TEXTS).clone()
}

/// Whether blocks wait for room, or streams for their turn.
pub(crate) fn waits_for_room(grids: &BTreeMap<u64, Resident>) -> bool {
    grids.values().any(|grid| grid.waiting != 0) || !queue::behind().is_empty()
}

/// Reports all grids that wait, unless the same was reported.
pub(crate) fn report(grids: &BTreeMap<u64, Resident>) {
    let what = if waits_for_room(grids) { ", and work waits for room" } else { "" };
    let mut text = format!("emulator: nothing moves{what}\n");
    for grid in grids.values() {
        text.push_str(&format!("  {}: {}\n", called(grid), state(grid)));
    }
    for line in queue::behind() {
        text.push_str(&format!("  {line}\n"));
    }
    if let Some(circle) = find(grids) {
        let names: Vec<String> = circle.iter().map(|number| called(&grids[number])).collect();
        text.push_str(&format!("  circle: {}\n", names.join(" waits for ")));
    }
    let mut texts = lock(&TEXTS);
    if !texts.contains(&text) {
        eprint!("{text}");
        schedule::failed();
        texts.push(text);
    }
}

fn called(grid: &Resident) -> String {
    format!("{} of stream {} on GPU {}", grid.name, grid.stream, grid.device)
}

fn state(grid: &Resident) -> String {
    let mut parts = Vec::new();
    if grid.waiting != 0 {
        let needs = grid.needs;
        parts.push(format!(
            "{} blocks wait for room, each of {} threads with {} registers and {} bytes of shared memory",
            grid.waiting, needs.threads, needs.registers, needs.shared_bytes
        ));
    }
    if let Some(one) = grid.running.first() {
        parts.push(format!("{} blocks run, and look at {}", grid.running.len(), looked(one)));
    }
    parts.join("; ")
}

fn looked(watch: &Watch) -> String {
    let at = watch.looks_at.load(Ordering::Relaxed);
    let memory = memory::region_of(at as u64);
    let memory = memory.map_or_else(
        || "no memory of a GPU".to_owned(),
        |region| format!("{:#x} of an allocation of GPU {}", at as u64 - region.base, region.device),
    );
    match watch.pc.load(Ordering::Relaxed) {
        0 => memory,
        pc => format!("{memory}, at {}", races::line_of(pc as u64)),
    }
}

/// The first circle: the grids on it, of which the last is the first again.
fn find(grids: &BTreeMap<u64, Resident>) -> Option<Vec<u64>> {
    let next = |of: &Resident| -> Vec<u64> {
        let holds =
            |other: &Resident| other.device == of.device && !other.running.is_empty() && !ptr::eq(of, other);
        let lacks =
            |other: &Resident| other.waiting != 0 && other.device != of.device && other.name == of.name;
        let is_next =
            |other: &Resident| of.waiting != 0 && holds(other) || !of.running.is_empty() && lacks(other);
        grids.iter().filter(|(_, other)| is_next(other)).map(|(number, _)| *number).collect()
    };
    let mut over = HashSet::new();
    let mut path: Vec<u64> = Vec::new();
    // Depth first: for each grid of the path, those that it waits for and that were not looked at.
    for &start in grids.keys() {
        let mut left = vec![vec![start]];
        while let Some(choices) = left.last_mut() {
            let Some(number) = choices.pop() else {
                left.pop();
                over.extend(path.pop());
                continue;
            };
            if let Some(from) = path.iter().position(|other| *other == number) {
                let mut circle = path.split_off(from);
                circle.push(number);
                return Some(circle);
            }
            if !over.contains(&number) {
                path.push(number);
                left.push(next(&grids[&number]));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::CString,
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        thread,
        time::{Duration, Instant},
    };

    use super::texts;
    use crate::{
        driver,
        execution::{Grid, Parameter},
        kernel, memory,
        room::{Needs, multiprocessors},
        stream::Stream,
    };

    /// Each block counts itself, and waits for those of the other GPU.
    const SOURCE: &str = r#"
        #define KERNEL(name) extern "C" __global__ void name(unsigned* arrived, unsigned all) { \
            if (threadIdx.x != 0) return;                                                       \
            atomicAdd_system(arrived, 1);                                                       \
            unsigned now;                                                                       \
            do asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory"); while (now < all); \
        }
        KERNEL(circle_one)
        KERNEL(circle_two)
    "#;

    /// Each of two kernels fills a GPU, and waits for its peer on the other, where the other kernel was first.
    #[test]
    fn a_circle_over_two_gpus_is_named() {
        if std::process::Command::new("g++").arg("--version").output().is_err() {
            return eprintln!("skipped: no g++");
        }
        let library = kernel::compile(SOURCE, &["--gpu-architecture=sm_90a".to_owned()]).unwrap();
        // SAFETY: a library that was just compiled; modules and functions stay loaded.
        let functions = unsafe {
            let module = driver::load(library.as_ptr()).unwrap();
            ["circle_one", "circle_two"]
                .map(|name| &*driver::function(module, CString::new(name).unwrap().as_ptr()).unwrap())
        };
        let needs = Needs { threads: 32, registers: 32, shared_bytes: 200 << 10, cluster_size: 1 };
        let at = memory::allocate(0, 4096, memory::Kind::Plain).unwrap();
        // SAFETY: just allocated; kernels access it atomically, too.
        let arrived = unsafe {
            std::ptr::write_bytes(at as *mut u8, 0, 4096);
            std::slice::from_raw_parts(at as *const AtomicU32, 2)
        };
        let wait_until = |is_so: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !is_so() && start.elapsed() < Duration::from_secs(100) {
                thread::sleep(Duration::from_millis(5));
            }
            assert!(is_so());
        };
        let mut streams = Vec::new();
        for (device, kernel) in [(40, 0), (41, 1), (40, 1), (41, 0)] {
            let parameter = |value: u64| {
                let mut parameter = Box::new(Parameter([0; 4096]));
                parameter.0[..8].copy_from_slice(&value.to_le_bytes());
                parameter
            };
            let stream = Stream::new(device, 0);
            let grid = Arc::new(Grid {
                run: functions[kernel].run,
                scheduled: functions[kernel].scheduled,
                call: functions[kernel].call,
                parameters: [at + 4 * kernel as u64, u64::from(2 * multiprocessors())].map(parameter).into(),
                grid: [multiprocessors(), 1, 1],
                block: [32, 1, 1],
                cluster_size: 1,
                shared_bytes: 0,
                needs,
                device,
                stream: (stream.id, 0),
                name: ["circle_one", "circle_two"][kernel].to_owned(),
                is_programmatic: false,
            });
            stream.submit(Arc::new(move || grid.run()));
            streams.push(stream);
            wait_until(&|| streams.len() > 2 || arrived[kernel].load(Ordering::Relaxed) == multiprocessors());
        }
        wait_until(&|| texts().iter().any(|text| text.contains("circle_one")));
        arrived.iter().for_each(|arrived| arrived.store(2 * multiprocessors(), Ordering::Relaxed));
        for stream in streams {
            stream.synchronize().unwrap();
            stream.close();
        }
        memory::free(at).unwrap();
        let text = texts().into_iter().find(|text| text.contains("circle_one")).unwrap();
        let circle = text.lines().find(|line| line.contains("circle:")).expect(&text);
        for (kernel, device) in [("one", 40), ("two", 40), ("one", 41), ("two", 41)] {
            assert!(circle.contains(&format!("circle_{kernel} of stream")), "{text}");
            assert!(circle.contains(&format!("on GPU {device}")), "{text}");
        }
        assert!(text.contains("blocks wait for room") && text.contains("circle_one of stream"), "{text}");
    }
}
