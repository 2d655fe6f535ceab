//! Rounds: every rank posts one packet and waits for the packets of all ranks.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    FabricError, Nodes, Signature, Written,
    endpoint::Endpoint,
    layout::{BODY, Packet},
    signal::channel::Messages,
};

/// The one of a rank's two packets that carries a round. Two packets are enough: see the page of `signal`.
#[inline]
pub(super) fn parity(round: u64) -> usize {
    (round % 2) as usize
}

/// One lane's sequence of rounds, of which every collective consists.
///
/// The steps of a round: fill the [`outbox`](Self::outbox), [`post`](Self::post), [`wait`](Self::wait), read the
/// [`inbox`](Self::inbox) of every rank. The inboxes are valid until this rank posts the next round; the outbox of the next round may be filled right after the wait.
pub struct Rounds {
    endpoint: Arc<Endpoint>,
    messages: Arc<Messages>,
    lane: usize,
    /// The round that was posted last.
    sequence: u64,
    /// The longest wait for a peer, if it is not the communicator's timeout.
    limit: Option<Duration>,
    /// The call of which the rounds are parts, if their own signatures do not name it.
    pub(crate) call: Option<Signature>,
    /// How long this rank has waited for each rank, if it is measured.
    waits: Vec<Duration>,
    /// Room for the answer of `inboxes`, so that no call allocates.
    pointers: Vec<*const u8>,
}

// SAFETY: the pointers lead into the shared memory, which `endpoint` keeps mapped for every thread.
unsafe impl Send for Rounds {}

/// The arenas of all ranks, mapped as long as the communicator lives.
#[derive(Debug, Clone, Copy)]
pub struct Arenas {
    first: *mut u8,
    stride: usize,
}

impl Arenas {
    /// The address of an offset in a rank's arena.
    ///
    /// # Safety
    /// There is such a rank, and the offset lies within its arena.
    #[inline]
    pub unsafe fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        // SAFETY: passed on; regions lie one stride apart.
        unsafe { self.first.add(rank * self.stride + offset) }
    }
}

impl Rounds {
    /// The largest payload of one round, in bytes.
    pub const CAPACITY: usize = BODY;

    pub(crate) fn new(messages: Arc<Messages>, lane: usize) -> Self {
        let endpoint = messages.endpoint().clone();
        let pointers = Vec::with_capacity(endpoint.world_size);
        Self { limit: None, call: None, waits: Vec::new(), endpoint, messages, lane, sequence: 0, pointers }
    }

    /// As [`exchange`](Self::exchange), for `limit` at most.
    pub(crate) fn exchange_within(
        &mut self,
        limit: Duration,
        signature: &Signature,
    ) -> Result<(), FabricError> {
        self.limit = Some(limit);
        let exchanged = self.exchange(signature, Written::nothing(0));
        self.limit = None;
        exchanged
    }

    /// Measures from now on how long this rank waits for each other rank.
    pub fn measure_waits(&mut self) {
        self.waits = vec![Duration::ZERO; self.world_size()];
    }

    /// How long this rank has waited for each rank since [`measure_waits`](Self::measure_waits), which this ends. A rank waits for
    /// its peers one after the other, from the next rank on: a peer's wait has nothing of those before it.
    pub fn take_waits(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.waits)
    }

    /// This rank.
    #[inline]
    pub fn rank(&self) -> usize {
        self.endpoint.rank
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.endpoint.world_size
    }

    /// The nodes of the ranks, if there are several.
    #[inline]
    pub fn nodes(&self) -> Option<&Nodes> {
        self.endpoint.links.as_ref().map(|links| links.nodes())
    }

    /// Fails if an earlier round failed: the ranks are then no longer in step.
    #[inline]
    pub(crate) fn check_usable(&self) -> Result<(), FabricError> {
        self.endpoint.health.check_usable()
    }

    #[inline]
    fn packet(&self, rank: usize, round: u64) -> Packet<'_> {
        self.endpoint.regions.mailbox(rank, self.lane, parity(round))
    }

    /// The address of this rank's payload of `len` bytes for the next round: valid for writing `len` bytes, at most
    /// [`CAPACITY`](Self::CAPACITY), until the next [`post`](Self::post). All ranks must pass the same `len` for one round,
    /// also to [`inbox`](Self::inbox), because tiny payloads are stored elsewhere.
    #[inline]
    pub fn outbox(&self, len: usize) -> *mut u8 {
        debug_assert!(len <= Self::CAPACITY);
        self.packet(self.endpoint.rank, self.sequence + 1).payload(len)
    }

    /// The address of the payload of `len` bytes that `rank` has posted for this round: valid for reading from [`wait`](Self::wait) until the next
    /// [`post`](Self::post).
    #[inline]
    pub fn inbox(&self, rank: usize, len: usize) -> *const u8 {
        self.packet(rank, self.sequence).payload(len)
    }

    /// The [`inbox`](Self::inbox) of every rank, in rank order, this rank's own included.
    #[inline]
    pub fn inboxes(&mut self, len: usize) -> &mut [*const u8] {
        self.pointers.clear();
        let (endpoint, lane, parity) = (&self.endpoint, self.lane, parity(self.sequence));
        let inbox = |rank| endpoint.regions.mailbox(rank, lane, parity).payload(len).cast_const();
        self.pointers.extend((0..endpoint.world_size).map(inbox));
        &mut self.pointers
    }

    /// The offset in this rank's arena of `len` bytes at `pointer`, if they are symmetric memory of this communicator:
    /// then every rank can reach them through [`arenas`](Self::arenas).
    #[inline]
    pub fn arena_offset(&self, pointer: *const u8, len: usize) -> Option<usize> {
        if self.endpoint.links.is_some() {
            return None;
        }
        self.endpoint.regions.arena_offset(self.endpoint.rank, pointer, len)
    }

    /// The arenas of all ranks, as this process maps them.
    #[inline]
    pub fn arenas(&self) -> Arenas {
        Arenas { first: self.endpoint.regions.arena(0, 0), stride: self.endpoint.regions.layout().stride }
    }

    /// Posts the next round with the content of the outbox, of which `written` says what this rank has written: the ranks of other nodes
    /// get no more of it.
    ///
    /// # Errors
    /// [`FabricError::Engine`], where there are several nodes; the communicator is unusable afterwards.
    #[inline]
    pub fn post(&mut self, signature: &Signature, written: Written) -> Result<(), FabricError> {
        self.post_by_node(signature, |_| written.clone())
    }

    /// As [`post`](Self::post), where the ranks of each other node get something else: `written` says what of the payload is for a node. It
    /// is the same payload length for all. Every node gets the packet, even if nothing of the payload is for it, so all ranks wait for
    /// each other as in any round.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    #[inline]
    pub fn post_by_node(
        &mut self,
        signature: &Signature,
        written: impl Fn(usize) -> Written,
    ) -> Result<(), FabricError> {
        self.sequence += 1;
        self.packet(self.endpoint.rank, self.sequence).head.publish(self.sequence, signature.to_words());
        for rank in self.peers() {
            self.endpoint.regions.control(rank).bells[self.lane].0.ring();
        }
        match &self.endpoint.links {
            None => Ok(()),
            Some(links) => links
                .post(self.lane, self.sequence, signature.to_words(), written)
                .map_err(|error| self.fail(error)),
        }
    }

    /// Waits until every rank has posted this round, with the same signature. A rank that gives up in the round tells the others before
    /// this returns, and every rank that ends its wait after that fails too.
    ///
    /// # Errors
    /// [`FabricError::Mismatch`], [`PeerLost`](FabricError::PeerLost), [`Timeout`](FabricError::Timeout) or
    /// [`Aborted`](FabricError::Aborted); the communicator is unusable afterwards.
    #[inline]
    pub fn wait(&mut self, signature: &Signature) -> Result<(), FabricError> {
        let words = signature.to_words();
        for rank in self.peers() {
            let start = (!self.waits.is_empty()).then(Instant::now);
            let head = self.packet(rank, self.sequence).head;
            let arrived = self.endpoint.wait_for(
                &self.endpoint.regions.control(self.endpoint.rank).bells[self.lane].0,
                self.endpoint.patience,
                || head.arrival(self.sequence),
                |waited| self.look_around(signature, waited),
            );
            if let Some(start) = start {
                self.waits[rank] += start.elapsed();
            }
            match arrived {
                Ok(theirs) if theirs == words => {}
                Ok(theirs) => return Err(self.fail(self.mismatch(signature, rank, theirs))),
                Err(error) => return Err(self.fail(error)),
            }
        }
        self.await_outbox(signature)?;
        // The last look, behind all packets: see `given_up`.
        if self.endpoint.regions.has_given_up(self.lane, self.sequence) {
            let error = self.endpoint.health.given_up(&self.endpoint.regions, *signature);
            return Err(self.fail(error));
        }
        Ok(())
    }

    /// Waits until the packet of the next round may be filled. Its peers have read what it held before, as they have posted this round; the
    /// engine may not have noticed yet that what it sent of it has arrived. A peer that has left since is no reason to fail.
    #[inline]
    fn await_outbox(&mut self, signature: &Signature) -> Result<(), FabricError> {
        let Some(links) = &self.endpoint.links else { return Ok(()) };
        let Endpoint { health, regions, .. } = &*self.endpoint;
        let (lane, next) = (self.lane, self.sequence + 1);
        let refill = || links.may_refill(lane, next).then_some(());
        let has_stayed = |&rail: &usize| !regions.control(rail).has_departed();
        let stayed = || match refill() {
            None => links.rails().iter().copied().filter(has_stayed).collect(),
            Some(()) => Vec::new(),
        };
        let look = |waited| {
            self.endpoint.check_interrupt(*signature)?;
            health.check(regions, *signature, stayed, waited, Duration::MAX)?;
            let timeout = self.limit.unwrap_or_else(|| self.endpoint.timeout());
            match waited < timeout || refill().is_some() {
                true => Ok(()),
                false => Err(health.timed_out(*signature, waited, links.rails().to_vec())),
            }
        };
        let bell = &regions.control(self.endpoint.rank).bells[lane].0;
        let free = self.endpoint.wait_for(bell, self.endpoint.patience, refill, look);
        links.leave(lane, self.sequence);
        free.map_err(|error| self.fail(error))
    }

    /// Posts and waits.
    ///
    /// # Errors
    /// As [`post`](Self::post) and [`wait`](Self::wait).
    #[inline]
    pub fn exchange(&mut self, signature: &Signature, written: Written) -> Result<(), FabricError> {
        self.post(signature, written)?;
        self.wait(signature)
    }

    /// [Posts by node](Self::post_by_node) and waits.
    ///
    /// # Errors
    /// As [`post`](Self::post) and [`wait`](Self::wait).
    #[inline]
    pub fn exchange_by_node(
        &mut self,
        signature: &Signature,
        written: impl Fn(usize) -> Written,
    ) -> Result<(), FabricError> {
        self.post_by_node(signature, written)?;
        self.wait(signature)
    }

    /// Makes the communicator unusable because of `error`, and reports it to the peers; returns the error.
    #[cold]
    fn fail(&mut self, error: FabricError) -> FabricError {
        let error = match self.call {
            Some(call) => error.during(call),
            None => error,
        };
        self.endpoint.report(&error);
        self.endpoint.give_up(self.lane, self.sequence);
        error
    }

    /// The other ranks, beginning after this one so that not all look at the same rank first.
    #[inline]
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.endpoint.rank, self.endpoint.world_size);
        (rank + 1..world_size).chain(0..rank)
    }

    /// Checks while waiting whether the wait can still succeed.
    #[cold]
    fn look_around(&self, signature: &Signature, waited: Duration) -> Result<(), FabricError> {
        self.endpoint.check_interrupt(*signature)?;
        // A peer may be unable to post this round before a message of this rank has advanced.
        self.messages.progress();
        let arrival = |rank| self.packet(rank, self.sequence).head.arrival(self.sequence);
        let words = signature.to_words();
        for rank in self.peers() {
            if let Some(theirs) = arrival(rank).filter(|theirs| *theirs != words) {
                return Err(self.mismatch(signature, rank, theirs));
            }
        }
        let Endpoint { health, regions, .. } = &*self.endpoint;
        let missing = || {
            let is_missing = |&rank: &usize| rank != self.endpoint.rank && arrival(rank).is_none();
            let mut missing: Vec<usize> = (0..self.endpoint.world_size).filter(is_missing).collect();
            if let Some(links) = &self.endpoint.links {
                // What a rank of another node posts does not come any more if the rank is gone that takes it for this node.
                let rails = missing.iter().filter_map(|&rank| links.rail_from(rank));
                let gone: Vec<usize> = rails.filter(|&rail| health.is_gone(regions, rail)).collect();
                missing.extend(gone);
                missing.sort_unstable();
                missing.dedup();
            }
            missing
        };
        self.endpoint.look_around(self.call.unwrap_or(*signature), &missing, waited);
        let timeout = self.limit.unwrap_or_else(|| self.endpoint.timeout());
        health.check(regions, *signature, missing, waited, timeout)
    }

    fn mismatch(&self, mine: &Signature, peer: usize, theirs: [u64; 2]) -> FabricError {
        let health = &self.endpoint.health;
        match Signature::from_words(theirs) {
            Some(theirs) => health.disagreement(*mine, peer, theirs),
            None => health.aborted(*mine, peer, format!("wrote {theirs:x?}, which is no operation")),
        }
    }
}
