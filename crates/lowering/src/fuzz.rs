//! What the fuzz targets do with bytes, which tests do for a while.

use crate::{
    Costs, Decisions, Graph, Numerics, Options, Realize, World, check, decisions::digest, lower, verify,
};

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
            assert_eq!(check(&graph, &lowered.decisions, &lowered.graph), []);
        }
    }
}

/// A program with a call whose operand lies in symmetric memory, with another one before it.
const PROGRAM: &str = "group tp size 2
%x: f32[4,8] = input()
%a: f32[4,8] = unary(%x) op=neg
%b: f32[4,8] = sync(%a) prim=all_reduce group=tp red=sum
%c: f32[4,8] = unary(%b) op=abs
%d: f32[4,8] = sync(%c) prim=all_reduce group=tp red=max
return %d
";

/// What a program is lowered to, with the decisions that [`decisions_file`] reads.
pub fn planned() -> (Graph, crate::Lowered) {
    let (before, world) = (Graph::from_text(PROGRAM).expect("a program"), World::default());
    let options = Options { realize: Realize::Always, ..Options::default() };
    let lowered = lower(&before, &world, &Costs::of(world.device), &options);
    (before, lowered)
}

/// Reads bytes as decisions, and asks for the proof under them, as they are and as those of the program.
///
/// # Panics
/// If something is wrong with the crate: what is written must be read as it was.
pub fn decisions_file(bytes: &[u8]) {
    let Ok(mut decisions) = Decisions::from_json(bytes) else { return };
    assert_eq!(Decisions::from_json(decisions.to_json().as_bytes()).expect("what was written"), decisions);
    let (before, lowered) = planned();
    check(&before, &decisions, &lowered.graph);
    decisions.graph = digest(&before);
    check(&before, &decisions, &lowered.graph);
}
