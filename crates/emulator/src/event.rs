//! Events: points in streams.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::Instant,
};

use crate::{
    Code, lock,
    races::{order, threads::Knowledge},
    stream::Capture,
    wait,
};

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
    passed: Mutex<Option<(Instant, Knowledge)>>,
    changed: Condvar,
}

impl Mark {
    pub(crate) fn set(&self) {
        let known = order::get().known;
        order::join(&known);
        *lock(&self.passed) = Some((Instant::now(), known));
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self) {
        let mut passed = lock(&self.passed);
        while passed.is_none() {
            passed = wait(&self.changed, passed);
        }
        if let Some((_, known)) = &*passed {
            order::join(known);
        }
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
            Some(mark) => match &*lock(&mark.passed) {
                Some((_, known)) => {
                    order::join(known);
                    Ok(())
                }
                None => Err(Code::NOT_READY),
            },
            None => Ok(()),
        }
    }

    pub(crate) fn wait(&self) {
        if let Ok(Some(mark)) = self.mark() {
            mark.wait();
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), Code> {
        self.mark()?.iter().for_each(|mark| mark.wait());
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
