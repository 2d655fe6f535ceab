//! Sparse vector clocks.

/// For some timelines, up to which level all is done. Of the others nothing is known, and not even that they have begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<(u32, u32)>);

impl Clock {
    /// The level of a timeline.
    pub fn get(&self, timeline: u32) -> Option<u32> {
        let at = self.0.binary_search_by_key(&timeline, |&(timeline, _)| timeline).ok()?;
        Some(self.0[at].1)
    }

    /// Whether a timeline has come to a level.
    pub fn reaches(&self, timeline: u32, level: u32) -> bool {
        self.get(timeline).is_some_and(|known| known >= level)
    }

    /// Whether anything is known of any of some timelines.
    pub fn knows(&self, timelines: std::ops::Range<u32>) -> bool {
        let at = self.0.partition_point(|&(timeline, _)| timeline < timelines.start);
        self.0.get(at).is_some_and(|&(timeline, _)| timeline < timelines.end)
    }

    /// Sets a timeline's level.
    pub fn set(&mut self, timeline: u32, level: u32) {
        match self.0.binary_search_by_key(&timeline, |&(timeline, _)| timeline) {
            Ok(at) => self.0[at].1 = level,
            Err(at) => self.0.insert(at, (timeline, level)),
        }
    }

    /// Adds the knowledge of another clock.
    pub fn join(&mut self, other: &Clock) {
        if other.0.iter().all(|&(timeline, level)| self.reaches(timeline, level)) {
            return;
        }
        let (left, right) = (std::mem::take(&mut self.0), &other.0);
        let mut joined = Vec::with_capacity(left.len() + right.len());
        let (mut l, mut r) = (left.iter().peekable(), right.iter().peekable());
        loop {
            joined.push(match (l.peek(), r.peek()) {
                (Some(&&a), Some(&&b)) if a.0 == b.0 => {
                    l.next();
                    r.next();
                    (a.0, a.1.max(b.1))
                }
                (Some(&&a), Some(&&b)) if a.0 < b.0 => {
                    l.next();
                    a
                }
                (_, Some(&&b)) => {
                    r.next();
                    b
                }
                (Some(&&a), None) => {
                    l.next();
                    a
                }
                (None, None) => break,
            });
        }
        self.0 = joined;
    }

    /// How many timelines it knows of.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
