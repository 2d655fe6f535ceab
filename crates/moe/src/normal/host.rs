//! Dispatch and combine on host memory.

use std::sync::OnceLock;

use antiphon_device::{ReduceOp, host::reduce::Reducer};
use antiphon_fabric::{Communicator, Signature};
use antiphon_tensor::DType;

use crate::{
    Handle, Moe,
    error::{MoeError, Result},
    handle::{Source, Token, Traffic, ranks},
    instance::next_handle,
    tensors::{Ids, write_id},
};

/// What a rank says when it has no capacity.
const UNBOUNDED: u32 = u32::MAX;

/// The exchange of counts.
pub(super) struct Notify<'a> {
    pub(super) signature: Signature,
    /// `[T, R]`
    pub(super) in_rank: &'a [u8],
    /// i32 `[E]`
    pub(super) per_expert: &'a [u8],
    pub(super) tokens: usize,
    pub(super) num_experts: usize,
    pub(super) top_k: usize,
    pub(super) capacity: Option<usize>,
}

impl Notify<'_> {
    pub(super) fn run(self, moe: &Moe, comm: &Communicator) -> Result<Handle> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let routed: Vec<u32> = self.in_rank.chunks_exact(world_size).map(bits).collect();
        // Each rank posts its instance, its tokens, its capacity, and its counts by rank and by expert.
        let capacity = self.capacity.map_or(UNBOUNDED, |rows| rows.min(UNBOUNDED as usize - 1) as u32);
        let mut words = vec![moe.number, self.tokens as u32, capacity];
        words.extend(
            (0..world_size).map(|to| routed.iter().filter(|&&bits| bits & 1 << to != 0).count() as u32),
        );
        words.extend(
            self.per_expert
                .chunks_exact(4)
                .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]])),
        );
        let len = words.len() * 4;
        // SAFETY: every rank posts as many words, which depend on the experts that the signature names.
        let mut rounds = unsafe { comm.rounds()? };
        // SAFETY: the outbox has room for so many bytes.
        unsafe { rounds.outbox(len).copy_from_nonoverlapping(words.as_ptr().cast(), len) };
        rounds.exchange(&self.signature)?;
        // SAFETY: every rank has posted as many words.
        let word = |from: usize, index: usize| unsafe {
            rounds.inbox(from, len).cast::<u32>().add(index).read_unaligned()
        };
        let from_all = |index: usize| (0..world_size).map(move |from| word(from, index));
        if let Some(peer) = (1..world_size).find(|&peer| word(peer, 0) != word(0, 0)) {
            let (number, theirs) = (word(0, 0), word(peer, 0));
            return Err(MoeError::Instances { call: "dispatch", rank: 0, number, peer, theirs });
        }
        let traffic = Traffic {
            rank,
            world_size,
            tokens: from_all(1).map(|tokens| tokens as usize).collect(),
            capacity: from_all(2).map(|rows| (rows != UNBOUNDED).then_some(rows as usize)).collect(),
            routed: (0..world_size)
                .flat_map(|from| (0..world_size).map(move |to| word(from, 3 + to) as usize))
                .collect(),
        };
        let local = self.num_experts / world_size;
        let of_expert = |expert: usize| from_all(3 + world_size + expert).map(|count| count as usize).sum();
        Ok(Handle {
            owner: moe.token.clone(),
            number: next_handle(comm),
            num_experts: self.num_experts,
            top_k: self.top_k,
            tokens: traffic.place(routed.into_iter()),
            traffic,
            tokens_per_expert: (rank * local..(rank + 1) * local).map(of_expert).collect(),
            sources: OnceLock::new(),
        })
    }
}

/// A bit for each rank that is marked.
fn bits(marks: &[u8]) -> u32 {
    marks.iter().enumerate().fold(0, |bits, (rank, &mark)| bits | u32::from(mark != 0) << rank)
}

/// The row of so many bytes.
fn row(matrix: &[u8], bytes: usize, index: usize) -> &[u8] {
    &matrix[index * bytes..][..bytes]
}

fn row_mut(matrix: &mut [u8], bytes: usize, index: usize) -> &mut [u8] {
    &mut matrix[index * bytes..][..bytes]
}

/// What rows go from, apart from the ids.
pub(super) struct Part<'a> {
    pub(super) row: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) weights: &'a [u8],
}

/// A dispatch of rows along a handle.
pub(super) struct Rows<'a> {
    pub(super) signature: Signature,
    pub(super) top_k: usize,
    pub(super) from: Part<'a>,
    pub(super) ids: Option<Ids<'a>>,
    pub(super) row_bytes: usize,
    pub(super) scale_bytes: usize,
}

/// What rows go to.
pub(super) struct Received<'a> {
    pub(super) row: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    /// Ids and weights.
    pub(super) choices: Option<(&'a mut [u8], &'a mut [u8])>,
    pub(super) id_bytes: usize,
}

/// A record in a region: the ranks that the token goes to, its slot, the row, the scales, the weights, the ids.
const HEADER: usize = 16;

impl Rows<'_> {
    fn record(&self) -> usize {
        HEADER + self.row_bytes + self.scale_bytes + self.top_k * 8
    }

    pub(super) fn run(
        self,
        moe: &mut Moe,
        comm: &Communicator,
        handle: &Handle,
        mut to: Received<'_>,
    ) -> Result<()> {
        let Handle { traffic, tokens, .. } = handle;
        let rank = traffic.rank;
        let records = moe.region.records("dispatch", self.record())?;
        // Where the next row of each rank goes.
        let mut next: Vec<usize> =
            (0..traffic.world_size).map(|from| traffic.block(from, rank).start).collect();
        let mut sources = vec![Source { token: 0, slot: 0 }; handle.num_received()];
        let mut own = vec![0; self.record().next_multiple_of(HEADER)];
        // SAFETY: every rank moves records of one size, which the signature says, along handles of one call.
        let mut rounds = unsafe { comm.rounds()? };
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, self.record()),
            traffic.most(|from| traffic.tokens[from]),
            |half, piece| {
                for (place, index) in (piece.start..piece.end.min(tokens.len())).enumerate() {
                    // SAFETY: a rank writes its own region alone.
                    self.stage(&tokens[index], index, rank, unsafe { half.get_mut(rank, place) });
                }
            },
            |half, piece| {
                for (from, next) in next.iter_mut().enumerate() {
                    for index in piece.start..piece.end.min(traffic.tokens[from]) {
                        // SAFETY: the rank has written its region for this piece.
                        let record = unsafe { half.get(from, index - piece.start) };
                        let token = read_header(record);
                        if token.kept & 1 << rank == 0 {
                            continue;
                        }
                        let at = *next;
                        *next += 1;
                        let before = (token.kept & !(1 << from) & ((1 << rank) - 1)).count_ones();
                        sources[at] = Source { token: index as u32, slot: token.slot + before };
                        if from == rank {
                            self.write(index, &mut own);
                            self.take(&own, handle, at, &mut to);
                        } else {
                            self.take(record, handle, at, &mut to);
                        }
                    }
                }
            },
        )?;
        for at in handle.num_received()..handle.rows() {
            let Some((ids, _)) = &mut to.choices else { break };
            row_mut(ids, self.top_k * to.id_bytes, at)
                .chunks_exact_mut(to.id_bytes)
                .for_each(|id| write_id(id, -1));
        }
        handle.sources.get_or_init(|| sources);
        Ok(())
    }

    /// Writes a token's record, as far as another rank reads it.
    fn stage(&self, token: &Token, index: usize, rank: usize, record: &mut [u8]) {
        record[..4].copy_from_slice(&token.kept.to_ne_bytes());
        record[4..8].copy_from_slice(&token.slot.to_ne_bytes());
        if token.kept & !(1 << rank) != 0 {
            self.write(index, record);
        }
    }

    /// Writes what a token's record holds after the header.
    fn write(&self, index: usize, record: &mut [u8]) {
        let weight_bytes = self.top_k * 4;
        let (rows, rest) = record[HEADER..].split_at_mut(self.row_bytes);
        let (scales, rest) = rest.split_at_mut(self.scale_bytes);
        rows.copy_from_slice(row(self.from.row, self.row_bytes, index));
        scales.copy_from_slice(row(self.from.scales, self.scale_bytes, index));
        let Some(ids) = &self.ids else { return };
        let (weights, rest) = rest.split_at_mut(weight_bytes);
        weights.copy_from_slice(row(self.from.weights, weight_bytes, index));
        for (k, place) in rest.chunks_exact_mut(4).take(self.top_k).enumerate() {
            let id = ids.get(index * self.top_k + k).map_or(-1, |id| id as i32);
            place.copy_from_slice(&id.to_ne_bytes());
        }
    }

    /// Copies a record to a received row.
    fn take(&self, record: &[u8], handle: &Handle, at: usize, to: &mut Received<'_>) {
        let (rows, rest) = record[HEADER..].split_at(self.row_bytes);
        let (scales, rest) = rest.split_at(self.scale_bytes);
        row_mut(to.row, self.row_bytes, at).copy_from_slice(rows);
        row_mut(to.scales, self.scale_bytes, at).copy_from_slice(scales);
        let Some((ids, weights)) = &mut to.choices else { return };
        let (from_weights, from_ids) = rest.split_at(self.top_k * 4);
        let local = handle.num_experts / handle.traffic.world_size;
        let first = (handle.traffic.rank * local) as i32;
        let places = row_mut(ids, self.top_k * to.id_bytes, at).chunks_exact_mut(to.id_bytes);
        let weights = row_mut(weights, self.top_k * 4, at).chunks_exact_mut(4);
        let choices = from_ids.chunks_exact(4).zip(from_weights.chunks_exact(4));
        for ((place, weight), (id, from_weight)) in places.zip(weights).zip(choices) {
            let id = word(id) as i32 - first;
            let is_here = (0..local as i32).contains(&id);
            write_id(place, if is_here { id } else { -1 });
            weight.copy_from_slice(if is_here { from_weight } else { &[0; 4] });
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn read_header(record: &[u8]) -> Token {
    Token { routed: 0, kept: word(record), slot: word(&record[4..]) }
}

/// A combine of rows along a handle.
pub(super) struct Sums<'a> {
    pub(super) signature: Signature,
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) top_k: usize,
    pub(super) rows: &'a [u8],
    pub(super) weights: &'a [u8],
    pub(super) biases: [Option<&'a [u8]>; 2],
}

impl Sums<'_> {
    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    fn record(&self) -> usize {
        self.row_bytes() + self.top_k * 4
    }

    pub(super) fn run(
        self,
        moe: &mut Moe,
        comm: &Communicator,
        handle: &Handle,
        sources: &[Source],
        output: &mut [u8],
        output_weights: &mut [u8],
    ) -> Result<()> {
        let Handle { traffic, .. } = handle;
        let (rank, world_size) = (traffic.rank, traffic.world_size);
        let records = moe.region.records("combine", self.record())?;
        let peers = || (0..world_size).filter(move |&peer| peer != rank);
        // The next of this rank's rows that goes back to each peer, and where those of each end.
        let mut next: Vec<usize> = (0..world_size).map(|from| traffic.block(from, rank).start).collect();
        let end: Vec<usize> = (0..world_size).map(|from| traffic.block(from, rank).end).collect();
        let mut summing = Summing {
            next: 0,
            own: next[rank],
            early: vec![0; self.record().next_multiple_of(16) * world_size],
            reducers: [Reducer::new(self.dtype, ReduceOp::Sum), Reducer::new(DType::F32, ReduceOp::Sum)],
            pointers: Vec::with_capacity(2 + world_size),
            call: &self,
            handle,
            output,
            output_weights,
        };
        // SAFETY: every rank moves records of one size, which the signature says, along handles of one call.
        let mut rounds = unsafe { comm.rounds()? };
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, self.record()),
            traffic.most(|rank| traffic.returning_to(rank)),
            |half, piece| {
                for peer in peers() {
                    while next[peer] < end[peer] && (sources[next[peer]].slot as usize) < piece.end {
                        let at = next[peer];
                        next[peer] += 1;
                        let slot = sources[at].slot as usize - piece.start;
                        // SAFETY: every slot of a rank is one row's, which one rank has.
                        let record = unsafe { half.get_mut(peer, slot) };
                        let (rows, weights) = record.split_at_mut(self.row_bytes());
                        rows.copy_from_slice(row(self.rows, self.row_bytes(), at));
                        weights[..self.top_k * 4].copy_from_slice(row(self.weights, self.top_k * 4, at));
                    }
                }
            },
            |half, piece| {
                // SAFETY: all rows that come back in this piece have come.
                let record = |slot: usize| unsafe { half.get(rank, slot - piece.start) };
                summing.take(piece.start, piece.end, record);
            },
        )?;
        Ok(())
    }
}

/// The sums of this rank's tokens, made as rows come back.
struct Summing<'a> {
    /// The next token to sum.
    next: usize,
    /// Its row, or the next one, among this rank's own.
    own: usize,
    /// Rows of that token that came in earlier pieces.
    early: Vec<u8>,
    /// Of rows and of weights.
    reducers: [Reducer; 2],
    pointers: Vec<*const u8>,
    call: &'a Sums<'a>,
    handle: &'a Handle,
    output: &'a mut [u8],
    output_weights: &'a mut [u8],
}

impl Summing<'_> {
    /// Sums the tokens whose last rows are among the slots from `start` to `end`, which have come, and keeps what has come of
    /// the one after.
    fn take<'r>(&mut self, start: usize, end: usize, record: impl Fn(usize) -> &'r [u8]) {
        let Handle { tokens, traffic, .. } = self.handle;
        let bytes = self.call.record().next_multiple_of(16);
        while let Some(token) = tokens.get(self.next) {
            let slots = token.slot as usize..token.slot as usize + others(token, traffic.rank).count();
            if slots.end > end {
                for slot in slots.start.max(start)..slots.end.min(end) {
                    row_mut(&mut self.early, bytes, slot - slots.start).copy_from_slice(record(slot));
                }
                return;
            }
            self.sum(token, |index| match slots.start + index {
                slot if slot >= start => Ok(record(slot)),
                _ => Err(index),
            });
            self.next += 1;
        }
    }

    /// Sums a token: `find` has the record of its rows from others by their order, or says that it came early.
    fn sum<'r>(&mut self, token: &Token, find: impl Fn(usize) -> Result<&'r [u8], usize>) {
        let rank = self.handle.traffic.rank;
        let (call, index) = (self.call, self.next);
        let (row_bytes, weight_bytes) = (call.row_bytes(), call.top_k * 4);
        let record_bytes = call.record().next_multiple_of(16);
        let own = self.own;
        self.own += usize::from(token.kept & 1 << rank != 0);
        let parts = [
            (0, row_bytes, call.rows, &mut *self.output),
            (row_bytes, weight_bytes, call.weights, &mut *self.output_weights),
        ];
        for (part, (offset, bytes, own_rows, output)) in parts.into_iter().enumerate() {
            if bytes == 0 {
                continue;
            }
            self.pointers.clear();
            if part == 0 {
                self.pointers
                    .extend(call.biases.iter().flatten().map(|bias| row(bias, bytes, index).as_ptr()));
            }
            let mut from_others = 0;
            for holder in ranks(token.kept) {
                if holder == rank {
                    self.pointers.push(row(own_rows, bytes, own).as_ptr());
                    continue;
                }
                let record = match find(from_others) {
                    Ok(record) => record,
                    Err(early) => row(&self.early, record_bytes, early),
                };
                self.pointers.push(record[offset..][..bytes].as_ptr());
                from_others += 1;
            }
            let output = row_mut(output, bytes, index);
            let count = if part == 0 { call.hidden } else { call.top_k };
            match self.pointers.is_empty() {
                true => output.fill(0),
                // SAFETY: the output's row and each of the sources have so many elements; nobody writes the sources, which
                // are inputs, records that have come, and copies of such.
                false => unsafe { self.reducers[part].run(output.as_mut_ptr(), &self.pointers, count) },
            }
        }
    }
}

/// The other ranks that have a row of the token.
fn others(token: &Token, rank: usize) -> impl Iterator<Item = usize> {
    ranks(token.kept & !(1 << rank))
}
