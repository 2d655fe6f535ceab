//! Exchanging bytes and objects that are not tensors.

use serde::{Serialize, de::DeserializeOwned};

use super::Communicator;
use crate::{FabricError, Operation, Signature, Written, signal::rounds::Rounds};

impl Communicator {
    /// Gives every rank the bytes of all ranks, in rank order. Lengths may differ.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub fn exchange_bytes(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        let signature = Signature::new(Operation::ExchangeObjects);
        let mut rounds = self.own_rounds()?;
        let lengths = exchange_lengths(&mut rounds, &signature, mine.len())?;
        let mut all = vec![Vec::new(); lengths.len()];
        let longest = lengths.iter().copied().max().unwrap_or(0);
        for start in (0..longest).step_by(Rounds::CAPACITY) {
            let part = |len: usize| start.min(len)..(start + Rounds::CAPACITY).min(len);
            let own = &mine[part(mine.len())];
            // SAFETY: a part is at most CAPACITY long, which is what both ends pass as the length.
            unsafe { rounds.outbox(Rounds::CAPACITY).copy_from_nonoverlapping(own.as_ptr(), own.len()) };
            rounds.exchange(&signature, Written::nothing(Rounds::CAPACITY).and(0..own.len()))?;
            for (rank, bytes) in all.iter_mut().enumerate() {
                // SAFETY: the rank has put its part there, as long as the length it announced says.
                let theirs = unsafe {
                    std::slice::from_raw_parts(
                        rounds.inbox(rank, Rounds::CAPACITY),
                        part(lengths[rank]).len(),
                    )
                };
                bytes.extend_from_slice(theirs);
            }
        }
        Ok(all)
    }

    /// Tells all ranks whether this one succeeded, so that all fail if one does: with its own error there, with one that
    /// names it and its `problem` (as in "rank 2 has no memory: ...") elsewhere.
    ///
    /// # Errors
    /// The rank's own; [`FabricError::InvalidArgument`] for another's; as [`barrier`](Self::barrier).
    pub fn agree<T, E>(&self, problem: &str, mine: Result<T, E>) -> Result<T, E>
    where
        E: std::fmt::Display + From<FabricError>,
    {
        let all = self.exchange_objects(&mine.as_ref().err().map(ToString::to_string))?;
        let mine = mine?;
        match all.iter().enumerate().find_map(|(rank, error)| Some((rank, error.as_ref()?))) {
            None => Ok(mine),
            Some((rank, error)) => {
                let subject = self.endpoint().health.members().subject(rank);
                Err(FabricError::invalid(format!("{subject} {problem}: {error}")).into())
            }
        }
    }

    /// Gives every rank the objects of all ranks, in rank order. They travel as JSON.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`FabricError::Object`] when a rank's object is of another type,
    /// [`FabricError::InvalidArgument`] when this rank's cannot be serialised.
    pub fn exchange_objects<T: Serialize + DeserializeOwned>(&self, mine: &T) -> Result<Vec<T>, FabricError> {
        // Bytes go round even if serialising failed: the others must not be left waiting.
        let serialised = serde_json::to_vec(mine);
        let all = self.exchange_bytes(serialised.as_deref().unwrap_or_default())?;
        serialised.map_err(|e| FabricError::invalid(format!("the object cannot be serialised: {e}")))?;
        let parse = |(rank, bytes): (usize, &Vec<u8>)| {
            serde_json::from_slice(bytes).map_err(|e| FabricError::Object { rank, problem: e.to_string() })
        };
        all.iter().enumerate().map(parse).collect()
    }
}

/// One round in which every rank says how many bytes it has.
fn exchange_lengths(
    rounds: &mut Rounds,
    signature: &Signature,
    mine: usize,
) -> Result<Vec<usize>, FabricError> {
    const LEN: usize = size_of::<u64>();
    // SAFETY: an outbox for 8 bytes; heads and bodies are aligned to 8.
    unsafe { rounds.outbox(LEN).cast::<u64>().write_unaligned(mine as u64) };
    rounds.exchange(signature, Written::all(LEN))?;
    let length = |rank| {
        // SAFETY: the rank has written 8 bytes there.
        unsafe { rounds.inbox(rank, LEN).cast::<u64>().read_unaligned() as usize }
    };
    Ok((0..rounds.world_size()).map(length).collect())
}
