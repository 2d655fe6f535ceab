//! Streams, and their capture into graphs.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Code,
    event::{Event, Mark, PAUSE, Recorded},
    graph::{Graph, Node},
    lock,
    queue::Turn,
    races::{
        order::{self, Order},
        threads::Knowledge,
    },
    room, schedule, wait,
};

/// Work of a stream, which a graph repeats.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

/// A stream: a thread that does its work in order.
pub(crate) struct Stream {
    pub device: usize,
    /// No other stream has it, also when this one is gone.
    pub id: u64,
    /// The least number is the highest priority.
    pub priority: i32,
    /// Its device, and its number among the streams of that, for records of schedules.
    label: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Submitted>,
    /// Submitted and not done.
    pending: usize,
    has_worker: bool,
    is_closed: bool,
    capture: Option<Capturing>,
    /// The order behind all work that is done.
    order: Order,
}

struct Submitted {
    work: Work,
    /// What the host knew then.
    known: Knowledge,
    turn: Turn,
    /// Whether it only waits for an event.
    is_wait: bool,
}

#[derive(Clone)]
struct Capturing {
    capture: Arc<Capture>,
    /// What the next node waits for.
    tail: Vec<usize>,
    is_origin: bool,
}

pub(crate) struct Capture {
    number: u64,
    /// None when it has ended.
    nodes: Mutex<Option<Vec<Node>>>,
}

static ALL: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

/// Waits for all streams of the device.
pub(crate) fn synchronize_device(device: usize) -> Result<(), Code> {
    let streams: Vec<_> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    streams.iter().filter(|stream| stream.device == device).try_for_each(|stream| stream.synchronize())
}

impl Stream {
    pub(crate) fn new(device: usize, priority: i32) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        static COUNTS: Mutex<BTreeMap<usize, u64>> = Mutex::new(BTreeMap::new());
        let mut counts = lock(&COUNTS);
        let count = counts.entry(device).or_default();
        *count += 1;
        let label = format!("{device}.{count}");
        let (state, changed) = (Mutex::default(), Condvar::new());
        let stream = Arc::new(Self { device, id, priority, label, state, changed });
        let mut all = lock(&ALL);
        all.retain(|stream| stream.strong_count() > 0);
        all.push(Arc::downgrade(&stream));
        stream
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        if state.capture.as_ref().is_some_and(|of| lock(&of.capture.nodes).is_none()) {
            state.capture = None;
        }
        state
    }

    /// Runs the work behind what was submitted before, or captures it.
    pub(crate) fn submit(self: &Arc<Self>, work: Work) {
        let mut state = self.state();
        match &mut state.capture {
            Some(capturing) => capturing.add(work, Arc::as_ptr(self) as usize),
            None => self.push(state, work, false),
        }
    }

    fn push(self: &Arc<Self>, mut state: MutexGuard<'_, State>, work: Work, is_wait: bool) {
        if schedule::is_on() {
            drop(state);
            return schedule::submit(&self.label, || {
                let turn = Turn::new(self.device, self.id);
                let submitted = Submitted { work, known: order::host(), turn, is_wait };
                lock(&self.state).pending += 1;
                let stream = self.clone();
                Box::new(move || stream.take_in(submitted))
            });
        }
        let turn = Turn::new(self.device, self.id);
        state.queue.push_back(Submitted { work, known: order::host(), turn, is_wait });
        state.pending += 1;
        if !state.has_worker {
            state.has_worker = true;
            let stream = self.clone();
            let thread = std::thread::Builder::new().name("emulated stream".into());
            thread.spawn(move || stream.work()).expect("a thread for a stream");
        }
        self.changed.notify_all();
    }

    /// The scheduler takes in work.
    fn take_in(self: Arc<Self>, submitted: Submitted) {
        let mut state = lock(&self.state);
        state.queue.push_back(submitted);
        if !std::mem::replace(&mut state.has_worker, true) {
            drop(state);
            schedule::spawn(move || self.work());
        }
    }

    fn work(&self) {
        if schedule::is_on() {
            // Another task may have worked for the stream before.
            order::set(lock(&self.state).order.clone());
        }
        loop {
            let mut state = lock(&self.state);
            let Submitted { work, known, turn, is_wait } = loop {
                match state.queue.pop_front() {
                    Some(work) => break work,
                    None if schedule::is_on() => {
                        state.has_worker = false;
                        return;
                    }
                    None if state.is_closed => return,
                    None => state = wait(&self.changed, state),
                }
            };
            drop(state);
            turn.wait(room::PATIENCE, room::look_for_circle);
            let waits = is_wait.then_some(turn);
            order::submitted(&known);
            work();
            drop(waits);
            drop(work);
            let mut state = lock(&self.state);
            state.pending -= 1;
            state.order = order::get();
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Lets the thread end when its work is done.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn query(&self) -> Result<(), Code> {
        let state = self.state();
        match (&state.capture, state.pending) {
            (Some(_), _) => Err(Code::CAPTURE_UNSUPPORTED),
            (None, _) if schedule::is_on() => {
                drop(state);
                self.query_scheduled()
            }
            (None, 0) => {
                order::join(&state.order.known);
                Ok(())
            }
            (None, _) => Err(Code::NOT_READY),
        }
    }

    /// A caller gets the answer that the work is not done only after a short wait.
    fn query_scheduled(&self) -> Result<(), Code> {
        let is_done = || lock(&self.state).pending == 0;
        if schedule::answer(&self.label, is_done, || order::join(&lock(&self.state).order.known)) {
            return Ok(());
        }
        let state = lock(&self.state);
        if state.pending != 0 {
            drop(self.changed.wait_timeout(state, PAUSE));
        }
        Err(Code::NOT_READY)
    }

    pub(crate) fn synchronize(&self) -> Result<(), Code> {
        let mut state = self.state();
        if state.capture.is_some() {
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        while state.pending != 0 {
            state = wait(&self.changed, state);
        }
        drop(state);
        schedule::joined(&self.label, || order::join(&lock(&self.state).order.known));
        Ok(())
    }

    /// The number of the capture.
    pub(crate) fn capture(&self) -> Option<u64> {
        self.state().capture.as_ref().map(|of| of.capture.number)
    }

    /// Ends the capture of the stream, if it is in one, without a graph.
    pub(crate) fn spoil_capture(&self) -> bool {
        let state = self.state();
        let capturing = state.capture.as_ref();
        capturing.is_some_and(|capturing| lock(&capturing.capture.nodes).take().is_some())
    }

    pub(crate) fn begin_capture(&self) -> Result<(), Code> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let mut state = self.state();
        if state.capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let capture = Arc::new(Capture { number, nodes: Mutex::new(Some(Vec::new())) });
        state.capture = Some(Capturing { capture, tail: Vec::new(), is_origin: true });
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Graph, Code> {
        let capturing = self.state().capture.take().ok_or(Code::ILLEGAL_STATE)?;
        if !capturing.is_origin {
            return Err(Code::CAPTURE_UNMATCHED);
        }
        let nodes = lock(&capturing.capture.nodes).take().ok_or(Code::ILLEGAL_STATE)?;
        let mut is_joined = vec![false; nodes.len()];
        let mut behind = capturing.tail;
        while let Some(node) = behind.pop() {
            if !std::mem::replace(&mut is_joined[node], true) {
                behind.extend(&nodes[node].after);
            }
        }
        match is_joined.iter().all(|&joined| joined) {
            true => Ok(Graph::new(nodes)),
            false => Err(Code::CAPTURE_UNJOINED),
        }
    }

    pub(crate) fn record(self: &Arc<Self>, event: &Arc<Event>, is_external: bool) {
        let mut state = self.state();
        match &mut state.capture {
            Some(_) if is_external => {
                let (event, label) = (event.clone(), self.label.clone());
                drop(state);
                self.submit(Arc::new(move || {
                    let mark = Mark::of_stream(&label);
                    mark.set();
                    *lock(&event.0) = Recorded::Mark(mark);
                }));
            }
            Some(capturing) => {
                *lock(&event.0) = Recorded::Captured(capturing.capture.clone(), capturing.tail.clone());
            }
            None => {
                let mark = Mark::of_stream(&self.label);
                *lock(&event.0) = Recorded::Mark(mark.clone());
                self.push(state, Arc::new(move || mark.set()), false);
            }
        }
    }

    pub(crate) fn wait_for(self: &Arc<Self>, event: &Arc<Event>, is_external: bool) -> Result<(), Code> {
        let mut state = self.state();
        if is_external {
            let event = event.clone();
            drop(state);
            self.submit(Arc::new(move || event.wait()));
            return Ok(());
        }
        let recorded = lock(&event.0).clone();
        match (recorded, &mut state.capture) {
            (Recorded::Captured(capture, after), of) => match of {
                None if lock(&capture.nodes).is_some() => {
                    *of = Some(Capturing { capture, tail: after, is_origin: false });
                }
                None => return Err(Code::CAPTURED_EVENT),
                Some(of) if Arc::ptr_eq(&of.capture, &capture) => of.tail.extend(after),
                Some(_) => return Err(Code::CAPTURE_MERGE),
            },
            (Recorded::Mark(_), Some(_)) => return Err(Code::CAPTURE_ISOLATION),
            (Recorded::Mark(mark), None) => self.push(state, Arc::new(move || mark.wait()), true),
            (Recorded::Never, _) => {}
        }
        Ok(())
    }

    pub(crate) fn launch(self: &Arc<Self>, graph: &Graph) {
        let graph = graph.clone();
        self.submit(Arc::new(move || graph.run()));
    }
}

impl Capturing {
    fn add(&mut self, work: Work, lane: usize) {
        if let Some(nodes) = &mut *lock(&self.capture.nodes) {
            nodes.push(Node { work, after: std::mem::take(&mut self.tail), lane });
            self.tail = vec![nodes.len() - 1];
        }
    }
}
