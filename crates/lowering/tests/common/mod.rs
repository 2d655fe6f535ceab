//! Programs for the tests, and numbers for them.
#![allow(dead_code)] // each test uses some

pub mod adversarial;
pub mod tamper;

use antiphon_lowering::{
    Arithmetic, Costs, Decisions, Difference, Graph, Kind, Lowered, Numerics, Opinion, Options, Realize,
    Tensor, ValueId, World, check, compare, interpret, lower, second_opinion, verify,
};

/// The graph of a text, which makes sense.
pub fn graph(text: &str) -> Graph {
    let graph = Graph::from_text(text).unwrap();
    assert_eq!(verify(&graph), [], "{text}");
    graph
}

/// What comes of a graph: proved, and run beside it.
pub fn lowered(graph: &Graph, options: &Options) -> Lowered {
    let world = World::default();
    let lowered = lower(graph, &world, &Costs::of(world.device), options);
    assert_eq!(lowered.report.findings, [], "{}", graph.to_text());
    assert_eq!(check(graph, &lowered.decisions, &lowered.graph), [], "{}", lowered.graph.to_text());
    if let Opinion::Different(difference) = second_opinion(graph, &lowered.graph, options.numerics) {
        panic!("{difference}\n{}\nbecame\n{}", graph.to_text(), lowered.graph.to_text());
    }
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
            let data = data.map(|x| match ty.dtype {
                antiphon_lowering::Element::Bool => f64::from(x > 0.0),
                dtype if dtype.is_float() => x,
                _ => (x * 4.0).trunc().abs(),
            });
            let data = data.collect();
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

/// What is wrong with how a program is lowered, or with what is proved of it: a program of [`adversarial`] with `changes` of the
/// lowered one. Says how many of each kind of change the proof refused, and how many it accepted.
pub fn trial(seed: u64, changes: usize, tally: &mut Tally) -> Result<(), String> {
    let text = adversarial::program(seed);
    let before = Graph::from_text(&text).map_err(|error| format!("{error}\n{text}"))?;
    match (verify(&before).first(), beyond(&before)) {
        (Some(_), Some(_)) => return Ok(()),
        (None, None) => {}
        (finding, beyond) => {
            let found = finding.map(ToString::to_string);
            return Err(format!("seed {seed}: found {found:?}, where {beyond:?}\n{text}"));
        }
    }
    let numerics = if seed.is_multiple_of(2) { Numerics::Close } else { Numerics::Same };
    let realize = if seed.is_multiple_of(3) { Realize::Never } else { Realize::Always };
    let options = Options { numerics, realize, overlap: seed.is_multiple_of(5), ..Options::default() };
    let world = World::default();
    let after = lower(&before, &world, &Costs::of(world.device), &options);
    let texts = || format!("seed {seed}, {numerics:?}\n{text}\nbecame\n{}", after.graph.to_text());
    let findings =
        after.report.findings.iter().chain(&check(&before, &after.decisions, &after.graph)).next().cloned();
    if let Some(finding) = findings {
        return Err(format!("not proved: {finding}; {}", texts()));
    }
    let apart = |graph: &Graph| {
        let runs = [2 * seed, 2 * seed + 1].map(|seed| compare(&before, graph, numerics, seed));
        runs.into_iter().find_map(|found| match found {
            Ok(found) => found.filter(Difference::is_too_large).map(|found| found.to_string()),
            Err(error) => Some(error),
        })
    };
    if let Some(difference) = apart(&after.graph) {
        return Err(format!("lowered to something else: {difference}; {}", texts()));
    }
    let mut chance = Chance(seed ^ 0x7A3F);
    for _ in 0..changes {
        let Some((graph, decisions, kind)) = tamper::tampered(&after.graph, &after.decisions, &mut chance)
        else {
            continue;
        };
        let findings = check(&before, &decisions, &graph);
        tally.count(kind, findings.is_empty());
        if !findings.is_empty() {
            continue;
        }
        if let Some(difference) = apart(&graph) {
            let what = tamper::KINDS[kind].0;
            return Err(format!(
                "accepted, where {what}: {difference}; {}\ntampered\n{}",
                texts(),
                graph.to_text()
            ));
        }
        if let Some(slots) = races(&graph, &decisions) {
            return Err(format!("accepted, where {}: {slots}; {}", tamper::KINDS[kind].0, texts()));
        }
    }
    Ok(())
}

/// How many changes of each kind were refused, and how many accepted.
pub struct Tally(Vec<[usize; 2]>);

impl Tally {
    pub fn new() -> Self {
        Self(vec![[0; 2]; tamper::KINDS.len()])
    }

    fn count(&mut self, kind: usize, accepted: bool) {
        self.0[kind][usize::from(accepted)] += 1;
    }

    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| (0..2).for_each(|i| own[i] += other[i]));
    }

    pub fn changes(&self) -> usize {
        self.0.iter().flatten().sum()
    }

    /// The kinds of which none was refused.
    pub fn never_refused(&self) -> Vec<&'static str> {
        let kinds = self.0.iter().zip(tamper::KINDS);
        kinds.filter(|(counts, _)| counts[0] == 0).map(|(_, (name, _))| *name).collect()
    }

    /// `{"kind": [refused, accepted]}`.
    pub fn to_json(&self) -> String {
        let kinds = self
            .0
            .iter()
            .zip(tamper::KINDS)
            .map(|([refused, accepted], (name, _))| format!("    \"{name}\": [{refused}, {accepted}]"));
        format!("{{\n{}\n  }}", kinds.collect::<Vec<_>>().join(",\n"))
    }
}

/// Values of the symbols, all of which are equal: from the least of any to the greatest.
fn sizes(graph: &Graph) -> impl Iterator<Item = impl Fn(&str) -> Option<i64>> {
    let least = graph.syms.iter().map(|sym| sym.min).min().unwrap_or(0);
    let most = graph.syms.iter().filter_map(|sym| sym.max).max().unwrap_or(least);
    (least..=most).map(|size| move |_: &str| Some(size))
}

/// How many bytes of its storage a value needs, for some values of the symbols.
fn end(graph: &Graph, value: ValueId, of: &impl Fn(&str) -> Option<i64>) -> Option<u64> {
    let ty = graph.ty(value);
    let reach = u64::try_from(ty.reach()?.value(of)?).ok()?;
    Some(reach * ty.dtype.size() as u64)
}

/// A value that ends behind its storage for all values of the symbols.
fn beyond(graph: &Graph) -> Option<String> {
    let analysis = graph.analyse();
    let is_beyond = |value: &&ValueId| {
        let root = analysis.root(**value);
        root.is_some_and(|root| sizes(graph).all(|of| end(graph, **value, &of) > end(graph, root, &of)))
    };
    let found = graph.ops.iter().flat_map(|op| &op.outs).find(is_beyond)?;
    Some(format!("{} ends behind its storage", graph.name(*found)))
}

/// Two slots that share bytes and are in use at once, or one that is too small, by a count of its own: each slot is in use from
/// the first operation that touches a value of its storage to the last, or to the wait for it.
pub fn races(graph: &Graph, decisions: &Decisions) -> Option<String> {
    let analysis = graph.analyse();
    let mut lives = Vec::new();
    for slot in &decisions.slots {
        let root = graph.values.iter().position(|value| value.name == slot.value)?;
        let store = analysis.store[root]?;
        let lies = |value: &ValueId| analysis.store[value.index()] == Some(store);
        let mut places = Vec::new();
        for (place, op) in graph.ops.iter().enumerate() {
            if op.args.iter().chain(&op.outs).any(lies) {
                places.push(place);
                if let Kind::Start { token, .. } = &op.kind {
                    let waits = |op: &antiphon_lowering::Op| matches!(&op.kind, Kind::Wait { tokens } if tokens.contains(token));
                    places.extend(graph.ops.iter().position(waits));
                }
            }
        }
        for value in analysis.values(store) {
            let most = sizes(graph).filter_map(|of| end(graph, *value, &of)).max();
            if most.is_none_or(|most| slot.bytes < most) {
                let name = graph.name(*value);
                return Some(format!(
                    "{} has {} bytes, of which {name} has {most:?}",
                    slot.value, slot.bytes
                ));
            }
        }
        lives.push((slot, *places.iter().min()?, *places.iter().max()?));
    }
    for (index, (a, first, last)) in lives.iter().enumerate() {
        for (b, begin, end) in &lives[..index] {
            let together = first <= end && begin <= last && a.domain == b.domain;
            if together && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes {
                return Some(format!("{} and {} are in use at once", a.value, b.value));
            }
        }
    }
    None
}
