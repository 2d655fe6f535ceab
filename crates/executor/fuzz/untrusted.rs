//! Everything that is done with an untrusted plan file: by the fuzzer, and by the tests for a bounded time.

use std::{
    ops::{Range, RangeInclusive},
    sync::LazyLock,
    time::Duration,
};

use antiphon_executor::{ExecutorError, LoadedPlan, Options};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_plan::{
    Plan,
    picture::html,
    simulate::{Cluster, fitting, play},
    verify::{Options as Proof, VerifiedPlan},
};

/// How far a file came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// It is no plan.
    Nowhere,
    /// It is a plan, and was judged and played, but not executed.
    Judged,
    /// It ran to its end; whether it is proved.
    Executed { proved: bool },
}

/// How many ranks may run.
const RANKS: RangeInclusive<usize> = 1..=3;
/// More bytes of a tensor than it takes.
const MOST_BYTES: u64 = 1 << 20;

/// Reads, writes, plays, draws, judges, loads and executes a plan. Panics where that is not as it must be.
pub fn receive(bytes: &[u8]) -> Came {
    static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::from_spec("h200x8").expect("a preset"));
    let Ok(plan) = Plan::from_json(bytes) else { return Came::Nowhere };
    assert_eq!(Plan::from_json(plan.to_json().as_bytes()).as_ref(), Ok(&plan), "what is written is read");
    if let Ok((played, _)) = play(&plan, &CLUSTER, fitting(&plan, 1 << 16))
        && played.spans.len() < 1 << 10
    {
        html(&plan, &CLUSTER, &played, &[]);
    }
    match VerifiedPlan::new(plan.clone(), &Proof::default()) {
        Ok(plan) if RANKS.contains(&plan.plan().num_ranks()) => {
            // Patience enough for a busy machine: what is proved is never stuck.
            let load = |comm: &Communicator| LoadedPlan::load(comm, &plan, Options::default());
            let done = execute(plan.plan(), Duration::from_secs(30), load);
            assert!(!matches!(done, Err(ExecutorError::Stuck { .. })), "proved, but {done:?}");
            done.map_or(Came::Judged, |()| Came::Executed { proved: true })
        }
        Err(_) if plan.num_ranks() == 1 => {
            // SAFETY: there is one rank, whose thread blocks share a thread.
            let load = |comm: &Communicator| unsafe {
                LoadedPlan::load_unproved(comm, plan.clone(), Options::default())
            };
            let done = execute(&plan, Duration::from_millis(20), load);
            done.map_or(Came::Judged, |()| Came::Executed { proved: false })
        }
        _ => Came::Judged,
    }
}

/// Executes a plan with small tensors, and with some that go in slices.
fn execute(
    plan: &Plan,
    timeout: Duration,
    load: impl Fn(&Communicator) -> Result<LoadedPlan, ExecutorError> + Sync,
) -> Result<(), ExecutorError> {
    let gpu = &plan.gpus[0];
    let calls = [40, 5000].map(|least: u64| {
        // A whole number of elements of 4 bytes, and of the plan's units.
        let unit = plan.buffer_alignment.saturating_mul(4);
        let chunk = least.checked_next_multiple_of(unit.max(1)).unwrap_or(u64::MAX);
        let bytes = [gpu.input_chunks, gpu.output_chunks].map(|chunks| chunks.saturating_mul(chunk));
        bytes
            .iter()
            .all(|&bytes| bytes <= MOST_BYTES)
            .then(|| bytes.map(|bytes| vec![1f32; bytes as usize / 4]))
    });
    let results = LocalWorld::run_with(plan.num_ranks(), timeout, |comm| {
        let mut loaded = load(&comm)?;
        // Without tensors of a size that it takes, it is refused.
        let none = [vec![], vec![]];
        let [first, second] = calls.each_ref().map(|call| call.as_ref().unwrap_or(&none));
        loaded.execute(&comm, &first[0], &mut first[1].clone())?;
        loaded.execute(&comm, &second[0], &mut second[1].clone())?;
        if first[0].len() == first[1].len() {
            loaded.execute_in_place(&comm, &mut first[0].clone())?;
        }
        loaded.free(&comm)
    });
    results.into_iter().collect()
}

/// A small generator of numbers, the same in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

/// The text cut, with a byte changed, an object less, twice or in another's place, or another number.
pub fn mutated(text: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = text.to_vec();
    match numbers.next(10) {
        0 => bytes.truncate(numbers.next(text.len())),
        1 if !text.is_empty() => bytes[numbers.next(text.len())] = numbers.next(256) as u8,
        2..=4 => {
            let objects = objects(text);
            let [Some(one), Some(other)] = [(); 2].map(|()| objects.get(numbers.next(objects.len()))) else {
                return bytes;
            };
            let twice = [&text[one.clone()], b",", &text[one.clone()]].concat();
            let (place, new) = match numbers.next(3) {
                // With the comma that was between it and its neighbour.
                0 if text.get(one.end) == Some(&b',') => (one.start..one.end + 1, &[][..]),
                0 => (one.start.saturating_sub(1)..one.end, &[][..]),
                1 => (one.clone(), &twice[..]),
                _ => (one.clone(), &text[other.clone()]),
            };
            bytes.splice(place, new.iter().copied());
        }
        _ => {
            let old = numerals(text);
            let new = ["0", "1", "2", "3", "7", "16", "1000000", "4294967295", "18446744073709551615"];
            if let Some(old) = old.get(numbers.next(old.len())) {
                bytes.splice(old.clone(), new[numbers.next(new.len())].bytes());
            }
        }
    }
    bytes
}

/// Where objects stand.
fn objects(text: &[u8]) -> Vec<Range<usize>> {
    let (mut open, mut objects) = (Vec::new(), Vec::new());
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'{' => open.push(at),
            b'}' => objects.extend(open.pop().map(|start| start..at + 1)),
            _ => {}
        }
    }
    objects
}

fn numerals(text: &[u8]) -> Vec<Range<usize>> {
    let is_digit = |at: usize| text.get(at).is_some_and(u8::is_ascii_digit);
    let starts = (0..text.len()).filter(|&at| is_digit(at) && (at == 0 || !is_digit(at - 1)));
    starts.map(|start| start..(start..).find(|&at| !is_digit(at)).expect("an end")).collect()
}
