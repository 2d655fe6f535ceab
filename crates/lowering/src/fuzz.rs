//! What the fuzz target does with bytes, which a test does for a while.

use crate::{Costs, Graph, Numerics, Options, Realize, World, check, lower, verify};

/// The most operations of a graph that is lowered: what is searched for is not how long it takes.
const MOST_OPS: usize = 2000;

/// Reads bytes as every form of a graph, and lowers what they hold.
///
/// # Panics
/// If something is wrong with the crate: what is lowered must make sense and be proved, and what is written must be read as it was.
pub fn graph_file(bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).ok().map(Graph::from_text);
    let graphs = [Graph::from_torch(bytes), Graph::from_json(bytes)].into_iter().chain(text);
    for graph in graphs.flatten().filter(|graph| graph.ops.len() <= MOST_OPS) {
        let written = Graph::from_text(&graph.to_text()).expect("what was written");
        assert_eq!(written.to_json(), graph.to_json());
        if !verify(&graph).is_empty() {
            continue;
        }
        let (world, costs) = (World::default(), Costs::of(World::default().device));
        for (numerics, realize) in [(Numerics::Close, Realize::Always), (Numerics::Same, Realize::Never)] {
            let options = Options { numerics, realize, overlap: true, ..Options::default() };
            let lowered = lower(&graph, &world, &costs, &options);
            assert_eq!(verify(&lowered.graph), []);
            assert_eq!(check(&graph, &lowered.plan, &lowered.graph), []);
        }
    }
}
