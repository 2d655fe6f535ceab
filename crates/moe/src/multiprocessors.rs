//! How many multiprocessors calls take, where that is left to the instance.

/// What a call does with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Movement {
    /// A dispatch by token.
    Dispatch,
    /// A combine by token.
    Combine,
    /// A dispatch by expert.
    DispatchByExpert,
    /// A combine by expert.
    CombineByExpert,
}

impl Movement {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::Combine, Self::DispatchByExpert, Self::CombineByExpert];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "moe_dispatch",
            Self::Combine => "moe_combine",
            Self::DispatchByExpert => "moe_dispatch_by_expert",
            Self::CombineByExpert => "moe_combine_by_expert",
        }
    }
}

/// How many multiprocessors each call takes between GPUs where [`MoeConfig::num_sms`](crate::MoeConfig::num_sms) is 0, by the bytes of the
/// rows of a rank's tokens: the fewest that cost little time.
///
/// ```
/// use antiphon_moe::{Movement, Multiprocessors};
///
/// // 1 MiB of tokens takes 10 µs with 8 multiprocessors, and hardly less with more of them.
/// let times = [(1 << 20, vec![(4, 18e3), (8, 10e3), (16, 9.8e3)]), (32 << 20, vec![(4, 300e3), (8, 160e3), (16, 90e3)])];
/// let chosen = Multiprocessors::default().measured(Movement::Dispatch, &times);
/// assert_eq!(chosen.of(Movement::Dispatch, 1 << 20), 8);
/// assert_eq!(chosen.of(Movement::Dispatch, 32 << 20), 16);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Multiprocessors {
    /// For each movement the bytes from which on a number is taken, ascending; the first ones are 0.
    by_bytes: [Vec<(usize, u32)>; Movement::ALL.len()],
}

/// What suits H200s until calls have been measured.
///
/// A multiprocessor stores about 50 GB/s, and a dispatch stores each row once for every rank that gets it and once more where it arrives:
/// 24 keep the links of two or four ranks busy. By expert a row is stored, or read, for each expert. Fewer bytes take fewer
/// multiprocessors, as a row is for one warp.
impl Default for Multiprocessors {
    fn default() -> Self {
        let by_token = vec![(0, 8), (384 << 10, 16), (768 << 10, 24)];
        let by_expert = vec![(0, 16), (384 << 10, 32), (768 << 10, 48)];
        Self { by_bytes: [by_token.clone(), by_token, by_expert.clone(), by_expert] }
    }
}

/// The time of a call with each number of multiprocessors, in nanoseconds.
pub type SmTimes = Vec<(u32, f64)>;

impl Multiprocessors {
    /// A call may take so much longer than the fastest one.
    const TOLERANCE: f64 = 1.03;

    /// The same with what was measured for a movement, at ascending numbers of bytes: from each of them on the smallest number whose time is
    /// within 3 % of the best. Nothing changes if nothing was measured.
    #[must_use]
    pub fn measured(mut self, movement: Movement, times: &[(usize, SmTimes)]) -> Self {
        let chosen = times.iter().filter_map(|(bytes, times)| {
            let best = times.iter().map(|(_, time)| *time).min_by(f64::total_cmp)?;
            let good = times.iter().filter(|(_, time)| *time <= best * Self::TOLERANCE);
            Some((*bytes, good.map(|(sms, _)| *sms).min()?))
        });
        let mut by_bytes: Vec<(usize, u32)> = chosen.collect();
        if let Some(first) = by_bytes.first_mut() {
            first.0 = 0;
            self.by_bytes[movement as usize] = by_bytes;
        }
        self
    }

    /// The number for a call.
    pub fn of(&self, movement: Movement, bytes: usize) -> u32 {
        let by_bytes = &self.by_bytes[movement as usize];
        let above = by_bytes.partition_point(|(from, _)| *from <= bytes);
        by_bytes[above.max(1) - 1].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_within_3_percent_of_the_best_are_taken() {
        let times = [
            (1_000, vec![(4, 103.0), (8, 100.0), (48, 100.1)]),
            (2_000, vec![(4, 103.1), (8, 100.0), (48, 99.9)]),
            (9_000, vec![(4, 400.0), (8, 200.0), (48, 100.0)]),
        ];
        let chosen = Multiprocessors::default().measured(Movement::Combine, &times);
        let of = |bytes| chosen.of(Movement::Combine, bytes);
        assert_eq!([0, 1_000, 1_999, 2_000, 8_999, 9_000, usize::MAX].map(of), [4, 4, 4, 8, 8, 48, 48]);
        assert_eq!(chosen.of(Movement::Dispatch, 0), Multiprocessors::default().of(Movement::Dispatch, 0));
    }

    #[test]
    fn nothing_measured_changes_nothing() {
        let built_in = Multiprocessors::default();
        assert_eq!(built_in.clone().measured(Movement::Dispatch, &[]), built_in);
        assert_eq!(built_in.clone().measured(Movement::Dispatch, &[(5, vec![])]), built_in);
    }

    #[test]
    fn more_bytes_never_take_fewer_before_they_are_measured() {
        for movement in Movement::ALL {
            let all: Vec<u32> =
                (0..40).map(|bits| Multiprocessors::default().of(movement, 1 << bits)).collect();
            assert!(all.is_sorted() && all[0] > 0, "{all:?}");
        }
    }
}
