//! Whether a graph makes sense.

use crate::{
    analysis::Analysis,
    error::{Finding, FindingKind},
    graph::{Graph, Op},
    hash::{HashMap, HashSet},
    ids::{StoreId, TokenId, ValueId},
    op::{Coll, Kind, ResultMemory},
    types::{Class, Element},
};
use calls::fits;
pub(crate) use calls::is_fusible;
use shapes::shapes;
pub(crate) use shapes::{is_within, suit};

pub(crate) mod arithmetic;
mod calls;
mod shapes;

/// What is wrong with a graph; nothing if it makes sense.
///
/// * Every value is defined once, before it is used, and used in its latest version.
/// * Operands and results fit their operation; groups exist, and calls fit them.
/// * Each start is waited for once. While a collective is in flight, nobody touches what it writes, and nobody writes what
///   it reads.
/// * No communication buffer leaves the graph.
pub fn verify(graph: &Graph) -> Vec<Finding> {
    let analysis = graph.analyse();
    let mut verifier = Verifier {
        graph,
        analysis: &analysis,
        findings: analysis.findings.clone(),
        flights: Flights::default(),
    };
    let mut latest = vec![0; analysis.stores.len()];
    for op in &graph.ops {
        verifier.versions(op, &mut latest);
        verifier.flights(op);
        if let Err(text) = shapes(graph, &analysis, op) {
            verifier.findings.push(Finding::new(FindingKind::Shape, text).op(&op.name));
        }
        if let Some(text) = op.kind.group().and_then(|group| fits(graph, op, group).err()) {
            verifier.findings.push(Finding::new(FindingKind::Group, text).op(&op.name));
        }
    }
    verifier.outputs(&latest);
    verifier.findings
}

struct Verifier<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    findings: Vec<Finding>,
    flights: Flights,
}

/// Collectives that have been started and not waited for.
#[derive(Default)]
struct Flights {
    /// What each token's start reads and writes.
    open: HashMap<TokenId, (Vec<StoreId>, HashSet<ValueId>)>,
    /// Storages that nobody may touch, with the token.
    written: HashMap<StoreId, TokenId>,
    /// Storages that nobody may write, with how many starts read them.
    read: HashMap<StoreId, usize>,
    seen: HashSet<TokenId>,
}

impl Verifier<'_> {
    fn find(&mut self, kind: FindingKind, op: &Op, text: impl Into<String>) {
        self.findings.push(Finding::new(kind, text).op(&op.name));
    }

    fn store(&self, value: ValueId) -> Option<StoreId> {
        self.analysis.store[value.index()]
    }

    /// Whether the latest versions are used.
    fn versions(&mut self, op: &Op, latest: &mut [u32]) {
        for arg in &op.args {
            let Some(store) = self.store(*arg) else { continue };
            let (version, now) = (self.analysis.version[arg.index()], latest[store.index()]);
            if version != now {
                let name = self.graph.name(*arg);
                let text = format!(
                    "{name} is version {version} of its storage, which has been overwritten {now} times"
                );
                let finding = Finding::new(FindingKind::Stale, text).op(&op.name).value(name);
                self.findings.push(finding.numbers([version.into(), now.into()]));
            }
        }
        for (index, out) in op.outs.iter().enumerate() {
            if let (ResultMemory::Write(_), Some(store)) = (op.kind.result_memory(index), self.store(*out)) {
                latest[store.index()] = self.analysis.version[out.index()];
            }
        }
    }

    fn flights(&mut self, op: &Op) {
        if let Kind::Wait { tokens } = &op.kind {
            self.wait(op, tokens);
            return;
        }
        for arg in &op.args {
            let store = self.store(*arg);
            if let Some(token) = store.and_then(|store| self.flights.written.get(&store)).copied() {
                let name = self.graph.name(*arg);
                let text = format!("{name} is used while the collective of token {} writes it", token.0);
                let finding = Finding::new(FindingKind::InFlight, text).op(&op.name).value(name);
                self.findings.push(finding.numbers([token.0.into()]));
            }
        }
        for (index, out) in op.outs.iter().enumerate() {
            let Some(store) =
                self.store(*out).filter(|_| matches!(op.kind.result_memory(index), ResultMemory::Write(_)))
            else {
                continue;
            };
            if self.flights.read.get(&store).is_some_and(|readers| *readers > 0) {
                let text = format!("{} is written while a collective reads it", self.graph.name(*out));
                self.find(FindingKind::InFlight, op, text);
            }
        }
        if let Kind::Start { coll, token } = &op.kind {
            self.start(op, coll, *token);
        }
    }

    fn start(&mut self, op: &Op, coll: &Coll, token: TokenId) {
        if !self.flights.seen.insert(token) {
            self.find(FindingKind::Token, op, format!("token {} is of another start already", token.0));
            return;
        }
        let reads: Vec<StoreId> = match coll.in_place {
            true => Vec::new(),
            false => op.args.iter().filter_map(|arg| self.store(*arg)).collect(),
        };
        for store in &reads {
            *self.flights.read.entry(*store).or_default() += 1;
        }
        for out in &op.outs {
            if let Some(store) = self.store(*out) {
                self.flights.written.insert(store, token);
            }
        }
        self.flights.open.insert(token, (reads, op.outs.iter().copied().collect()));
    }

    fn wait(&mut self, op: &Op, tokens: &[TokenId]) {
        let mut started: HashSet<ValueId> = HashSet::default();
        for token in tokens {
            let Some((reads, outs)) = self.flights.open.remove(token) else {
                self.find(
                    FindingKind::Token,
                    op,
                    format!("token {} is of no start that is under way", token.0),
                );
                continue;
            };
            for store in reads {
                self.flights.read.entry(store).and_modify(|readers| *readers -= 1);
            }
            started.extend(outs);
        }
        let waited: HashSet<ValueId> = op.args.iter().copied().collect();
        if waited != started || op.args.len() != waited.len() {
            let text = format!(
                "it waits for {} of the {} results of its tokens' starts",
                waited.len(),
                started.len()
            );
            self.find(FindingKind::Token, op, text);
        }
        self.flights.written.retain(|_, token| !tokens.contains(token));
    }

    fn outputs(&mut self, latest: &[u32]) {
        let mut open: Vec<TokenId> = self.flights.open.keys().copied().collect();
        open.sort();
        for token in open {
            let text = format!("nobody waits for token {}", token.0);
            self.findings.push(Finding::new(FindingKind::Token, text).numbers([token.0.into()]));
        }
        for output in &self.graph.outputs {
            let Some(store) = self.store(*output) else { continue };
            let name = self.graph.name(*output);
            let (version, now) = (self.analysis.version[output.index()], latest[store.index()]);
            let root = self.analysis.stores[store.index()].root;
            if version != now {
                let text = format!("{name} is returned, and was overwritten");
                self.findings.push(Finding::new(FindingKind::Stale, text).value(name));
            }
            if self.flights.written.contains_key(&store) {
                let text = format!("{name} is returned in flight");
                self.findings.push(Finding::new(FindingKind::InFlight, text).value(name));
            }
            if matches!(self.graph.value(root).class, Class::Comm(_)) {
                let text = format!("{name} is returned, and lies in memory of communication");
                self.findings.push(Finding::new(FindingKind::Escape, text).value(name));
            }
        }
    }
}

/// f32, as an element type.
pub(crate) const F32: Element = Element::Number(antiphon_tensor::DType::F32);
