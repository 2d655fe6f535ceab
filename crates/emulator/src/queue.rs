//! The queues through which a GPU gets the work of its streams.
//!
//! There are eight, as CUDA has without `CUDA_DEVICE_MAX_CONNECTIONS`, and streams share them: work begins when all that is ahead in its queue
//! has begun. A wait for an event begins when it is over, so that it delays other streams, too.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Condvar, Mutex},
    time::Duration,
};

use crate::{lock, room, schedule};

const QUEUES: u64 = 8;

/// A device, and the number of its queue.
type Queue = (usize, u64);

#[derive(Default)]
struct Queues {
    submitted: u64,
    /// The streams of what has not begun, by the number of its submission.
    waiting: HashMap<Queue, BTreeMap<u64, u64>>,
}

static ALL: Mutex<Option<Queues>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// Work in a queue. When it is dropped, it has begun.
pub(crate) struct Turn {
    queue: Queue,
    number: u64,
}

impl Turn {
    /// Behind all that was submitted to the queue. Streams take queues in turn, the first of them by the seed.
    pub(crate) fn new(device: usize, stream: u64) -> Self {
        // Where grids have GPUs of their own, streams have queues of their own.
        let number = if room::is_shared() { (stream + crate::seed()) % QUEUES } else { stream };
        let queue = (device, number);
        let mut all = lock(&ALL);
        let all = all.get_or_insert_default();
        all.submitted += 1;
        all.waiting.entry(queue).or_default().insert(all.submitted, stream);
        Self { queue, number: all.submitted }
    }

    /// Waits until all that is ahead has begun, and calls the function each time that this has taken so long.
    pub(crate) fn wait(&self, patience: Duration, is_long: impl Fn()) {
        let is_first = |all: &Option<Queues>| {
            all.as_ref().and_then(|all| all.waiting[&self.queue].keys().next()) == Some(&self.number)
        };
        if schedule::is_on() {
            return schedule::wait_until(|| is_first(&lock(&ALL)));
        }
        let mut all = lock(&ALL);
        while !is_first(&all) {
            let (changed, timed_out) =
                CHANGED.wait_timeout(all, patience).unwrap_or_else(|poisoned| poisoned.into_inner());
            all = changed;
            if timed_out.timed_out() {
                drop(all);
                is_long();
                all = lock(&ALL);
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(waiting) = lock(&ALL).as_mut().and_then(|all| all.waiting.get_mut(&self.queue)) {
            waiting.remove(&self.number);
        }
        CHANGED.notify_all();
    }
}

/// What waits behind another stream, for a report.
pub(crate) fn behind() -> Vec<String> {
    let all = lock(&ALL);
    let mut texts = Vec::new();
    for ((device, _), waiting) in all.iter().flat_map(|all| &all.waiting) {
        let Some(first) = waiting.values().next() else { continue };
        let others = waiting.values().filter(|stream| *stream != first);
        texts.extend(others.map(|stream| {
            format!("stream {stream} waits behind stream {first} on GPU {device}, which share a queue")
        }));
    }
    texts.sort();
    texts.dedup();
    texts
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::{QUEUES, Turn, behind};

    #[test]
    fn streams_of_one_queue_begin_in_order() {
        let (first, second) = (Turn::new(50, 3), Turn::new(50, 3 + QUEUES));
        let other = Turn::new(50, 4);
        other.wait(Duration::from_secs(1), || panic!("nothing is ahead in its queue"));
        assert!(
            behind().contains(&"stream 11 waits behind stream 3 on GPU 50, which share a queue".to_owned())
        );
        let (sender, begun) = mpsc::channel();
        let thread = thread::spawn(move || {
            second.wait(Duration::from_secs(1), || {});
            sender.send(()).unwrap();
        });
        assert!(begun.recv_timeout(Duration::from_millis(50)).is_err());
        first.wait(Duration::from_secs(1), || panic!("nothing is ahead"));
        drop(first);
        begun.recv().unwrap();
        thread.join().unwrap();
    }
}
