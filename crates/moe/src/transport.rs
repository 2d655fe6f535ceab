//! Counts and records between ranks on host memory, whatever the records hold.

use antiphon_fabric::{Communicator, Signature, Written};

use crate::{
    Moe,
    error::{MoeError, Result},
    layout::MAX_WORLD,
    routes::{Source, Token, Traffic, ranks},
};

/// What a rank says when it has no capacity.
const UNBOUNDED: u32 = u32::MAX;

/// What a rank tells the others about its tokens, before any moves.
pub(crate) struct Announcement<'a> {
    pub(crate) call: &'static str,
    pub(crate) signature: Signature,
    /// Nonzero where a token goes to a rank: `[T, R]`.
    pub(crate) in_rank: &'a [u8],
    /// How often the tokens chose each expert: i32 `[E]`.
    pub(crate) per_expert: &'a [u8],
    pub(crate) tokens: usize,
    pub(crate) num_experts: usize,
    pub(crate) capacity: Option<usize>,
}

/// What a rank learns from all announcements.
pub(crate) struct Counts {
    pub(crate) traffic: Traffic,
    /// For each of this rank's tokens.
    pub(crate) tokens: Vec<Token>,
    /// How often the tokens of each rank chose each of this rank's experts: `[R, L]`.
    pub(crate) chosen: Vec<usize>,
}

impl Announcement<'_> {
    pub(crate) fn exchange(&self, moe: &Moe, comm: &Communicator) -> Result<Counts> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let routed: Vec<u32> = self.in_rank.chunks_exact(world_size).map(bits).collect();
        // Each rank posts its instance, its tokens, its capacity, and its counts by rank and by expert.
        let capacity = self.capacity.map_or(UNBOUNDED, |rows| rows.min(UNBOUNDED as usize - 1) as u32);
        let mut words = vec![moe.number, self.tokens as u32, capacity];
        words.extend(
            (0..world_size).map(|to| routed.iter().filter(|&&bits| bits & 1 << to != 0).count() as u32),
        );
        words.extend(self.per_expert.chunks_exact(4).map(word));
        let len = words.len() * 4;
        // SAFETY: every rank posts as many words, which depend on the experts that the signature names.
        let mut rounds = unsafe { comm.rounds()? };
        // SAFETY: the outbox has room for `len` bytes.
        unsafe { rounds.outbox(len).copy_from_nonoverlapping(words.as_ptr().cast(), len) };
        rounds.exchange(&self.signature, Written::all(len))?;
        // SAFETY: every rank has posted as many words.
        let said = |from: usize, index: usize| unsafe {
            rounds.inbox(from, len).cast::<u32>().add(index).read_unaligned()
        };
        let from_all = |index: usize| (0..world_size).map(move |from| said(from, index));
        if let Some(peer) = (1..world_size).find(|&peer| said(peer, 0) != said(0, 0)) {
            let (number, theirs) = (said(0, 0), said(peer, 0));
            return Err(MoeError::Instances { call: self.call, rank: 0, number, peer, theirs });
        }
        let traffic = Traffic {
            rank,
            world_size,
            tokens: from_all(1).map(|tokens| tokens as usize).collect(),
            capacity: from_all(2).map(|rows| (rows != UNBOUNDED).then_some(rows as usize)).collect(),
            routed: (0..world_size)
                .flat_map(|from| (0..world_size).map(move |to| said(from, 3 + to) as usize))
                .collect(),
        };
        let local = self.num_experts / world_size;
        let own = 3 + world_size + rank * local;
        let chosen = (0..world_size)
            .flat_map(|from| (own..own + local).map(move |index| said(from, index) as usize))
            .collect();
        Ok(Counts { tokens: traffic.place(routed.into_iter()), traffic, chosen })
    }
}

/// A bit for each rank that is marked.
fn bits(marks: &[u8]) -> u32 {
    marks.iter().enumerate().fold(0, |bits, (rank, &mark)| bits | u32::from(mark != 0) << rank)
}

pub(crate) fn word(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The row `index` of a matrix whose rows have `bytes` bytes.
pub(crate) fn row(matrix: &[u8], bytes: usize, index: usize) -> &[u8] {
    &matrix[index * bytes..][..bytes]
}

pub(crate) fn row_mut(matrix: &mut [u8], bytes: usize, index: usize) -> &mut [u8] {
    &mut matrix[index * bytes..][..bytes]
}

/// Records of one size that go along routes, one for each token and rank.
pub(crate) struct Records<'a> {
    pub(crate) call: &'static str,
    /// The signature says what the size of a record depends on.
    pub(crate) signature: Signature,
    pub(crate) bytes: usize,
    pub(crate) traffic: &'a Traffic,
    pub(crate) tokens: &'a [Token],
}

/// What a rank made of a token.
#[derive(Clone, Copy)]
pub(crate) enum Term<'a> {
    /// This rank made it, of its received row of this number.
    Own(usize),
    /// Another rank made it, and sent this record.
    From(usize, &'a [u8]),
}

/// In front of a staged record: the ranks that the token goes to, and its slot.
const HEADER: usize = 16;

impl Records<'_> {
    /// Brings every token to the ranks of its experts: a rank stages the record of each of its tokens once, and the others copy
    /// it. `write` makes the record of a token, `take` has that of a received row. The sources of these are returned.
    pub(crate) fn pull(
        &self,
        moe: &mut Moe,
        comm: &Communicator,
        write: impl Fn(usize, &mut [u8]),
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<Vec<Source>> {
        let Self { traffic, tokens, .. } = self;
        let rank = traffic.rank;
        let bytes = HEADER + self.bytes;
        let records = moe.region.records(self.call, bytes)?;
        // Where the next row of each rank goes.
        let mut next: Vec<usize> =
            (0..traffic.world_size).map(|from| traffic.block(from, rank).start).collect();
        let mut sources = vec![Source { token: 0, slot: 0 }; traffic.kept_at(rank)];
        let mut own = vec![0; self.bytes];
        // SAFETY: every rank moves records of one size, which the signature says, along routes of one call.
        let mut rounds = unsafe { comm.rounds()? };
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, bytes),
            traffic.most(|from| traffic.tokens[from]),
            |half, piece| {
                for (place, index) in (piece.start..piece.end.min(tokens.len())).enumerate() {
                    let token = &tokens[index];
                    // SAFETY: a rank writes its own region alone.
                    let record = unsafe { half.get_mut(rank, place) };
                    record[..4].copy_from_slice(&token.kept.to_ne_bytes());
                    record[4..8].copy_from_slice(&token.slot.to_ne_bytes());
                    if token.kept & !(1 << rank) != 0 {
                        write(index, &mut record[HEADER..bytes]);
                    }
                }
            },
            |half, piece| {
                for (from, next) in next.iter_mut().enumerate() {
                    for index in piece.start..piece.end.min(traffic.tokens[from]) {
                        // SAFETY: the rank has written its region for this piece.
                        let record = unsafe { half.get(from, index - piece.start) };
                        let (kept, slot) = (word(record), word(&record[4..]));
                        if kept & 1 << rank == 0 {
                            continue;
                        }
                        let at = *next;
                        *next += 1;
                        let before = (kept & !(1 << from) & ((1 << rank) - 1)).count_ones();
                        sources[at] = Source { token: index as u32, slot: slot + before };
                        if from == rank {
                            write(index, &mut own);
                            take(at, &own);
                        } else {
                            take(at, &record[HEADER..bytes]);
                        }
                    }
                }
            },
        )?;
        Ok(sources)
    }

    /// Brings what ranks made of received rows back to the tokens' ranks: each record goes directly to its place at the source,
    /// which sums a token when all its records are there. `write` makes the record of a received row, `sum` has what all ranks
    /// made of a token, in the order of ranks.
    pub(crate) fn push(
        &self,
        moe: &mut Moe,
        comm: &Communicator,
        sources: &[Source],
        write: impl Fn(usize, &mut [u8]),
        mut sum: impl FnMut(usize, &[Term<'_>]),
    ) -> Result<()> {
        let Self { traffic, tokens, bytes, .. } = *self;
        let (rank, world_size) = (traffic.rank, traffic.world_size);
        let records = moe.region.records(self.call, bytes)?;
        let block = |from: usize| traffic.block(from, rank);
        // The next of this rank's rows that goes back to each peer.
        let mut next: Vec<usize> = (0..world_size).map(|from| block(from).start).collect();
        // The next token to sum, its row or the next one among this rank's own, and its records that came in earlier pieces.
        let (mut index, mut own, mut early) = (0, next[rank], vec![0; bytes * world_size]);
        // SAFETY: every rank moves records of one size, which the signature says, along routes of one call.
        let mut rounds = unsafe { comm.rounds()? };
        moe.region.in_pieces(
            &mut rounds,
            &self.signature,
            (records, bytes),
            traffic.most(|rank| traffic.returning_to(rank)),
            |half, piece| {
                for peer in (0..world_size).filter(|&peer| peer != rank) {
                    while next[peer] < block(peer).end && (sources[next[peer]].slot as usize) < piece.end {
                        let at = next[peer];
                        next[peer] += 1;
                        let slot = sources[at].slot as usize - piece.start;
                        // SAFETY: every slot of a rank is one row's, which one rank has.
                        write(at, &mut unsafe { half.get_mut(peer, slot) }[..bytes]);
                    }
                }
            },
            |half, piece| {
                // SAFETY: all rows that come back in this piece have come.
                let record = |slot: usize| &unsafe { half.get(rank, slot - piece.start) }[..bytes];
                while let Some(token) = tokens.get(index) {
                    let from_others = (token.kept & !(1 << rank)).count_ones() as usize;
                    let slots = token.slot as usize..token.slot as usize + from_others;
                    if slots.end > piece.end {
                        for slot in slots.start.max(piece.start)..piece.end {
                            row_mut(&mut early, bytes, slot - slots.start).copy_from_slice(record(slot));
                        }
                        return;
                    }
                    let mut terms = [Term::Own(own); MAX_WORLD];
                    let mut slot = slots.start;
                    for (term, holder) in terms.iter_mut().zip(ranks(token.kept)) {
                        if holder == rank {
                            own += 1;
                            continue;
                        }
                        let came_early = slot < piece.start;
                        let its =
                            if came_early { row(&early, bytes, slot - slots.start) } else { record(slot) };
                        *term = Term::From(holder, its);
                        slot += 1;
                    }
                    sum(index, &terms[..token.kept.count_ones() as usize]);
                    index += 1;
                }
            },
        )?;
        Ok(())
    }
}
