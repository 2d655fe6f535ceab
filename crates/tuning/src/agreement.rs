//! Whether all ranks hold the same table.

use crate::Table;

/// Whether every rank has a table, and all the same one.
///
/// It costs a single exchange of a few numbers, over the closure that [`Sweep::measure`](crate::Sweep::measure)
/// takes: `agree` replaces each number by its maximum over all ranks. All ranks must call this together, with
/// `None` on those that have no table, and get the same answer.
///
/// # Errors
///
/// Whatever `agree` returns.
pub fn same_on_all_ranks<E>(
    table: Option<&Table>,
    agree: impl FnOnce(&mut [f64]) -> Result<(), E>,
) -> Result<bool, E> {
    let fingerprint = table.map_or(0, Table::fingerprint);
    // Halves of 32 bits, which f64 holds exactly. With its negative, the maximum of a number is the minimum
    // too.
    let halves = [(fingerprint >> 32) as f64, (fingerprint & 0xffff_ffff) as f64];
    let missing = if table.is_some() { 0.0 } else { 1.0 };
    let mut exchanged = [halves[0], halves[1], -halves[0], -halves[1], missing];
    agree(&mut exchanged)?;
    let [high, low, neg_high, neg_low, missing] = exchanged;
    Ok(missing == 0.0 && high == -neg_high && low == -neg_low)
}
