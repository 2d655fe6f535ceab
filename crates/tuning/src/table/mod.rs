//! Measurements by size, and the choice that follows from them.

mod selection;
mod wire;

use serde::{Deserialize, Serialize};

use crate::checksum::Fnv;
use crate::error::TuningError;

pub use selection::STICKINESS;

/// The times of one candidate at one size: what the slowest rank took, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// The median, by which candidates are compared.
    pub median_ns: f64,
    /// The shortest time.
    pub min_ns: f64,
    /// The longest time.
    pub max_ns: f64,
    /// The number of times that were measured.
    pub samples: usize,
}

impl Timing {
    /// Sums up samples in nanoseconds; `None` if there are none or if one is not finite.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || !samples.iter().all(|time| time.is_finite()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let (last, middle) = (sorted.len() - 1, sorted.len() / 2);
        Some(Self {
            median_ns: f64::midpoint(sorted[last / 2], sorted[middle]),
            min_ns: sorted[0],
            max_ns: sorted[last],
            samples: sorted.len(),
        })
    }
}

/// The measurements at one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The size.
    pub bytes: usize,
    /// The index of the candidate that is chosen at this size.
    pub winner: usize,
    /// For each candidate its times, or `None` if it does not serve this size.
    pub timings: Vec<Option<Timing>>,
}

/// The size from which a candidate is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The smallest such size.
    pub from_bytes: usize,
    /// The candidate's index.
    pub candidate: usize,
}

/// The fastest candidate at each size, and the measurements behind that.
///
/// # How it chooses
///
/// At a measured size the candidate with the shortest median wins, except that the winner of the size below
/// stays unless it is slower by more than [`STICKINESS`]: noise should not make neighbouring sizes flap.
///
/// Between two measured sizes with different winners, the choice changes where their times meet if both grow
/// linearly in the bytes. A transfer takes latency plus bytes over bandwidth, which *is* linear, while
/// interpolation of logarithms bends it; and linear interpolation needs only the four basic operations, which
/// give the same bits on all machines, while logarithms differ between C libraries. (Taking the winner
/// of the nearest measured size would do too, but be off by up to a factor of √2 where sizes double.) A
/// candidate that serves only one of the two sizes is not trusted in between.
///
/// Below the smallest measured size the first winner is chosen, above the largest the last.
///
/// All of this happens when the table is made; [`choose`](Self::choose) is a binary search over a few
/// integers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "wire::TableWire", into = "wire::TableWire")]
pub struct Table {
    candidates: Vec<String>,
    rows: Vec<Row>,
    choices: Vec<Choice>,
}

impl Table {
    /// A table without measurements: from `thresholds[i].0` bytes on, candidate `thresholds[i].1` is chosen.
    ///
    /// This is how defaults are built in.
    ///
    /// ```
    /// use antiphon_tuning::Table;
    ///
    /// let table = Table::from_thresholds(["one_shot", "two_shot"], [(0, 0), (512 << 10, 1)])?;
    /// assert_eq!(table.choose((512 << 10) - 1), 0);
    /// assert_eq!(table.choose(512 << 10), 1);
    /// # Ok::<(), antiphon_tuning::TuningError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there are no candidates or two of one name; if there are no thresholds, the first is not 0, they do
    /// not ascend, or one names a candidate that does not exist.
    pub fn from_thresholds<C: Into<String>>(
        candidates: impl IntoIterator<Item = C>,
        thresholds: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<Self, TuningError> {
        let candidates: Vec<String> = candidates.into_iter().map(Into::into).collect();
        let choice = |(from_bytes, candidate)| Choice { from_bytes, candidate };
        Self::new(candidates, Vec::new(), Some(thresholds.into_iter().map(choice).collect()))
    }

    /// A table of measurements: for each size in bytes, ascending, one timing per candidate (`None` where it
    /// does not serve that size).
    ///
    /// # Errors
    ///
    /// If there are no candidates or two of one name; if there are no rows or they do not ascend; if a row
    /// does not have one timing per candidate, no candidate serves its size, or a time is negative or not
    /// finite.
    pub fn from_timings(
        candidates: Vec<String>,
        rows: Vec<(usize, Vec<Option<Timing>>)>,
    ) -> Result<Self, TuningError> {
        Self::new(candidates, rows, None)
    }

    /// A table of measurements, of choices, or of both; choices that are not given follow from the
    /// measurements.
    fn new(
        candidates: Vec<String>,
        rows: Vec<(usize, Vec<Option<Timing>>)>,
        choices: Option<Vec<Choice>>,
    ) -> Result<Self, TuningError> {
        check_candidates(&candidates)?;
        let rows = selection::rows(&candidates, rows)?;
        let choices = choices.unwrap_or_else(|| selection::choices(&rows));
        let from_bytes = choices.first().ok_or(TuningError::NoSizes)?.from_bytes;
        if from_bytes != 0 {
            return Err(TuningError::FirstThreshold { from_bytes });
        }
        ascending(choices.iter().map(|choice| choice.from_bytes))?;
        match choices.iter().find(|choice| choice.candidate >= candidates.len()) {
            None => Ok(Self { candidates, rows, choices }),
            Some(choice) => {
                Err(TuningError::CandidateIndex { index: choice.candidate, candidates: candidates.len() })
            }
        }
    }

    /// The index of the candidate to take for this many bytes. It allocates nothing and takes O(log n).
    #[inline]
    pub fn choose(&self, bytes: usize) -> usize {
        let above = self.choices.partition_point(|choice| choice.from_bytes <= bytes);
        self.choices[above - 1].candidate // the first choice is from 0 bytes on
    }

    /// The candidates' names; all indices count in them.
    pub fn candidates(&self) -> &[String] {
        &self.candidates
    }

    /// The measurements, by ascending size; empty if the table was built from thresholds.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The candidates with the sizes from which they are chosen, by ascending size.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// A number that two tables share if they choose the same candidates, by name, at all sizes.
    ///
    /// It does not depend on the times, so it can be compared between ranks and library versions.
    pub fn fingerprint(&self) -> u64 {
        let names = self.candidates.iter().fold(Fnv::new(), |hash, name| hash.text(name));
        let choices = self.choices.iter().fold(names, |hash, choice| {
            hash.number(choice.from_bytes as u64).number(choice.candidate as u64)
        });
        choices.finish()
    }
}

/// Fails if there are no candidates, or two of one name.
pub(crate) fn check_candidates(candidates: &[String]) -> Result<(), TuningError> {
    if candidates.is_empty() {
        return Err(TuningError::NoCandidates);
    }
    match candidates.iter().enumerate().find(|&(i, name)| candidates[..i].contains(name)) {
        Some((_, name)) => Err(TuningError::DuplicateCandidate { name: name.clone() }),
        None => Ok(()),
    }
}

/// Fails unless each size is larger than the one before.
fn ascending(sizes: impl Iterator<Item = usize> + Clone) -> Result<(), TuningError> {
    match sizes.clone().zip(sizes.skip(1)).find(|(previous, next)| previous >= next) {
        Some((previous, next)) => Err(TuningError::Unordered { previous, next }),
        None => Ok(()),
    }
}
