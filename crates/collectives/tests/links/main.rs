//! What crosses the links between nodes: with the hierarchical forms each byte that another node needs, once.

mod mixed;

use std::{
    sync::{Barrier, Mutex, OnceLock},
    time::Duration,
};

use antiphon_collectives::{
    Call, Collectives, Communicator, ReduceOp,
    all_reduce::Algorithm,
    hierarchical::{Form, prefer},
};
use antiphon_fabric::{
    LocalWorld, Operation,
    engine::{Network, Traffic},
};
use antiphon_tensor::{Element, TensorView, TensorViewMut, bf16};

/// Two nodes of one rank and of two, four nodes and two nodes of four, one rank and three, and two nodes whose ranks alternate.
const LAYOUTS: [&[u32]; 6] = [
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 1, 1, 1],
    &[0, 1, 0, 1],
];

struct World(&'static [u32]);

impl World {
    fn ranks(&self, node: usize) -> usize {
        self.0.iter().filter(|&&of| of as usize == node).count()
    }

    fn nodes(&self) -> usize {
        *self.0.iter().max().unwrap() as usize + 1
    }

    /// What goes from each node to each other one while every rank makes a call: the least of several times, as the ranks also tell each
    /// other now and then that they live.
    fn measure(&self, form: Form, call: impl Fn(&Communicator) + Sync) -> Vec<Vec<Traffic>> {
        let names: Vec<&str> = self.0.iter().map(|&node| ["a", "b", "c", "d"][node as usize]).collect();
        let network: OnceLock<Network> = OnceLock::new();
        let keep = |net: &Network| drop(network.set(net.clone()));
        let (all, counts) = (Barrier::new(self.0.len()), Mutex::new(Vec::new()));
        let count = |comm: &Communicator| {
            all.wait();
            if comm.rank() == 0 {
                counts.lock().unwrap().push(self.count(network.get().unwrap()));
            }
            all.wait();
        };
        LocalWorld::run_on_nodes(&names, Duration::from_secs(60), keep, |comm| {
            prefer(&comm, form).unwrap();
            count(&comm);
            for _ in 0..8 {
                call(&comm);
                count(&comm);
            }
        });
        let counts = counts.into_inner().unwrap();
        let links = (0..self.nodes()).map(|from| {
            let of_link = |to: usize| {
                let calls = counts.windows(2).map(|pair: &[Vec<Vec<Traffic>>]| {
                    let [before, after] = [0, 1].map(|at| pair[at][from][to]);
                    (after.messages - before.messages, after.bytes - before.bytes)
                });
                let (messages, bytes) = calls.min().unwrap();
                Traffic { messages, bytes }
            };
            (0..self.nodes()).map(of_link).collect()
        });
        links.collect()
    }

    /// What went from each node to each other one so far.
    fn count(&self, network: &Network) -> Vec<Vec<Traffic>> {
        let mut links = vec![vec![Traffic::default(); self.nodes()]; self.nodes()];
        for (from, &of) in self.0.iter().enumerate() {
            for (to, &other) in self.0.iter().enumerate().filter(|(_, other)| **other != of) {
                let Traffic { messages, bytes } = network.traffic(from, to);
                let link = &mut links[of as usize][other as usize];
                *link = Traffic { messages: link.messages + messages, bytes: link.bytes + bytes };
            }
        }
        links
    }

    /// The links between different nodes.
    fn links(&self) -> impl Iterator<Item = (usize, usize)> {
        let nodes = self.nodes();
        (0..nodes).flat_map(move |from| (0..nodes).filter(move |&to| to != from).map(move |to| (from, to)))
    }

    /// Asserts the exact number of bytes that a call sends from each node to each other.
    fn assert_sends(
        &self,
        what: &str,
        form: Form,
        call: impl Fn(&Communicator) + Sync,
        expected: impl Fn(usize, usize) -> usize,
    ) {
        let links = self.measure(form, call);
        for (from, to) in self.links() {
            let bytes = links[from][to].bytes as usize;
            assert_eq!(bytes, expected(from, to), "{what} on {:?}, from {from} to {to}", self.0);
        }
    }
}

fn all_reduce<T: Element>(comm: &Communicator, elements: usize) {
    let (input, mut output) = (vec![T::default(); elements], vec![T::default(); elements]);
    comm.all_reduce_with(&input, &mut output, ReduceOp::Sum, Algorithm::TwoShot).unwrap();
}

/// Any operation of blocks of a number of elements.
fn block(comm: &Communicator, call: &Call<'_>, elements: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let input = vec![1f32; call.input_layout(elements, rank, world_size).elements()];
    let mut output = vec![0f32; call.output_layout(elements, rank, world_size).elements()];
    comm.call(call, Some(TensorView::from(&input)), Some(TensorViewMut::from(&mut output))).unwrap();
}

#[test]
fn an_all_reduce_sends_each_sum_and_each_result_once() {
    for layout in LAYOUTS {
        let (world, size) = (World(layout), 4);
        // One piece, and many.
        for share in [64, 200_000 / layout.len()] {
            let elements = share * layout.len();
            let both = |from, to| share * size * (world.ranks(from) + world.ranks(to));
            let call = |comm: &Communicator| all_reduce::<f32>(comm, elements);
            world.assert_sends("all_reduce of f32", Form::Hierarchical, call, both);
        }
        // Sums are not rounded on the way.
        let both = |from, to| 64 * (2 * world.ranks(from) + 4 * world.ranks(to));
        let call = |comm: &Communicator| all_reduce::<bf16>(comm, 64 * layout.len());
        world.assert_sends("all_reduce of bf16", Form::Hierarchical, call, both);
    }
}

#[test]
fn a_mirrored_all_reduce_sends_what_each_rank_posts_to_every_node() {
    for layout in LAYOUTS {
        let world = World(layout);
        let call = |comm: &Communicator| all_reduce::<f32>(comm, 64 * layout.len());
        // All inputs but the own part, and the own part's result.
        let posted = |from, _| world.ranks(from) * 64 * 4 * layout.len();
        world.assert_sends("a mirrored all_reduce", Form::Mirrored, call, posted);
    }
}

#[test]
fn every_rank_sends_one_message_to_each_other_node_for_every_round() {
    for layout in LAYOUTS {
        let world = World(layout);
        let links = world.measure(Form::Hierarchical, |comm| all_reduce::<f32>(comm, 64 * layout.len()));
        for (from, to) in world.links() {
            // The rounds of the inputs, the sums and the results of the only piece.
            assert_eq!(links[from][to].messages as usize, 3 * world.ranks(from), "{layout:?}");
        }
    }
}

#[test]
fn other_operations_send_to_a_node_what_it_needs() {
    const BLOCK: usize = 1000;
    let bytes = BLOCK * 4;
    for layout in LAYOUTS {
        let world = World(layout);
        let root = layout.len() - 1;
        let at = layout[root] as usize;
        let ranks = |node| world.ranks(node);
        let only = |is_so: bool, bytes: usize| if is_so { bytes } else { 0 };
        let sends = |operation, expected: &dyn Fn(usize, usize) -> usize| {
            let call = Call::new(operation).with_root(root).with_counts(vec![BLOCK; layout.len()]);
            let what = operation.name();
            world.assert_sends(what, Form::Hierarchical, |comm| block(comm, &call, BLOCK), expected);
        };
        sends(Operation::ReduceScatter, &|_, to| bytes * ranks(to));
        sends(Operation::ReduceScatterV, &|_, to| bytes * ranks(to));
        sends(Operation::Reduce, &|_, to| only(to == at, bytes));
        sends(Operation::AllGather, &|from, _| bytes * ranks(from));
        sends(Operation::AllGatherV, &|from, _| bytes * ranks(from));
        sends(Operation::Broadcast, &|from, _| only(from == at, bytes));
        sends(Operation::Gather, &|from, to| only(to == at, bytes * ranks(from)));
        sends(Operation::Scatter, &|from, to| only(from == at, bytes * ranks(to)));
        sends(Operation::AllToAll, &|from, to| bytes * ranks(from) * ranks(to));
    }
}
