//! Dispatch and combine by expert on host memory.

use std::sync::OnceLock;

use antiphon_device::{ReduceOp, host::reduce::Reducer};
use antiphon_fabric::{Communicator, Signature};
use antiphon_tensor::DType;

use super::{ByExpertOrder, ByExpertRoutes, COMBINE, DISPATCH, Segments, Sizes, routes::Received};
use crate::{
    Moe,
    error::Result,
    instance::next_routes,
    routes::Traffic,
    transport::{Announcement, Counts, Records, Term, row, row_mut},
};

/// The entry of [`Received::places`] for an expert that has no row of a token.
const NOWHERE: i32 = -1;

pub(super) fn notify(
    moe: &Moe,
    comm: &Communicator,
    signature: &Signature,
    sizes: Sizes,
    map: &[u8],
    order: ByExpertOrder,
) -> Result<ByExpertRoutes> {
    let Sizes { world_size, num_experts, tokens } = sizes;
    let local = sizes.local();
    let mut in_rank = Vec::with_capacity(tokens * world_size);
    let mut per_expert = vec![0i32; num_experts];
    for choices in map.chunks_exact(num_experts) {
        per_expert.iter_mut().zip(choices).for_each(|(count, &mark)| *count += i32::from(mark != 0));
        in_rank
            .extend(choices.chunks_exact(local).map(|marks| u8::from(marks.iter().any(|&mark| mark != 0))));
    }
    let announcement = Announcement {
        call: DISPATCH,
        signature: *signature,
        in_rank: &in_rank,
        per_expert: &per_expert.iter().flat_map(|count| count.to_ne_bytes()).collect::<Vec<_>>(),
        tokens,
        num_experts,
        capacity: None,
    };
    let Counts { traffic, tokens, chosen } = announcement.exchange(moe, comm)?;
    Ok(ByExpertRoutes {
        owner: moe.token.clone(),
        number: next_routes(comm),
        sizes,
        order,
        tokens,
        map: map.to_vec(),
        segments: Segments::new(order, &chosen, local),
        chosen: (0..local).map(|expert| chosen.iter().skip(expert).step_by(local).sum()).collect(),
        traffic,
        received: OnceLock::new(),
    })
}

fn float(bytes: &[u8], index: usize) -> [u8; 4] {
    row(bytes, 4, index).try_into().expect("a float has 4 bytes")
}

/// A dispatch of rows along routes. Parts that the call leaves out are empty.
pub(super) struct Rows<'a> {
    pub(super) signature: Signature,
    pub(super) x: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) probs: &'a [u8],
    pub(super) row_bytes: usize,
    pub(super) scale_bytes: usize,
    pub(super) has_probs: bool,
    pub(super) to_x: &'a mut [u8],
    pub(super) to_scales: &'a mut [u8],
    pub(super) to_probs: &'a mut [u8],
}

/// A record is the row, the scales, the probs of all experts, and a byte for each expert: 1 where the token chooses it.
impl Rows<'_> {
    pub(super) fn run(self, moe: &mut Moe, comm: &Communicator, routes: &ByExpertRoutes) -> Result<()> {
        let Self { row_bytes, scale_bytes, .. } = self;
        let Sizes { num_experts, .. } = routes.sizes;
        let local = routes.sizes.local();
        let first = routes.traffic.rank * local;
        let prob_bytes = if self.has_probs { num_experts * 4 } else { 0 };
        let records = Records {
            call: DISPATCH,
            signature: self.signature,
            bytes: row_bytes + scale_bytes + prob_bytes + num_experts,
            traffic: &routes.traffic,
            tokens: &routes.tokens,
        };
        let mut places = Places::new(routes);
        let write = |index: usize, record: &mut [u8]| {
            let parts = [
                (self.x, row_bytes),
                (self.scales, scale_bytes),
                (self.probs, prob_bytes),
                (&routes.map, num_experts),
            ];
            let mut rest = record;
            for (matrix, bytes) in parts {
                let part = rest.split_off_mut(..bytes).expect("a record has room for its parts");
                part.copy_from_slice(row(matrix, bytes, index));
            }
        };
        let (to_x, to_scales, to_probs) = (self.to_x, self.to_scales, self.to_probs);
        match &routes.segments {
            None => to_probs.fill(0),
            Some(segments) => {
                let bytes_of_prob = if self.has_probs { 4 } else { 0 };
                for rows in segments.empty_rows() {
                    to_x[rows.start * row_bytes..rows.end * row_bytes].fill(0);
                    to_scales[rows.start * scale_bytes..rows.end * scale_bytes].fill(0);
                    to_probs[rows.start * bytes_of_prob..rows.end * bytes_of_prob].fill(0);
                }
            }
        }
        let take = |at: usize, record: &[u8]| {
            let (x, rest) = record.split_at(row_bytes);
            let (scales, rest) = rest.split_at(scale_bytes);
            let (probs, map) = rest.split_at(prob_bytes);
            places.add(at, &map[first..][..local], |place, index, expert| {
                row_mut(to_x, row_bytes, place).copy_from_slice(x);
                row_mut(to_scales, scale_bytes, place).copy_from_slice(scales);
                if prob_bytes > 0 {
                    row_mut(to_probs, 4, index).copy_from_slice(&float(probs, first + expert));
                }
            });
        };
        let sources = records.pull(moe, comm, write, take)?;
        let places = places.of_tokens;
        routes.received.get_or_init(|| Received { sources, places });
        Ok(())
    }
}

/// Gives received tokens their rows, as they come.
struct Places<'a> {
    routes: &'a ByExpertRoutes,
    /// `[R, L]`: the row of the next token of each rank.
    next: Vec<usize>,
    /// `[N, L]`
    of_tokens: Vec<i32>,
}

impl<'a> Places<'a> {
    fn new(routes: &'a ByExpertRoutes) -> Self {
        let next = routes.segments.as_ref().map_or_else(Vec::new, |segments| segments.starts.clone());
        Self { routes, next, of_tokens: vec![NOWHERE; routes.num_received() * routes.sizes.local()] }
    }

    /// Gives the token of number `at` its rows: `copy` has each row, the index of its prob, and the expert.
    fn add(&mut self, at: usize, map: &[u8], mut copy: impl FnMut(usize, usize, usize)) {
        let Traffic { rank, world_size, .. } = self.routes.traffic;
        let local = map.len();
        let from = (0..world_size).find(|&from| self.routes.traffic.block(from, rank).contains(&at));
        let from = from.expect("a received row is of some rank");
        for expert in (0..local).filter(|&expert| map[expert] != 0) {
            let (place, index) = match &self.routes.segments {
                None => (at, at * local + expert),
                Some(segments) => {
                    let next = &mut self.next[from * local + expert];
                    let place = *next;
                    *next += 1;
                    if place >= segments.limit {
                        continue;
                    }
                    (place, place)
                }
            };
            self.of_tokens[at * local + expert] = place as i32;
            copy(place, index, expert);
        }
    }
}

/// A combine of rows along routes. Parts that the call leaves out are empty.
pub(super) struct Sums<'a> {
    pub(super) signature: Signature,
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) rows: &'a [u8],
    pub(super) probs: &'a [u8],
    pub(super) has_probs: bool,
    pub(super) output: &'a mut [u8],
    pub(super) output_probs: &'a mut [u8],
}

/// A record is the sum of a token's rows on a rank, and the probs of that rank's experts.
impl Sums<'_> {
    pub(super) fn run(
        self,
        moe: &mut Moe,
        comm: &Communicator,
        routes: &ByExpertRoutes,
        received: &Received,
    ) -> Result<()> {
        let Sizes { num_experts, .. } = routes.sizes;
        let (local, rank) = (routes.sizes.local(), routes.traffic.rank);
        let row_bytes = self.hidden * self.dtype.size();
        let prob_bytes = if self.has_probs { local * 4 } else { 0 };
        let records = Records {
            call: COMBINE,
            signature: self.signature,
            bytes: row_bytes + prob_bytes,
            traffic: &routes.traffic,
            tokens: &routes.tokens,
        };
        let reducer = Reducer::new(self.dtype, ReduceOp::Sum);
        let sum = |output: &mut [u8], pointers: &[*const u8]| match pointers.is_empty() {
            true => output.fill(0),
            // SAFETY: the output and each of the sources have `hidden` elements; no rank writes the sources, which are inputs,
            // records that have come, and copies of such.
            false => unsafe { reducer.run(output.as_mut_ptr(), pointers, self.hidden) },
        };
        let write = |at: usize, record: &mut [u8]| {
            let (output, probs) = record.split_at_mut(row_bytes);
            let places = &received.places[at * local..][..local];
            let chosen = || (0..local).filter(|&expert| places[expert] != NOWHERE);
            let is_by_token = routes.segments.is_none();
            // If rows are by token, all experts have the same row, which is the token's own.
            let most = if is_by_token { 1 } else { local };
            let pointers: Vec<_> = chosen()
                .take(most)
                .map(|expert| row(self.rows, row_bytes, places[expert] as usize).as_ptr())
                .collect();
            sum(output, &pointers);
            probs.fill(0);
            for expert in chosen().filter(|_| prob_bytes > 0) {
                let index = if is_by_token { at * local + expert } else { places[expert] as usize };
                row_mut(probs, 4, expert).copy_from_slice(&float(self.probs, index));
            }
        };
        let (output, output_probs) = (self.output, self.output_probs);
        let mut own = vec![0; records.bytes];
        let mut pointers = Vec::with_capacity(routes.traffic.world_size);
        records.push(moe, comm, &received.sources, write, |index, terms| {
            let to_probs =
                if prob_bytes > 0 { row_mut(output_probs, num_experts * 4, index) } else { &mut [] };
            to_probs.fill(0);
            pointers.clear();
            for term in terms {
                let (holder, record) = match *term {
                    Term::Own(at) => {
                        write(at, &mut own);
                        (rank, &*own)
                    }
                    Term::From(holder, record) => (holder, record),
                };
                pointers.push(record.as_ptr());
                if prob_bytes > 0 {
                    row_mut(to_probs, prob_bytes, holder).copy_from_slice(&record[row_bytes..]);
                }
            }
            sum(row_mut(output, row_bytes, index), &pointers);
        })
    }
}
