//! Measuring candidates over sizes.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::TuningError;
use crate::table::{Table, Timing, check_candidates};

/// A measurement: its candidates, its sizes and its number of samples.
///
/// At every size all candidates run in turn, round after round, so that a machine that warms up or slows down
/// hits all of them alike; the one that begins changes from round to round, so that none is always the first.
/// The first rounds warm up and do not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    candidates: Vec<String>,
    sizes: Vec<usize>,
    warm_up: usize,
    rounds: usize,
}

impl Sweep {
    /// A sweep for these candidates, by name, and these sizes in bytes, in any order.
    ///
    /// # Errors
    ///
    /// [`TuningError::NoCandidates`], [`TuningError::DuplicateCandidate`] or [`TuningError::NoSizes`].
    pub fn new<C: Into<String>>(
        candidates: impl IntoIterator<Item = C>,
        sizes: impl IntoIterator<Item = usize>,
    ) -> Result<Self, TuningError> {
        let candidates: Vec<String> = candidates.into_iter().map(Into::into).collect();
        check_candidates(&candidates)?;
        let mut sizes: Vec<usize> = sizes.into_iter().collect();
        sizes.sort_unstable();
        sizes.dedup();
        if sizes.is_empty() {
            return Err(TuningError::NoSizes);
        }
        Ok(Self { candidates, sizes, warm_up: 2, rounds: 9 })
    }

    /// Sets the number of rounds that do not count; 2 unless set.
    #[must_use]
    pub fn warm_up(self, warm_up: usize) -> Self {
        Self { warm_up, ..self }
    }

    /// Sets the number of rounds that count; 9 unless set.
    #[must_use]
    pub fn rounds(self, rounds: usize) -> Self {
        Self { rounds, ..self }
    }

    /// The candidates' names; `run` gets an index into them.
    pub fn candidates(&self) -> &[String] {
        &self.candidates
    }

    /// The sizes in bytes, ascending.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// How often [`measure`](Self::measure) calls `run` if every candidate serves every size.
    pub fn runs(&self) -> usize {
        self.sizes.len() * self.candidates.len() * (self.warm_up + self.rounds)
    }

    /// Measures; all ranks must call this together, with the same sweep.
    ///
    /// `run(candidate, bytes)` runs one timed batch of calls and returns the mean time of a call as this rank
    /// saw it, or `None` if the candidate does not serve that size. It may be `None` only for a reason that
    /// is the same on all ranks, as the ranks would otherwise lose step.
    ///
    /// `agree(samples)` replaces every number by its maximum over all ranks. It is called once for each size.
    ///
    /// # Errors
    ///
    /// Whatever `run` and `agree` return; [`TuningError::NoRounds`], [`TuningError::Unserved`] if no
    /// candidate serves a size, [`TuningError::InvalidTime`] if `agree` left a number that is no time.
    pub fn measure<E: From<TuningError>>(
        &self,
        mut run: impl FnMut(usize, usize) -> Result<Option<Duration>, E>,
        mut agree: impl FnMut(&mut [f64]) -> Result<(), E>,
    ) -> Result<Table, E> {
        if self.rounds == 0 {
            return Err(TuningError::NoRounds.into());
        }
        let mut rows = Vec::with_capacity(self.sizes.len());
        for &bytes in &self.sizes {
            let mut samples = self.sample(bytes, &mut run)?;
            agree(&mut samples)?;
            rows.push((bytes, self.timings(bytes, &samples)?));
        }
        Ok(Table::from_timings(self.candidates.clone(), rows)?)
    }

    /// The times at one size in nanoseconds, `rounds` for each candidate; infinite where it does not serve.
    fn sample<E>(
        &self,
        bytes: usize,
        run: &mut impl FnMut(usize, usize) -> Result<Option<Duration>, E>,
    ) -> Result<Vec<f64>, E> {
        let count = self.candidates.len();
        let mut samples = vec![0.0; count * self.rounds];
        let mut serves = vec![true; count];
        for round in 0..self.warm_up + self.rounds {
            for candidate in (0..count).map(|turn| (round + turn) % count) {
                if !serves[candidate] {
                    continue;
                }
                let own = &mut samples[candidate * self.rounds..][..self.rounds];
                match (run(candidate, bytes)?, round.checked_sub(self.warm_up)) {
                    (Some(time), Some(counted)) => own[counted] = time.as_nanos() as f64,
                    (Some(_), None) => {}
                    (None, _) => {
                        serves[candidate] = false;
                        own.fill(f64::INFINITY);
                    }
                }
            }
        }
        Ok(samples)
    }

    /// The statistics of each candidate at one size.
    fn timings(&self, bytes: usize, samples: &[f64]) -> Result<Vec<Option<Timing>>, TuningError> {
        let own = samples.chunks_exact(self.rounds);
        let timing = |(name, samples): (&String, &[f64])| {
            let is_time = |time: &f64| *time >= 0.0; // not true of NaN
            match samples.iter().find(|&time| !is_time(time)) {
                Some(&nanoseconds) => {
                    Err(TuningError::InvalidTime { candidate: name.clone(), bytes, nanoseconds })
                }
                None => Ok(Timing::of(samples)),
            }
        };
        self.candidates.iter().zip(own).map(timing).collect()
    }
}

/// Sizes from the first to the last of a range, each twice the one before.
///
/// Times change smoothly with the logarithm of the size, so this is where to measure.
///
/// ```
/// assert_eq!(Vec::from_iter(antiphon_tuning::doubling(512..=3000)), [512, 1024, 2048]);
/// ```
pub fn doubling(bytes: RangeInclusive<usize>) -> impl Iterator<Item = usize> {
    let (first, last) = bytes.into_inner();
    let sizes = std::iter::successors(Some(first.max(1)), |size| size.checked_mul(2));
    sizes.take_while(move |&size| size <= last)
}
