//! Events: points in streams.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use crate::{
    Code, lock,
    races::{order, threads::Knowledge},
    schedule,
    stream::Capture,
    wait,
};

/// How long a question waits for its answer where one scheduler runs everything: a thread that asks again and again leaves it the processor.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// An event; with time or without.
pub(crate) struct Event(pub Mutex<Recorded>, bool);

#[derive(Clone)]
pub(crate) enum Recorded {
    Never,
    Mark(Arc<Mark>),
    Captured(Arc<Capture>, Vec<usize>),
}

/// A point in a stream.
#[derive(Default)]
pub(crate) struct Mark {
    /// The stream it is in, as records of schedules call it.
    stream: String,
    passed: Mutex<Option<(Instant, Knowledge)>>,
    changed: Condvar,
}

impl Mark {
    pub(crate) fn of_stream(stream: &str) -> Arc<Self> {
        Arc::new(Self { stream: format!("event-{stream}"), ..Self::default() })
    }

    pub(crate) fn set(&self) {
        let known = order::get().known;
        order::join(&known);
        *lock(&self.passed) = Some((schedule::now(), known));
        self.changed.notify_all();
    }

    fn is_passed(&self) -> bool {
        lock(&self.passed).is_some()
    }

    fn learn(&self) {
        if let Some((_, known)) = &*lock(&self.passed) {
            order::join(known);
        }
    }

    /// Work of a stream waits for it.
    pub(crate) fn wait(&self) {
        if schedule::is_on() {
            schedule::wait_until(|| self.is_passed());
        } else {
            self.block();
        }
        self.learn();
    }

    fn block(&self) {
        let mut passed = lock(&self.passed);
        while passed.is_none() {
            passed = wait(&self.changed, passed);
        }
    }

    /// Whether a thread of the host hears that it has passed. A thread that asks gets the answer "not yet" only after a short wait.
    fn query(&self) -> Result<(), Code> {
        if !schedule::is_on() {
            let is_passed = self.is_passed();
            self.learn();
            return if is_passed { Ok(()) } else { Err(Code::NOT_READY) };
        }
        let is_passed = schedule::answer(&self.stream, || self.is_passed(), || self.learn());
        if is_passed {
            return Ok(());
        }
        drop(self.changed.wait_timeout(lock(&self.passed), PAUSE));
        Err(Code::NOT_READY)
    }
}

impl Event {
    pub(crate) fn new(has_time: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Recorded::Never), has_time))
    }

    fn mark(&self) -> Result<Option<Arc<Mark>>, Code> {
        match &*lock(&self.0) {
            Recorded::Never => Ok(None),
            Recorded::Mark(mark) => Ok(Some(mark.clone())),
            Recorded::Captured(..) => Err(Code::CAPTURED_EVENT),
        }
    }

    pub(crate) fn query(&self) -> Result<(), Code> {
        match self.mark()? {
            Some(mark) => mark.query(),
            None => Ok(()),
        }
    }

    pub(crate) fn wait(&self) {
        if let Ok(Some(mark)) = self.mark() {
            mark.wait();
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), Code> {
        if let Some(mark) = self.mark()? {
            mark.block();
            schedule::joined(&mark.stream, || mark.learn());
        }
        Ok(())
    }

    pub(crate) fn milliseconds_since(&self, start: &Event) -> Result<f32, Code> {
        let at = |event: &Event| {
            let mark = event.mark()?.filter(|_| event.1).ok_or(Code::INVALID_HANDLE)?;
            let passed = lock(&mark.passed);
            passed.as_ref().map(|(at, _)| *at).ok_or(Code::NOT_READY)
        };
        Ok(at(self)?.saturating_duration_since(at(start)?).as_secs_f32() * 1e3)
    }
}
