//! Chooses algorithms by their times. Only `+ - * /` and comparisons touch a time here: they give the same bits
//! everywhere.

use super::{Choice, Row, Timing, ascending};
use crate::error::TuningError;

/// The winner of the size below stays the choice while it is slower by at most this part of the best time: 5 %.
pub const STICKINESS: f64 = 0.05;

/// Finds the winner of each row, after checking the rows.
pub(super) fn rows(
    candidates: &[String],
    rows: Vec<(usize, Vec<Option<Timing>>)>,
) -> Result<Vec<Row>, TuningError> {
    ascending(rows.iter().map(|(bytes, _)| *bytes))?;
    let mut incumbent = None;
    let row = |(bytes, timings): (usize, Vec<Option<Timing>>)| {
        check(candidates, bytes, &timings)?;
        let unserved = TuningError::Unserved { bytes, candidates: candidates.len() };
        let winner = winner(&timings, incumbent).ok_or(unserved)?;
        incumbent = Some(winner);
        Ok(Row { bytes, winner, timings })
    };
    rows.into_iter().map(row).collect()
}

/// Fails unless a row has one timing per candidate and every time is one.
fn check(candidates: &[String], bytes: usize, timings: &[Option<Timing>]) -> Result<(), TuningError> {
    if timings.len() != candidates.len() {
        let (timings, candidates) = (timings.len(), candidates.len());
        return Err(TuningError::RowLength { bytes, timings, candidates });
    }
    for (candidate, timing) in candidates.iter().zip(timings) {
        let times = timing.map_or([0.0; 3], |timing| [timing.median_ns, timing.min_ns, timing.max_ns]);
        if let Some(nanoseconds) = times.into_iter().find(|time| !(0.0..f64::INFINITY).contains(time)) {
            return Err(TuningError::InvalidTime { candidate: candidate.clone(), bytes, nanoseconds });
        }
    }
    Ok(())
}

/// The fastest candidate, the first of several equals; or the incumbent, if it is about as fast.
fn winner(timings: &[Option<Timing>], incumbent: Option<usize>) -> Option<usize> {
    let time = |candidate: usize| timings[candidate].map(|timing| timing.median_ns);
    let served = (0..timings.len()).filter_map(|candidate| Some((time(candidate)?, candidate)));
    let (best_time, best) = served.min_by(|(a, _), (b, _)| a.total_cmp(b))?;
    let stays = |&candidate: &usize| time(candidate).is_some_and(|t| t <= best_time * (1.0 + STICKINESS));
    Some(incumbent.filter(stays).unwrap_or(best))
}

/// The candidates with the sizes from which they are chosen.
pub(super) fn choices(rows: &[Row]) -> Vec<Choice> {
    let first = rows.first().map(|row| Choice { from_bytes: 0, candidate: row.winner });
    let changes = rows.windows(2).filter(|pair| pair[0].winner != pair[1].winner);
    let change =
        |pair: &[Row]| Choice { from_bytes: crossover(&pair[0], &pair[1]), candidate: pair[1].winner };
    first.into_iter().chain(changes.map(change)).collect()
}

/// The first size above `low` at which the winner of `high` takes over.
fn crossover(low: &Row, high: &Row) -> usize {
    let (old, new) = (low.winner, high.winner);
    let lead = |row: &Row| {
        let (old, new) = (row.timings[old]?, row.timings[new]?);
        Some(new.median_ns - old.median_ns)
    };
    match (lead(low), lead(high)) {
        (Some(at_low), Some(at_high)) if at_low > 0.0 => {
            // The old winner leads by `at_low` at one end and trails by `-at_high` at the other.
            let share = at_low / (at_low - at_high);
            let beyond = ((high.bytes - low.bytes) as f64 * share) as usize;
            (low.bytes + beyond + 1).min(high.bytes)
        }
        // The new winner is not known to serve anything below the larger size, ...
        (None, Some(_)) => high.bytes,
        // ... the old one anything above the smaller; or it only stayed there by being about as fast.
        _ => low.bytes + 1,
    }
}
