//! Dispatch to slots, and combine from them, on host memory: choices first, then rows, both through the region.

use std::time::Duration;

use antiphon_fabric::{Communicator, Signature};
use antiphon_tensor::{
    bf16,
    quantize::{Fp8Groups, GroupRule},
    round,
};

use super::{Assignment, COMBINE, CombineFormat, DISPATCH, SCALE_GROUP, Sizes, SlotFormat, logfmt};
use crate::{
    Moe,
    error::{MoeError, Result, refused},
    tensors::Ids,
};

/// A dispatch.
pub(super) struct Dispatch<'a> {
    pub(super) signature: Signature,
    pub(super) sizes: Sizes,
    pub(super) format: SlotFormat,
    /// bf16 `[T, H]`
    pub(super) x: &'a [u8],
    pub(super) ids: Ids<'a>,
}

/// The outputs of a dispatch.
pub(super) struct Received<'a> {
    pub(super) x: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    pub(super) counts: &'a mut [u8],
    pub(super) source_tokens: &'a mut [u8],
    pub(super) layout_range: &'a mut [u8],
    /// Empty if the call has no statistics.
    pub(super) statistics: &'a mut [u8],
    /// i64 `[R]`
    pub(super) waits: Option<&'a mut [u8]>,
}

/// A bf16 row, from its bytes.
fn elements(row: &[u8]) -> impl Iterator<Item = bf16> {
    row.chunks_exact(2).map(|element| bf16::from_bits(u16::from_ne_bytes([element[0], element[1]])))
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let word = &bytes[index * 4..][..4];
    u32::from_ne_bytes([word[0], word[1], word[2], word[3]])
}

fn set_word(bytes: &mut [u8], index: usize, word: u32) {
    bytes[index * 4..][..4].copy_from_slice(&word.to_ne_bytes());
}

/// Adds the nanoseconds that this rank waited for each rank to 64-bit integers.
fn add_waits(waits: &mut [u8], waited: &[Duration]) {
    for (place, waited) in waits.as_chunks_mut().0.iter_mut().zip(waited) {
        *place = i64::from_ne_bytes(*place).wrapping_add(waited.as_nanos() as i64).to_ne_bytes();
    }
}

/// The word of a choice that names no expert.
const NO_EXPERT: u32 = u32::MAX;

impl Dispatch<'_> {
    pub(super) fn run(&self, moe: &mut Moe, comm: &Communicator, mut to: Received<'_>) -> Result<Assignment> {
        let (tokens, ids) = self.exchange_choices(moe, comm, to.waits.as_deref_mut())?;
        let assignment = Assignment::new(comm.rank(), &self.sizes, tokens, &ids);
        self.describe(&assignment, &mut to);
        self.move_rows(moe, comm, &assignment, &mut to)?;
        Ok(assignment)
    }

    /// How many tokens each rank has, and the experts that they choose: `[R]` and `[R, M, K]`.
    fn exchange_choices(
        &self,
        moe: &mut Moe,
        comm: &Communicator,
        waits: Option<&mut [u8]>,
    ) -> Result<(Vec<usize>, Vec<Option<usize>>)> {
        let Sizes { world_size, max_tokens, top_k, num_experts, .. } = self.sizes;
        // A record says whether the rank has this token, and has the number of the instance and the choices.
        let bytes = (2 + top_k) * 4;
        let records = moe.region.records(DISPATCH, bytes)?;
        let (rank, number) = (comm.rank(), moe.number);
        let mut tokens = vec![0; world_size];
        let mut ids = vec![None; world_size * max_tokens * top_k];
        let mut instances = vec![number; world_size];
        // SAFETY: every rank moves as many records of one size, which the signature says.
        let mut rounds = unsafe { comm.rounds()? };
        if waits.is_some() {
            rounds.measure_waits();
        }
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, bytes),
            max_tokens.max(1),
            |half, piece| {
                for token in piece.clone() {
                    // SAFETY: a rank writes its own region alone.
                    let record = unsafe { half.get_mut(rank, token - piece.start) };
                    set_word(record, 0, u32::from(token < self.sizes.tokens));
                    set_word(record, 1, number);
                    for k in 0..if token < self.sizes.tokens { top_k } else { 0 } {
                        let expert = self.ids.get(token * top_k + k);
                        set_word(record, 2 + k, expert.map_or(NO_EXPERT, |expert| expert as u32));
                    }
                }
            },
            |half, piece| {
                for from in 0..world_size {
                    for token in piece.clone() {
                        // SAFETY: the rank has written its region for this piece.
                        let record = unsafe { half.get(from, token - piece.start) };
                        instances[from] = word(record, 1);
                        if word(record, 0) == 0 {
                            break;
                        }
                        tokens[from] = token + 1;
                        for (k, id) in
                            ids[(from * max_tokens + token) * top_k..][..top_k].iter_mut().enumerate()
                        {
                            let expert = word(record, 2 + k) as usize;
                            *id = (expert < num_experts).then_some(expert);
                        }
                    }
                }
            },
        )?;
        if let Some(waits) = waits {
            add_waits(waits, &rounds.take_waits());
        }
        if let Some(peer) = (1..world_size).find(|&peer| instances[peer] != instances[0]) {
            let (number, theirs) = (instances[0], instances[peer]);
            return Err(MoeError::Instances { call: DISPATCH, rank: 0, number, peer, theirs });
        }
        Ok((tokens, ids))
    }

    /// Writes all outputs but the rows.
    fn describe(&self, assignment: &Assignment, to: &mut Received<'_>) {
        let world_size = self.sizes.world_size;
        for (expert, filled) in assignment.filled.chunks_exact(world_size).enumerate() {
            let mut begin = 0;
            for (from, &count) in filled.iter().enumerate() {
                let range = (begin as u64) << 32 | count as u64;
                to.layout_range[(expert * world_size + from) * 8..][..8]
                    .copy_from_slice(&range.to_ne_bytes());
                begin += count;
            }
            set_word(to.counts, expert, begin as u32);
            if !to.statistics.is_empty() {
                let before = word(to.statistics, expert);
                set_word(to.statistics, expert, before.wrapping_add(begin as u32));
            }
        }
        for from in 0..world_size {
            for (choice, row) in assignment.rows_of(&self.sizes, from) {
                set_word(to.source_tokens, row, (choice / self.sizes.top_k) as u32);
            }
        }
    }

    fn move_rows(
        &self,
        moe: &mut Moe,
        comm: &Communicator,
        assignment: &Assignment,
        to: &mut Received<'_>,
    ) -> Result<()> {
        let Sizes { world_size, max_tokens, hidden, top_k, tokens, .. } = self.sizes;
        let (row_bytes, num_scales) = (self.format.row_bytes(hidden), self.format.num_scales(hidden));
        let slots = self.sizes.slots();
        let bytes = row_bytes + num_scales * 4;
        let records = moe.region.records(DISPATCH, bytes)?;
        let rank = comm.rank();
        let quantiser = Quantiser::new(hidden)?;
        // SAFETY: every rank moves as many records of one size, which the signature says.
        let mut rounds = unsafe { comm.rounds()? };
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, bytes),
            assignment.tokens.iter().copied().max().unwrap_or(0),
            |half, piece| {
                for token in piece.start..piece.end.min(tokens) {
                    if assignment.first[token * top_k..][..top_k].iter().all(|&first| first < 0) {
                        continue;
                    }
                    // SAFETY: a rank writes its own region alone.
                    let record = unsafe { half.get_mut(rank, token - piece.start) };
                    let (row, scales) = record.split_at_mut(row_bytes);
                    quantiser.write(self.format, &self.x[token * hidden * 2..][..hidden * 2], row, scales);
                }
            },
            |half, piece| {
                for from in 0..world_size {
                    for token in piece.start..piece.end.min(assignment.tokens[from]) {
                        let places = &assignment.places[(from * max_tokens + token) * top_k..][..top_k];
                        for place in places.iter().filter_map(|&place| usize::try_from(place).ok()) {
                            // SAFETY: the rank has written its region for this piece.
                            let record = unsafe { half.get(from, token - piece.start) };
                            to.x[place * row_bytes..][..row_bytes].copy_from_slice(&record[..row_bytes]);
                            let (expert, slot) = (place / slots, place % slots);
                            for scale in 0..num_scales {
                                let at = (expert * num_scales + scale) * slots + slot;
                                set_word(to.scales, at, word(&record[row_bytes..], scale));
                            }
                        }
                    }
                }
            },
        )?;
        Ok(())
    }
}

/// Converts rows to a format.
struct Quantiser {
    /// The groups of one row; none if rows are not whole groups.
    groups: Option<Fp8Groups>,
}

impl Quantiser {
    fn new(hidden: usize) -> Result<Self> {
        let groups = hidden.is_multiple_of(SCALE_GROUP);
        let groups = groups.then(|| Fp8Groups::new(1, hidden, SCALE_GROUP, GroupRule::DeepEp)).transpose()?;
        Ok(Self { groups })
    }

    /// Writes a row and its scales, from a row of bf16.
    fn write(&self, format: SlotFormat, x: &[u8], row: &mut [u8], scales: &mut [u8]) {
        let (false, Some(groups)) = (format == SlotFormat::Bf16, &self.groups) else {
            return row.copy_from_slice(x);
        };
        let x: Vec<bf16> = elements(x).collect();
        let packed = groups.packed_scales();
        let (mut exact, mut exponents) = (vec![0f32; groups.scale_count()], vec![0; packed.size()]);
        let quantised = match format {
            SlotFormat::Fp8 => groups.quantize(&x, row, &mut exact),
            _ => groups.quantize_packed(&x, row, &mut exponents),
        };
        quantised.expect("the buffers are of the sizes that the groups ask for");
        let exponent = |group| exponents[packed.offset(0, group).expect("a group of the row")];
        match format {
            SlotFormat::Fp8Packed => {
                for word in 0..exact.len() / 4 {
                    let bytes = std::array::from_fn(|byte| exponent(word * 4 + byte));
                    set_word(scales, word, u32::from_le_bytes(bytes));
                }
            }
            SlotFormat::Fp8 => {
                exact.iter().enumerate().for_each(|(group, scale)| set_word(scales, group, scale.to_bits()));
            }
            _ => (0..exact.len()).for_each(|group| set_word(scales, group, u32::from(exponent(group)) << 23)),
        }
    }
}

/// A combine.
pub(super) struct Combine<'a> {
    pub(super) signature: Signature,
    pub(super) format: CombineFormat,
    pub(super) sizes: Sizes,
    pub(super) assignment: &'a Assignment,
    /// bf16 `[L, R·M, H]`
    pub(super) rows: &'a [u8],
    pub(super) ids: Ids<'a>,
    /// f32 `[T, K]`
    pub(super) weights: &'a [u8],
}

impl Combine<'_> {
    /// Each choice of a token has a record at the token's rank: choice `token · K + k`. Records hold bf16 in every format, as codes would
    /// take longer to make than to move; the rank that sums a row makes of it what the format does.
    pub(super) fn run(
        &self,
        moe: &mut Moe,
        comm: &Communicator,
        output: &mut [u8],
        waits: Option<&mut [u8]>,
    ) -> Result<()> {
        let Sizes { world_size, hidden, top_k, tokens, .. } = self.sizes;
        let row_bytes = hidden * 2;
        let fitting = moe.region.records(COMBINE, row_bytes)?;
        // The rows of a token come in one piece.
        let records = fitting / top_k.max(1) * top_k.max(1);
        if records == 0 {
            let problem = format!(
                "a token's {top_k} rows of {row_bytes} bytes; half a region of {} bytes has room for {fitting} (raise region_bytes)",
                moe.region_bytes()
            );
            return Err(refused(COMBINE, problem));
        }
        let most = self.assignment.tokens.iter().copied().max().unwrap_or(0);
        let rank = comm.rank();
        let mut next: Vec<_> =
            (0..world_size).map(|from| self.assignment.rows_of(&self.sizes, from).peekable()).collect();
        let mut sum = vec![0f32; hidden];
        let mut arrived = vec![0f32; hidden];
        // SAFETY: every rank moves as many records of one size, along routes of one call, as the signature says.
        let mut rounds = unsafe { comm.rounds()? };
        if waits.is_some() {
            rounds.measure_waits();
        }
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, row_bytes),
            most * top_k,
            |half, piece| {
                for (from, next) in next.iter_mut().enumerate() {
                    while let Some((choice, row)) = next.next_if(|&(choice, _)| choice < piece.end) {
                        // SAFETY: every choice has one row, which one rank has.
                        let record = unsafe { half.get_mut(from, choice - piece.start) };
                        record[..row_bytes].copy_from_slice(&self.rows[row * row_bytes..][..row_bytes]);
                    }
                }
            },
            |half, piece| {
                if top_k == 0 {
                    return;
                }
                for token in piece.start / top_k..(piece.end / top_k).min(tokens) {
                    sum.fill(0.0);
                    for choice in token * top_k..(token + 1) * top_k {
                        let first = self.assignment.first[choice];
                        if first < 0 || self.ids.get(choice).is_none() {
                            continue;
                        }
                        let at = token * top_k + first as usize - piece.start;
                        // SAFETY: all rows that come back in this piece have come.
                        let record = unsafe { half.get(rank, at) };
                        let weight = f32::from_bits(word(self.weights, choice));
                        self.arrive(&record[..row_bytes], &mut arrived);
                        for (sum, x) in sum.iter_mut().zip(&arrived) {
                            *sum += weight * x;
                        }
                    }
                    write_row(&sum, &mut output[token * row_bytes..][..row_bytes]);
                }
            },
        )?;
        if let Some(waits) = waits {
            add_waits(waits, &rounds.take_waits());
        }
        if top_k == 0 {
            output.fill(0);
        }
        Ok(())
    }

    /// What arrives of a row.
    fn arrive(&self, row: &[u8], to: &mut [f32]) {
        match self.format {
            CombineFormat::Bf16 => to.iter_mut().zip(elements(row)).for_each(|(to, x)| *to = x.to_f32()),
            CombineFormat::LogFmt => logfmt::arrive(&elements(row).collect::<Vec<_>>(), to),
        }
    }
}

/// Rounds a sum; any NaN becomes the canonical one.
fn write_row(sum: &[f32], row: &mut [u8]) {
    for (element, &value) in row.chunks_exact_mut(2).zip(sum) {
        element.copy_from_slice(&round::f32_to_bf16(value).to_ne_bytes());
    }
}
