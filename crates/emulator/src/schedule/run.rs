//! The scheduler: who runs, and until when.
//!
//! Each fiber has a priority, which follows from its block's, its warp's or its own number: some blocks run ahead as a whole, in others each
//! thread goes its own way. The highest runs until it waits, or until the next change: after a random number of accesses, whoever
//! runs gets another priority, mostly the lowest. Those of one priority take turns, and now and then the lowest become the
//! highest, so that none waits for ever for others that only seem to work. A fiber that has looked at the same value again waits until
//! the value changes.

use std::{
    cell::{Cell, RefCell},
    sync::OnceLock,
    thread,
};

use super::{
    Random,
    fibers::{ENDS, LOOKS, PASSES, Pace, Running, SLEEPS_IN_BLOCK, SLEEPS_IN_WARP, SPINS, Start},
    levels::{LEVELS, Levels},
    mixed,
    parked::{Lot, Parked},
    setting, tasks,
    tasks::Task,
    time::{Clock, Next},
    trace,
};
use crate::room;

/// The mean number of accesses between two changes, of which one is in force for some changes.
const GRAINS: [u64; 4] = [32, 256, 2048, 16384];
const CHANGES_OF_GRAIN: u64 = 64;
/// After so many steps the lowest priority becomes the highest.
const AGE: u64 = 1 << 16;

#[derive(Debug, Clone, Copy)]
enum Who {
    Task(usize),
    Fiber(u32, u16),
}

struct Scheduler {
    random: Random,
    /// Who can run.
    ready: Levels<Who>,
    blocks: Vec<Option<Running>>,
    free: Vec<u32>,
    running: usize,
    tasks: Vec<Option<Box<Task>>>,
    waiting: Vec<usize>,
    parked: Lot,
    clock: Clock,
    begun: u64,
    steps: u64,
    /// Of all that was decided.
    hash: u64,
    until_change: i64,
    grain: u64,
    changes: u64,
    works: u64,
}

thread_local! {
    static NEW_BLOCKS: RefCell<Vec<Start>> = const { RefCell::new(Vec::new()) };
    // Boxed, as its stack knows where the task is.
    #[allow(clippy::vec_box)]
    static NEW_TASKS: RefCell<Vec<Box<Task>>> = const { RefCell::new(Vec::new()) };
    /// What the running fiber has, on the scheduler's thread.
    static RUNNING: Cell<Option<(*mut Pace, *const super::fibers::Turn)>> = const { Cell::new(None) };
}

/// The scheduler begins, at the first submission.
pub(super) fn begin() {
    static THREAD: OnceLock<()> = OnceLock::new();
    THREAD.get_or_init(|| {
        let thread = thread::Builder::new().name("emulated GPUs".into());
        let run = || {
            let _failure = Failure;
            Scheduler::new().run()
        };
        thread.spawn(run).expect("a thread for the scheduler");
    });
}

/// Without the scheduler nothing goes on: if it panics, the process ends.
struct Failure;

impl Drop for Failure {
    fn drop(&mut self) {
        trace::failed();
        std::process::abort();
    }
}

pub(super) fn add_task(task: Box<Task>) {
    NEW_TASKS.with_borrow_mut(|tasks| tasks.push(task));
}

/// A block begins, whose cluster is begun by the same task before it waits.
pub(crate) fn start(block: Start) {
    NEW_BLOCKS.with_borrow_mut(|blocks| blocks.push(block));
}

/// A task waits until the condition is met.
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    assert!(tasks::is_task(), "only tasks wait for each other");
    if !condition() {
        tasks::wait(&mut condition);
    }
}

/// An access of the fiber that runs: the scheduler may switch.
pub(crate) fn accessed() {
    if let Some((pace, turn)) = RUNNING.get() {
        // SAFETY: of the scheduler and of the block that runs, on this thread.
        let left = unsafe {
            (*pace).left -= 1;
            (*pace).left
        };
        if left <= 0 {
            Running::leave(turn);
        }
    }
}

impl Scheduler {
    fn new() -> Self {
        let seed = setting().map_or(0, |setting| setting.seed);
        let mut random = Random(mixed(seed));
        let grain = GRAINS[random.below(4) as usize];
        let until_change = 1 + random.below(2 * grain) as i64;
        Self {
            random,
            ready: Levels::new(),
            blocks: Vec::new(),
            free: Vec::new(),
            running: 0,
            tasks: Vec::new(),
            waiting: Vec::new(),
            parked: Lot::new(),
            clock: Clock::new(),
            begun: 0,
            steps: 0,
            hash: mixed(seed),
            until_change,
            grain,
            changes: 0,
            works: 0,
        }
    }

    fn run(mut self) -> ! {
        loop {
            while let Some(work) = trace::admit(self.steps, self.hash) {
                self.clock.goes_on();
                work();
                self.take_in();
            }
            match self.ready.pop() {
                Some(Who::Task(task)) => self.run_task(task),
                Some(Who::Fiber(block, thread)) => self.run_fiber(block, thread),
                None => self.idle(),
            }
        }
    }

    fn decided(&mut self, what: u64) {
        self.steps += 1;
        self.hash = mixed(self.hash ^ what);
        trace::at(self.steps, self.hash);
        if self.steps.is_multiple_of(AGE) {
            self.ready.raise_lowest();
        }
    }

    fn push(&mut self, level: u64, who: Who) {
        self.ready.push(level, who);
    }

    /// New tasks and blocks, and tasks whose conditions are met.
    fn take_in(&mut self) {
        for task in NEW_TASKS.take() {
            let at = self.tasks.iter().position(Option::is_none).unwrap_or_else(|| {
                self.tasks.push(None);
                self.tasks.len() - 1
            });
            self.tasks[at] = Some(task);
            let level = self.random.below(LEVELS);
            self.push(level, Who::Task(at));
        }
        for block in NEW_BLOCKS.take() {
            self.begun += 1;
            self.running += 1;
            let block = Running::begin(block, &raw mut *self.clock.pace, self.begun, self.random.next());
            let at = self.free.pop().unwrap_or_else(|| {
                self.blocks.push(None);
                self.blocks.len() as u32 - 1
            });
            // Each block has another order of its threads.
            let first = self.random.below(u64::from(block.threads));
            let threads = block.threads;
            self.blocks[at as usize] = Some(block);
            for thread in 0..threads {
                self.add_fiber(at, ((u64::from(thread) + first) % u64::from(threads)) as u16);
            }
            self.clock.goes_on();
        }
        let mut at = 0;
        while at < self.waiting.len() {
            let task = self.waiting[at];
            if self.tasks[task].as_mut().is_some_and(|task| task.is_ready()) {
                self.waiting.remove(at);
                let level = self.random.below(LEVELS);
                self.push(level, Who::Task(task));
            } else {
                at += 1;
            }
        }
    }

    fn add_fiber(&mut self, block: u32, thread: u16) {
        let level = self.blocks[block as usize].as_ref().map_or(0, |of| of.level(thread, LEVELS));
        self.push(level, Who::Fiber(block, thread));
    }

    fn run_task(&mut self, at: usize) {
        self.decided(at as u64 | 1 << 62);
        let is_over = self.tasks[at].as_mut().is_none_or(|task| task.resume());
        if is_over {
            self.tasks[at] = None;
        } else {
            self.waiting.push(at);
        }
        self.clock.goes_on();
        self.take_in();
    }

    fn run_fiber(&mut self, at: u32, thread: u16) {
        let Some(block) = self.blocks[at as usize].as_mut() else { return };
        let pace = &raw mut *self.clock.pace;
        // SAFETY: the scheduler's, which modules change while their fibers run.
        unsafe { (*pace).left = self.until_change };
        RUNNING.set(Some((pace, &raw const *block.turn)));
        block.resume(thread);
        RUNNING.set(None);
        // SAFETY: as above.
        let left = unsafe { (*pace).left };
        let used = (self.until_change - left).max(1);
        self.until_change -= used;
        self.clock.pass(used as u64);
        let why = block.turn.why;
        let what = block.number << 32 | u64::from(thread) << 16 | u64::from(why);
        match why {
            LOOKS | SPINS => {
                block.watch.set(block.turn.at, block.turn.pc);
                let looks = (block.turn.looks, block.turn.looks_count as usize);
                let (number, time) = (block.number, block.parks(thread));
                let last = if why == LOOKS { block.turn.at } else { 0 };
                self.parked.add(Parked { block: at, thread, number, time, looks }, last, &self.blocks);
            }
            ENDS => block.alive -= 1,
            _ => {}
        }
        match why {
            SLEEPS_IN_WARP => self.call(at, usize::from(thread) / 32..usize::from(thread) / 32 + 1),
            SLEEPS_IN_BLOCK => self.call(at, 0..32),
            _ => {}
        }
        let Some(block) = self.blocks[at as usize].as_mut() else { return };
        let (woken, is_over) = (block.turn.woken().len(), block.alive == 0);
        for index in 0..woken {
            let thread = self.blocks[at as usize].as_ref().map_or(0, |block| block.turn.woken()[index]);
            self.add_fiber(at, thread);
        }
        self.decided(what ^ (used as u64) << 40);
        if is_over && let Some(block) = self.blocks[at as usize].take() {
            block.end();
            self.free.push(at);
            self.running -= 1;
            self.take_in();
        }
        let is_change = self.until_change <= 0;
        if why == PASSES {
            self.change(at, thread);
        }
        if is_change {
            self.draw();
        }
    }

    /// Whoever runs gets another priority.
    fn change(&mut self, at: u32, thread: u16) {
        let what = self.random.next();
        if let Some(block) = self.blocks[at as usize].as_mut() {
            match what % 8 {
                0 => block.salt = self.random.next(),
                1 => block.grain = block.grain_of(what >> 8),
                2 => return self.push((what >> 8) % LEVELS, Who::Fiber(at, thread)),
                _ => {
                    self.push(0, Who::Fiber(at, thread));
                    self.look_at_written();
                    return;
                }
            }
            self.add_fiber(at, thread);
        }
        self.look_at_written();
    }

    fn draw(&mut self) {
        self.changes += 1;
        if self.changes.is_multiple_of(CHANGES_OF_GRAIN) {
            self.grain = GRAINS[self.random.below(4) as usize];
        }
        self.until_change = 1 + self.random.below(2 * self.grain) as i64;
    }

    /// Fibers that have waited for memory go on. Returns whether there are any.
    fn go_on(&mut self, fibers: &[(u32, u16)]) -> bool {
        for &(block, thread) in fibers {
            if let Some(block) = self.blocks[block as usize].as_mut() {
                block.parked[usize::from(thread) / 32] &= !(1 << (thread % 32));
                self.parked.count -= 1;
            }
            self.add_fiber(block, thread);
        }
        !fibers.is_empty()
    }

    /// A thread waits for others, of its warp or of its block: they may wait for memory, and look again.
    fn call(&mut self, at: u32, warps: std::ops::Range<usize>) {
        let Some(block) = self.blocks[at as usize].as_ref() else { return };
        if block.parked[warps.clone()].iter().all(|lanes| *lanes == 0) {
            return;
        }
        let lanes = |warp: usize| {
            (0..32)
                .filter(move |lane| block.parked[warp] >> lane & 1 != 0)
                .map(move |lane| (at, (warp * 32 + lane) as u16))
        };
        let called: Vec<_> = warps.flat_map(lanes).collect();
        self.go_on(&called);
    }

    fn look_at_written(&mut self) -> bool {
        let some = self.parked.written(&self.clock.pace, &self.blocks);
        self.go_on(&some)
    }

    /// Nobody can go on: all wait for memory, for the host, or for time.
    fn idle(&mut self) {
        if self.works != self.clock.pace.works {
            self.works = self.clock.pace.works;
            self.clock.goes_on();
        }
        if self.look_at_written() {
            return;
        }
        let changed = self.parked.changed(&self.blocks);
        if self.go_on(&changed) {
            return;
        }
        if self.running == 0 {
            return trace::wait_for_submission(self.steps);
        }
        match self.clock.still(self.steps) {
            Next::Submission => {}
            Next::Never => room::report_circle(true),
            Next::Step { is_long } => {
                if is_long {
                    room::report_circle(false);
                }
                // All look again: some may have seen a value twice without waiting for another.
                let all = self.parked.all(&self.blocks);
                self.go_on(&all);
                self.decided(1 << 63);
            }
        }
    }
}
