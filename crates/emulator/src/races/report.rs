//! The text of a race: both accesses, and what is missing between them.

use std::{
    collections::{HashMap, HashSet},
    ffi::CStr,
    process::Command,
    sync::{Arc, Mutex},
};

use super::{
    Mode,
    access::{ACQUIRE, ASYNC, CONSTANT, COPY, END, Missing, READ, RELEASE, Race, STRONG, WRITE, scope_of},
    clocks::{Id, LANES},
    grids::{Grid, SCOPES},
    mode,
};
use crate::{lock, schedule};

#[derive(Default)]
struct Reports {
    places: HashMap<u64, String>,
    /// The pairs of places that were reported.
    pairs: HashSet<[String; 2]>,
    texts: Vec<String>,
    /// Lines that may race.
    allowed: HashSet<String>,
}

static REPORTS: Mutex<Option<Reports>> = Mutex::new(None);

/// What was reported so far.
#[cfg(test)]
pub(super) fn all() -> Vec<String> {
    lock(&REPORTS).get_or_insert_default().texts.clone()
}

/// These places, apart by spaces, may race: their text says why.
pub(crate) fn allow(places: &str) {
    let places = places.split_whitespace().map(str::to_owned);
    lock(&REPORTS).get_or_insert_default().allowed.extend(places);
}

/// The file and the line of an instruction.
pub(crate) fn line_of(pc: u64) -> String {
    place(&mut lock(&REPORTS).get_or_insert_default().places, pc)
}

/// Whether a line of this place says why it may race.
pub(super) fn may_race(pc: u64) -> bool {
    let mut reports = lock(&REPORTS);
    let reports = reports.get_or_insert_default();
    let place = place(&mut reports.places, pc);
    is_allowed(&reports.allowed, &place)
}

fn is_allowed(allowed: &HashSet<String>, place: &str) -> bool {
    place.split(" < ").any(|line| allowed.contains(line))
}

/// Reports a race, unless one of the same two places was. `grid` is the second one's.
pub(super) fn race(race: &Race, grid: &Arc<Grid>) {
    let mut reports = lock(&REPORTS);
    let reports = reports.get_or_insert_default();
    let (first, second) = (race.first, &race.second);
    let pair = [first.pc(), second.pc].map(|pc| place(&mut reports.places, pc));
    let memory = crate::memory::region_of(race.at as u64);
    let mut allowed = pair.iter().map(|place| is_allowed(&reports.allowed, place));
    // A copy that may race reads global memory; whoever looks at what it leaves in shared memory waits for it.
    let is_free = if memory.is_some() { allowed.any(|is| is) } else { allowed.all(|is| is) };
    if is_free || !reports.pairs.insert(pair.clone()) {
        return;
    }
    let before = Grid::of(first.id);
    let whom = before.as_ref().map_or("a thread that is gone".to_owned(), |of| thread(of, first.id));
    let memory =
        memory.map_or("shared memory".to_owned(), |region| format!("memory of GPU {}", region.device));
    let text = format!(
        "emulator: race at {:#x}, {memory}\n  first:   {} by {whom}\n           at {}\n  second:  {} by {}\n           at {}\n  missing: {}\n",
        race.at,
        described(first.what()),
        pair[0],
        described(second.what),
        thread(grid, second.id),
        pair[1],
        missing(race.missing),
    );
    eprint!("{text}");
    schedule::failed();
    reports.texts.push(text);
    if mode() == Mode::First {
        std::process::abort();
    }
}

fn missing(missing: Missing) -> String {
    match missing {
        Missing::Edge => "no release behind the first access that the second thread has acquired".to_owned(),
        Missing::Acquire(scope) => format!(
            "the second thread has read the release without acquiring it: fence.acq_rel.{} or ld.acquire.{}",
            SCOPES[scope], SCOPES[scope]
        ),
        Missing::Scope(has, needed) => format!(
            "both are strong, but one at scope {} only, and the smallest that has both threads is {}",
            SCOPES[has], SCOPES[needed]
        ),
        Missing::ProxyFence => {
            "the first is ordered before the copy, but no fence.proxy.async lies between them".to_owned()
        }
        Missing::CopyWait => "a wait for the first, which is a copy: its group or its mbarrier".to_owned(),
        Missing::Constant => {
            "ld.global.nc reads what nobody writes while its grid runs, and this is written then".to_owned()
        }
    }
}

fn described(what: u32) -> String {
    let is = |bit: u32| what & bit != 0;
    let access = match (is(READ), is(WRITE)) {
        (true, true) => "atomic",
        (true, false) => "read",
        _ => "write",
    };
    let order = match (is(ACQUIRE), is(RELEASE)) {
        (true, true) => "acq_rel",
        (true, false) => "acquire",
        (false, true) => "release",
        _ => "relaxed",
    };
    match () {
        () if is(ASYNC) => format!("{access} of a bulk copy (async proxy)"),
        () if is(COPY) => format!("{access} of cp.async"),
        () if is(STRONG) => format!("{order} {access} at scope {}", SCOPES[scope_of(what)]),
        () if is(CONSTANT) => format!("{access} by ld.global.nc"),
        () => format!("weak {access}"),
    }
}

fn thread(grid: &Grid, id: Id) -> String {
    let Some(name) = &grid.name else { return format!("GPU {}, a copy of a stream", grid.device) };
    let block = (id - grid.range.start) / grid.range.per_block;
    let third = grid.range.per_block / 3;
    let number = (id - grid.range.start) % grid.range.per_block % third;
    let [blocks, threads] = grid.dimensions;
    let of = |number: u32, [x, y, _]: [u32; 3]| [number % x, number / x % y, number / (x * y)];
    let ([a, b, c], [x, y, z]) = (of(block, blocks), of(number, threads));
    format!(
        "GPU {}, {name} (grid {} of the process), block {a},{b},{c}, thread {x},{y},{z} (warp {}, lane {})",
        grid.device,
        grid.number,
        number / LANES,
        number % LANES
    )
}

/// The file and the line of an instruction, with those that it was inlined into.
fn place(known: &mut HashMap<u64, String>, pc: u64) -> String {
    if pc == 0 {
        return "a copy or a fill by the driver".to_owned();
    }
    if pc == END {
        return "the end of the thread, with which its shared memory may go".to_owned();
    }
    known.entry(pc).or_insert_with(|| found(pc).unwrap_or_else(|| format!("{pc:#x}"))).clone()
}

fn found(pc: u64) -> Option<String> {
    // SAFETY: filled by dladdr, whose names stay as long as the library, and modules stay loaded.
    let (path, base) = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(pc as *const _, &raw mut info) == 0 {
            return None;
        }
        (CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned(), info.dli_fbase as u64)
    };
    // The name of a module is that of a descriptor of this process.
    let path = path.replace("/proc/self/", &format!("/proc/{}/", std::process::id()));
    let offset = format!("{:#x}", pc - base);
    let output = Command::new("addr2line").args(["-i", "-s", "-e", &path, &offset]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    // What the emulator has inlined says nothing.
    let lines: Vec<&str> = text
        .lines()
        .map(|line| line.split(" (discriminator").next().unwrap_or(line))
        .filter(|line| !line.starts_with("program.cpp") && !line.starts_with("??"))
        .collect();
    (!lines.is_empty()).then(|| lines.join(" < "))
}
