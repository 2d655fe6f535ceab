//! Where the rows of each expert begin and end at a rank.

use std::ops::Range;

use super::ByExpertOrder;

/// The segments of a rank's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segments {
    /// `[R, L]`: the row of the first token of each rank for each expert, room or not.
    pub(crate) starts: Vec<usize>,
    /// `[L]`: for how many tokens of each expert there is room.
    pub(crate) kept: Vec<usize>,
    /// `[L]`: how many rows these tokens take with the padding.
    pub(crate) padded: Vec<usize>,
    /// Rows beyond these are dropped.
    pub(crate) limit: usize,
    /// Whether some rows are dropped.
    pub(crate) overflow: bool,
    /// How many rows there would be without a limit.
    pub(crate) needed: usize,
    /// `P`
    pub(crate) rows: usize,
}

impl Segments {
    /// The segments that follow from how often the tokens of each rank chose each expert, `[R, L]`. `None` for rows in the order of tokens.
    pub(crate) fn new(order: ByExpertOrder, chosen: &[usize], local: usize) -> Option<Self> {
        let ByExpertOrder::Experts { pad_multiple, capacity } = order else { return None };
        let limit = capacity.map_or(usize::MAX, |capacity| capacity.rows);
        let mut segments = Self {
            starts: vec![0; chosen.len()],
            kept: Vec::with_capacity(local),
            padded: Vec::with_capacity(local),
            limit,
            overflow: false,
            needed: 0,
            rows: 0,
        };
        let mut base = 0;
        for expert in 0..local {
            let mut end = base;
            for place in (expert..chosen.len()).step_by(local) {
                segments.starts[place] = end;
                end += chosen[place];
            }
            let kept = end.min(limit).saturating_sub(base);
            segments.kept.push(kept);
            segments.padded.push(kept.next_multiple_of(pad_multiple));
            segments.overflow = end > limit; // the last expert's says it for all
            base += (end - base).next_multiple_of(pad_multiple);
        }
        segments.needed = base;
        segments.rows = capacity.map_or(base, |capacity| capacity.rows);
        Some(segments)
    }

    /// The rows to which no token comes.
    pub(crate) fn empty_rows(&self) -> impl Iterator<Item = Range<usize>> {
        let filled = self.starts.iter().zip(&self.kept).map(|(&start, kept)| start..start + kept);
        let ends = filled.clone().map(|rows| rows.end);
        let begins = filled.map(|rows| rows.start).skip(1).chain([self.rows]);
        let first = self.starts.is_empty().then_some(0..self.rows);
        ends.zip(begins).map(|(end, begin)| end.min(self.rows)..begin.min(self.rows)).chain(first)
    }
}
