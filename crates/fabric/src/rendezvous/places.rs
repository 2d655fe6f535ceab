//! The meeting of ranks that may be on several nodes.
//!
//! All ranks meet first, and tell each other where they are. The ranks of each node then meet at a socket of their own, whose name and
//! secret only they know, and share memory there.

use std::{sync::Arc, time::Instant};

use antiphon_device::host::{
    memory::SharedMemory,
    process::{ProcessWatch, network_namespace},
};

use super::{
    Address, Card, Exchange, Met, Place, RendezvousError, Secret, Ticket, Wait, exchange::exchange_cards,
    frame::Nonce, meet_at, secret::hex,
};
use crate::{engine::Key, nodes::Nodes};

/// What the rendezvous gives a rank.
pub(crate) struct Meeting {
    /// The cards of all ranks, in order.
    pub(crate) cards: Vec<Card>,
    /// The processes of all ranks, where they are others than this one and can be watched: not those of other nodes.
    pub(crate) processes: Vec<Option<Arc<ProcessWatch>>>,
    /// Mapped by all ranks of the node.
    pub(crate) memory: SharedMemory,
    /// Which ranks share memory.
    pub(crate) nodes: Nodes,
    /// What messages between nodes have in common, if there are several.
    pub(crate) key: Option<Key>,
}

/// Meets the other ranks, and shares `bytes` of memory with those of the same node. The card says where the rank is.
pub(crate) fn meet_on_nodes(
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    wait: Wait<'_>,
) -> Result<Meeting, RendezvousError> {
    let start = Instant::now();
    let Met { cards, random, .. } = meet_at(ticket, card.clone(), None, wait)?;
    let rest = Wait { timeout: wait.timeout.saturating_sub(start.elapsed()), ..wait };
    share_on_nodes((&ticket.secret, &random), cards, card, bytes, rest)
}

/// As [`meet_on_nodes`], where a caller's exchange carries the cards.
pub(crate) fn meet_by_exchange(
    exchange: &mut dyn Exchange,
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    wait: Wait<'_>,
) -> Result<Meeting, RendezvousError> {
    let cards = exchange_cards(exchange, &card)?;
    // The secret itself was drawn for this meeting.
    share_on_nodes((&ticket.secret, &Nonce::new()), cards, card, bytes, wait)
}

/// Meets the ranks of the same node, to share memory with them, given the secret and what rank 0 has drawn.
fn share_on_nodes(
    (secret, random): (&Secret, &Nonce),
    cards: Vec<Card>,
    card: Card,
    bytes: usize,
    wait: Wait<'_>,
) -> Result<Meeting, RendezvousError> {
    let nodes = nodes(&cards)?;
    let key = secret.derive("engine", random, &cards, 0)[..Key::LEN].try_into().map(Key::from_bytes);
    let node = nodes.of(card.rank);
    let mates = nodes.ranks(node);
    let local = Ticket {
        address: Address::Abstract(format!(
            "antiphon-{}",
            &hex(&secret.derive("name", random, &cards, node))[..32]
        )),
        secret: Secret::new(secret.derive("node", random, &cards, node)),
    };
    let rank = card.rank;
    let of_node = Card { rank: nodes.rank_in_node(rank), world_size: mates.len(), ..card };
    let met = meet_at(&local, of_node, Some(bytes), wait);
    let met = met.map_err(|error| of_world(error, rank, &nodes))?;
    let mut processes = vec![None; cards.len()];
    for (&rank, process) in mates.iter().zip(met.processes) {
        processes[rank] = process;
    }
    let memory = met.memory.expect("it was asked for");
    let key = key.ok().filter(|_| nodes.count() > 1);
    Ok(Meeting { cards, processes, memory, nodes, key })
}

impl Place {
    /// Where this process is, on the node of this name, or on that of its machine's name.
    pub(crate) fn here(node: Option<&str>, engine: Result<Vec<u8>, String>) -> Self {
        let machine = machine();
        Self { node: node.map_or_else(|| machine.clone(), str::to_owned), machine, engine }
    }
}

/// What names this machine, and the network namespace there in which this process is.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{}, network namespace {}", boot.trim(), network_namespace())
}

/// The nodes that the cards state.
fn nodes(cards: &[Card]) -> Result<Nodes, RendezvousError> {
    let place = |card: &Card| {
        let unknown =
            || RendezvousError::NoEngine { rank: card.rank, problem: "it does not say where it is".into() };
        card.place.clone().ok_or_else(unknown)
    };
    let places: Vec<Place> = cards.iter().map(place).collect::<Result<_, _>>()?;
    let nodes = Nodes::named(places.iter().map(|place| place.node.as_str()));
    for node in 0..nodes.count() {
        let machine = &places[nodes.ranks(node)[0]].machine;
        let (here, there): (Vec<usize>, Vec<usize>) =
            nodes.ranks(node).iter().partition(|&&rank| places[rank].machine == *machine);
        if let Some(&other) = there.first() {
            let machines = [(machine.clone(), here), (places[other].machine.clone(), there)];
            let (node, machines) = (nodes.name(node).to_owned(), Box::new(machines));
            return Err(RendezvousError::NodeOnTwoMachines { node, machines });
        }
    }
    let without =
        places.iter().enumerate().find_map(|(rank, place)| Some((rank, place.engine.as_ref().err()?)));
    match without {
        Some((rank, problem)) if nodes.count() > 1 => {
            Err(RendezvousError::NoEngine { rank, problem: problem.clone() })
        }
        _ => Ok(nodes),
    }
}

/// An error of the meeting of a node's ranks, which are named as the world numbers them.
fn of_world(error: RendezvousError, rank: usize, nodes: &Nodes) -> RendezvousError {
    let mates = nodes.ranks(nodes.of(rank));
    match error {
        RendezvousError::Missing { address, waited, missing, last_refusal, turned_away, .. } => {
            RendezvousError::Missing {
                rank,
                world_size: nodes.world_size(),
                address,
                waited,
                missing: missing.into_iter().filter_map(|mate| mates.get(mate).copied()).collect(),
                last_refusal,
                turned_away,
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn card(rank: usize, node: &str, machine: &str, engine: Result<Vec<u8>, String>) -> Card {
        let place = Some(Place { node: node.into(), machine: machine.into(), engine });
        Card {
            rank,
            world_size: 3,
            pid: 1,
            pid_namespace: 1,
            cores: vec![],
            arena_bytes: 1,
            parent_rank: None,
            place,
        }
    }

    #[test]
    fn a_node_is_on_one_machine() {
        let cards =
            [card(0, "a", "x", Ok(vec![])), card(1, "b", "y", Ok(vec![])), card(2, "a", "z", Ok(vec![]))];
        let error = nodes(&cards).unwrap_err().to_string();
        for part in ["\"a\"", "[0]", "x", "[2]", "z", "ANTIPHON_NODE"] {
            assert!(error.contains(part), "{error}");
        }
    }

    /// A message of an earlier world is not taken for one of this world, whoever has kept it.
    #[test]
    fn worlds_with_one_secret_and_the_same_cards_have_different_keys() {
        let ticket = Ticket { secret: Secret::new("always the same"), ..Ticket::random() };
        let key_of = |rank: usize| {
            let card = Card { world_size: 2, ..card(rank, ["a", "b"][rank], "x", Ok(vec![])) };
            let wait = Wait { timeout: Duration::from_secs(20), watch: &|| Ok(()) };
            let met = meet_on_nodes(&ticket, card, 4096, wait).unwrap();
            met.key.unwrap().to_bytes()
        };
        let keys_of_a_world = || {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| key_of(1));
                [key_of(0), other.join().unwrap()]
            })
        };
        let [first, second] = [keys_of_a_world(), keys_of_a_world()];
        assert_eq!((first[0], second[0]), (first[1], second[1]), "the ranks of a world have one key");
        assert_ne!(first[0], second[0]);
    }

    #[test]
    fn ranks_without_an_engine_are_alone_on_their_node() {
        let no = || Err("no libucp".to_owned());
        let error = nodes(&[card(0, "a", "x", Ok(vec![])), card(1, "b", "x", no())]).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("no libucp"), "{error}");
        assert_eq!(nodes(&[card(0, "a", "x", no()), card(1, "a", "x", no())]).unwrap().count(), 1);
    }
}
