//! Programs for the tests, and numbers for them.
#![allow(dead_code)] // each test uses some

use antiphon_lowering::{
    Arithmetic, Costs, Graph, Kind, Lowered, Numerics, Options, Tensor, World, check, interpret, lower,
    verify,
};

/// The graph of a text, which makes sense.
pub fn graph(text: &str) -> Graph {
    let graph = Graph::from_text(text).unwrap();
    assert_eq!(verify(&graph), [], "{text}");
    graph
}

/// What comes of a graph, proved.
pub fn lowered(graph: &Graph, options: &Options) -> Lowered {
    let world = World::default();
    let lowered = lower(graph, &world, &Costs::of(world.device), options);
    assert_eq!(lowered.report.findings, [], "{}", graph.to_text());
    assert_eq!(check(graph, &lowered.plan, &lowered.graph), [], "{}", lowered.graph.to_text());
    lowered
}

pub fn numerics(numerics: Numerics) -> Options {
    Options { numerics, ..Options::default() }
}

/// The names of what a graph does, without inputs.
pub fn kinds(graph: &Graph) -> Vec<String> {
    let name = |kind: &Kind| serde_json::to_value(kind).unwrap()["kind"].as_str().unwrap().to_owned();
    graph.ops.iter().map(|op| name(&op.kind)).filter(|kind| kind != "input").collect()
}

/// Random numbers, the same in every run.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) ^ (self.0 >> 12 & 0xffff)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Inputs for every rank: multiples of 1/16 that all float types have.
pub fn inputs(graph: &Graph, world: usize, seed: u64) -> Vec<Vec<Tensor>> {
    let mut chance = Chance(seed);
    let hint = |name: &str| graph.syms.iter().find(|sym| sym.name == name)?.hint;
    let mut rank = || {
        let ops = graph.ops.iter().filter(|op| matches!(op.kind, Kind::Input | Kind::Constant));
        ops.map(|op| {
            let ty = graph.ty(op.outs[0]);
            let shape: Vec<usize> = ty.shape.iter().map(|size| size.value(&hint).unwrap() as usize).collect();
            let data = (0..shape.iter().product()).map(|_| chance.below(65) as f64 / 16.0 - 2.0);
            let data = data.map(|x| if ty.dtype.is_float() { x } else { (x * 4.0).trunc() }).collect();
            Tensor { dtype: ty.dtype, shape, data }
        })
        .collect::<Vec<_>>()
    };
    let mut ranks: Vec<Vec<Tensor>> = (0..world).map(|_| rank()).collect();
    // What is no partial result is equal on all ranks.
    for input in 0..ranks[0].len() {
        if input % 2 == 1 {
            for rank in 1..world {
                ranks[rank][input] = ranks[0][input].clone();
            }
        }
    }
    ranks
}

/// Both graphs compute the same: to the bit under `Same`, as real functions under `Close`.
pub fn agree(before: &Graph, after: &Graph, world: usize, seed: u64, arithmetic: Arithmetic, tolerance: f64) {
    let inputs = inputs(before, world, seed);
    let [old, new] = [before, after].map(|graph| interpret(graph, &inputs, arithmetic).unwrap());
    for (rank, (old, new)) in old.iter().zip(&new).enumerate() {
        for (output, (x, y)) in old.iter().zip(new).enumerate() {
            let apart = x.data.iter().zip(&y.data).map(|(x, y)| {
                if x == y || (x.is_nan() && y.is_nan()) {
                    0.0
                } else {
                    (x - y).abs() / x.abs().max(y.abs()).max(1.0)
                }
            });
            let worst = apart.fold(0.0, f64::max);
            let texts = || format!("{}\n{}", before.to_text(), after.to_text());
            assert!(worst <= tolerance, "rank {rank}, output {output}: off by {worst}\n{}", texts());
        }
    }
}
