//! A caller's own way to carry a few bytes between ranks.

use serde::{Deserialize, Serialize};

use super::{Address, Card, RendezvousError, Secret, Ticket};

/// What a caller that already connects the ranks (MPI, a torch process group, a key-value store) offers: every rank
/// contributes some bytes and gets those of all ranks.
///
/// It is used while the communicator is made: once where all ranks are on one machine, to carry rank 0's [`Ticket`] to the others, and
/// up to three times where they are on several. Shared memory itself travels over the socket that the ticket names.
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

/// What a rank contributes first.
#[derive(Serialize, Deserialize)]
struct First {
    /// The name and the secret of the ticket: rank 0's is everybody's.
    ticket: Option<(String, String)>,
    /// Which node the rank is on, and which machine.
    place: [String; 2],
}

/// Has rank 0 make up a ticket and the others receive it. Whether ranks are at different places: each states the names of its node and
/// of its machine.
pub(crate) fn exchange_ticket(
    exchange: &mut dyn Exchange,
    rank: usize,
    place: [String; 2],
) -> Result<(Ticket, bool), RendezvousError> {
    let failed = RendezvousError::Exchange;
    let ticket = (rank == 0).then(|| {
        let Ticket { address, secret } = Ticket::random();
        let Address::Abstract(name) = address else { unreachable!("random tickets have abstract names") };
        (name, secret.expose())
    });
    let all = gather(exchange, &First { ticket, place })?;
    let bytes = all.first().ok_or_else(|| failed("it returned no contributions".into()))?;
    let first = serde_json::from_slice::<First>(bytes).ok();
    let no_ticket = || failed(format!("rank 0's contribution of {} bytes is no ticket", bytes.len()));
    let First { ticket: Some((name, secret)), place } = first.ok_or_else(no_ticket)? else {
        return Err(no_ticket());
    };
    let mut is_spread = false;
    for (rank, bytes) in all.iter().enumerate() {
        let other: First = read(rank, bytes)?;
        is_spread |= other.place != place;
    }
    Ok((Ticket { address: Address::Abstract(name), secret: Secret::new(secret) }, is_spread))
}

/// Gives every rank the cards of all.
pub(super) fn exchange_cards(exchange: &mut dyn Exchange, card: &Card) -> Result<Vec<Card>, RendezvousError> {
    let all = gather(exchange, card)?;
    let cards = all.iter().enumerate().map(|(rank, bytes)| {
        let card: Card = read(rank, bytes)?;
        if (card.rank, card.world_size) == (rank, all.len()) {
            Ok(card)
        } else {
            Err(unreadable(rank, bytes))
        }
    });
    let cards: Vec<Card> = cards.collect::<Result<_, _>>()?;
    let (count, expected) = (cards.len(), card.world_size);
    let wrong =
        || RendezvousError::Exchange(format!("it returned {count} contributions of {expected} ranks"));
    if count == expected { Ok(cards) } else { Err(wrong()) }
}

/// Waits until all ranks have come as far.
pub(crate) fn exchange_nothing(exchange: &mut dyn Exchange) -> Result<(), RendezvousError> {
    gather(exchange, &()).map(drop)
}

fn gather(exchange: &mut dyn Exchange, mine: &impl Serialize) -> Result<Vec<Vec<u8>>, RendezvousError> {
    let mine = serde_json::to_vec(mine).expect("plain data serialises");
    exchange.all_gather(mine).map_err(RendezvousError::Exchange)
}

fn read<'a, T: Deserialize<'a>>(rank: usize, bytes: &'a [u8]) -> Result<T, RendezvousError> {
    serde_json::from_slice(bytes).map_err(|_| unreadable(rank, bytes))
}

fn unreadable(rank: usize, bytes: &[u8]) -> RendezvousError {
    RendezvousError::Exchange(format!("rank {rank}'s contribution of {} bytes cannot be read", bytes.len()))
}
