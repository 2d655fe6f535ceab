//! A caller's own way to carry a few bytes between ranks.

use serde::{Deserialize, Serialize};

use super::{Address, RendezvousError, Secret, Ticket};

/// What a caller that already connects the ranks (MPI, a torch process group, a key-value store) offers: every rank
/// contributes some bytes and gets those of all ranks.
///
/// It is used once, while the communicator is made, to carry rank 0's [`Ticket`] to the others; shared memory itself
/// travels over the socket that the ticket names.
pub trait Exchange {
    /// Contributes `mine`; returns the contributions of all ranks in order.
    ///
    /// # Errors
    /// A text that says what went wrong; it becomes [`RendezvousError::Exchange`].
    fn all_gather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, String>;
}

impl<F: FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>, String>> Exchange for F {
    fn all_gather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, String> {
        self(mine)
    }
}

/// A ticket in transit.
#[derive(Serialize, Deserialize)]
struct Carried {
    name: String,
    secret: String,
}

/// Has rank 0 make up a ticket and the others receive it.
pub(crate) fn exchange_ticket(exchange: &mut dyn Exchange, rank: usize) -> Result<Ticket, RendezvousError> {
    let failed = RendezvousError::Exchange;
    let mine = if rank == 0 { encode(&Ticket::random()) } else { Vec::new() };
    let all = exchange.all_gather(mine).map_err(failed)?;
    let first = all.first().ok_or_else(|| failed("it returned no contributions".into()))?;
    decode(first)
        .ok_or_else(|| failed(format!("rank 0's contribution of {} bytes is no ticket", first.len())))
}

fn encode(ticket: &Ticket) -> Vec<u8> {
    let Address::Abstract(name) = &ticket.address else { unreachable!("random tickets have abstract names") };
    let carried = Carried { name: name.clone(), secret: ticket.secret.expose() };
    serde_json::to_vec(&carried).expect("two strings serialise")
}

fn decode(bytes: &[u8]) -> Option<Ticket> {
    let Carried { name, secret } = serde_json::from_slice(bytes).ok()?;
    Some(Ticket { address: Address::Abstract(name), secret: Secret::new(secret) })
}
