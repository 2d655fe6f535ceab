//! Neighbouring collectives of one kind become one of several tensors: a bucket.
//!
//! Applies where [`Options::overlap`](crate::Options::overlap) asks for it, to starts of one group, operation and dtype, of one
//! tensor each, between which the group makes no other call. A bucket starts where its last member did, and is waited for where
//! the first one was; so a tensor joins only if it is there before any member is needed, which also tells that no member
//! depends on another. No tensor is copied: the call takes a list.
//!
//! Buckets are first as large as possible, or all of one member if that is predicted to be faster. Then single changes are made
//! as long as one of them is predicted to make the program faster: neighbouring buckets become one, a bucket is divided, or the
//! member at a border moves to the bucket beside it.

use super::{Flight, context::Context, flight, most_trials, replace};
use crate::{
    costs::{Clock, Costs, size_of},
    graph::{Graph, Names, Op},
    hash::{HashMap, HashSet},
    ids::{OpId, TokenId},
    lowered::Rewrite,
    op::{Coll, Kind, Prim},
    types::Element,
    verify::verify,
};

/// The most tensors of a bucket, and the most bytes.
const MOST_MEMBERS: usize = 64;
const MOST_BYTES: u64 = 64 << 20;

pub(super) fn apply(cx: &mut Context<'_>) {
    if !cx.options.overlap {
        return;
    }
    let members = members(&cx.graph, |group| cx.is_ours(group));
    let search = Search::new(&cx.graph, cx.costs, &members);
    let (apart, largest) = (vec![false; members.len()], search.largest());
    let Some(second) = largest.iter().position(|joined| *joined) else { return };
    let [before, after] = [&apart, &largest].map(|joined| search.predicted(joined));
    let (time, joined) = search.improved(if after < before { largest } else { apart });
    let first = cx.graph.op(members[second - 1].flight.start).name.clone();
    if time >= before {
        cx.refuse("bucket", &first, format!("{before} ns are predicted to become {after} ns"));
        return;
    }
    let names = cx.names.clone();
    let (graph, made) = built(&cx.graph, &mut cx.names, &members, &joined);
    if let Some(finding) = verify(&graph).first() {
        cx.names = names;
        cx.refuse("bucket", &first, finding.to_string());
        return;
    }
    for (name, bucket) in made {
        let starts = bucket.iter().map(|member| &cx.graph.op(member.flight.start).name);
        let ops: Vec<String> = starts.flat_map(|name| cx.covered(name)).collect();
        let text = format!("{} calls of {} bytes are one", ops.len(), bytes(bucket));
        cx.covers.insert(name, ops.clone());
        cx.rewrites.push(Rewrite { rule: "bucket".into(), ops, text, bound: None });
    }
    cx.graph = graph;
}

/// A collective that may be in a bucket.
struct Member {
    flight: Flight,
    token: TokenId,
    coll: Coll,
    dtype: Element,
    bytes: u64,
    /// Whether it may be in one bucket with the member before.
    follows: bool,
}

/// All members, those of a group one behind the other, for groups whose calls may be changed.
fn members(graph: &Graph, is_ours: impl Fn(&str) -> bool) -> Vec<Member> {
    let analysis = graph.analyse();
    let mut groups: Vec<(&str, Vec<Member>)> = Vec::new();
    // The groups whose last call is a member.
    let mut open: HashSet<&str> = HashSet::default();
    for (index, op) in graph.ops.iter().enumerate().filter(|(_, op)| op.kind.communicates()) {
        let Some(group) = op.kind.group() else {
            open.clear();
            continue;
        };
        let found = flight(graph, &analysis, OpId::from(index));
        let found = found.filter(|(_, coll)| is_ours(group) && is_served(graph, op, coll));
        let (Some((flight, coll)), Kind::Start { token, .. }) = (found, &op.kind) else {
            open.remove(group);
            continue;
        };
        let ty = graph.ty(op.args[0]);
        let (dtype, bytes) = (ty.dtype, size_of(graph, ty));
        let at = groups.iter().position(|(name, _)| *name == group).unwrap_or_else(|| {
            groups.push((group, Vec::new()));
            groups.len() - 1
        });
        let of_group = &mut groups[at].1;
        let is_like = |last: &Member| (&last.coll, last.dtype) == (&coll, dtype);
        let follows = !open.insert(group) && of_group.last().is_some_and(is_like);
        of_group.push(Member { flight, token: *token, coll, dtype, bytes, follows });
    }
    groups.into_iter().flat_map(|(_, members)| members).collect()
}

/// The buckets of members, each of which is or is not joined to the one before.
fn buckets<'m>(members: &'m [Member], joined: &[bool]) -> impl Iterator<Item = &'m [Member]> {
    let starts = joined.iter().enumerate().filter(|(_, joined)| !**joined).map(|(index, _)| index);
    let mut starts: Vec<usize> = starts.collect();
    starts.push(members.len());
    (1..starts.len()).map(move |index| &members[starts[index - 1]..starts[index]])
}

/// Where the first member of a bucket is waited for.
fn need(bucket: &[Member]) -> OpId {
    bucket.iter().map(|member| member.flight.wait).min().expect("a bucket has members")
}

fn bytes(bucket: &[Member]) -> u64 {
    bucket.iter().fold(0, |sum, member| sum.saturating_add(member.bytes))
}

/// Whether these members can be one call.
fn fits(bucket: &[Member]) -> bool {
    let Some(last) = bucket.last() else { return true };
    let is_there = last.flight.start < need(bucket) && bucket[1..].iter().all(|member| member.follows);
    bucket.len() == 1 || (is_there && bucket.len() <= MOST_MEMBERS && bytes(bucket) <= MOST_BYTES)
}

/// The search for the buckets with which a graph is predicted to be fastest.
struct Search<'s> {
    graph: &'s Graph,
    costs: &'s Costs,
    /// The time of each operation.
    times: Vec<u64>,
    members: &'s [Member],
}

impl<'s> Search<'s> {
    fn new(graph: &'s Graph, costs: &'s Costs, members: &'s [Member]) -> Self {
        let times = graph.ops.iter().map(|op| costs.op(graph, op)).collect();
        Self { graph, costs, times, members }
    }

    /// Each member in the bucket of the one before, if it fits there.
    fn largest(&self) -> Vec<bool> {
        let (mut joined, mut first) = (vec![false; self.members.len()], 0);
        for (last, joined) in joined.iter_mut().enumerate().skip(1) {
            *joined = fits(&self.members[first..=last]);
            first = if *joined { first } else { last };
        }
        joined
    }

    /// Buckets that no single change makes faster, or those that were found when the search ends, with their time.
    fn improved(&self, mut joined: Vec<bool>) -> (u64, Vec<bool>) {
        let mut best = self.predicted(&joined);
        let mut trials = most_trials(self.graph);
        loop {
            let before = best;
            for at in 1..joined.len() {
                let (mut flipped, mut moved) = (joined.clone(), joined.clone());
                flipped[at] = !flipped[at];
                moved.swap(at, (at + 1).min(joined.len() - 1));
                for changed in [flipped, moved] {
                    if changed == joined || !buckets(self.members, &changed).all(fits) {
                        continue;
                    }
                    if trials == 0 {
                        return (best, joined);
                    }
                    trials -= 1;
                    let time = self.predicted(&changed);
                    if time < best {
                        (best, joined) = (time, changed);
                    }
                }
            }
            if best == before {
                return (best, joined);
            }
        }
    }

    /// The predicted time of the graph with these buckets, in nanoseconds.
    fn predicted(&self, joined: &[bool]) -> u64 {
        // The times of calls that start buckets, and nothing for those of other members.
        let mut starts: HashMap<usize, Option<u64>> = HashMap::default();
        let (mut waits, mut gone) = (HashMap::<usize, Vec<TokenId>>::default(), HashSet::default());
        for bucket in buckets(self.members, joined).filter(|bucket| bucket.len() > 1) {
            starts.extend(bucket.iter().map(|member| (member.flight.start.index(), None)));
            gone.extend(bucket.iter().map(|member| member.token));
            let last = &bucket[bucket.len() - 1];
            let time = self.costs.start(self.graph, &last.coll, bytes(bucket));
            starts.insert(last.flight.start.index(), Some(time));
            waits.entry(need(bucket).index()).or_default().push(last.token);
        }
        let mut clock = Clock::new(self.costs);
        for (place, op) in self.graph.ops.iter().enumerate() {
            if let Some(tokens) = waits.get(&place) {
                clock.wait(tokens);
            }
            match &op.kind {
                Kind::Start { .. } => {
                    if let Some(time) = starts.get(&place).copied().unwrap_or(Some(self.times[place])) {
                        clock.run(op, time);
                    }
                }
                Kind::Wait { tokens } if tokens.iter().any(|token| gone.contains(token)) => {
                    let left = tokens.iter().copied().filter(|token| !gone.contains(token));
                    clock.wait(&left.collect::<Vec<_>>());
                }
                _ => clock.run(op, self.times[place]),
            }
        }
        clock.now()
    }
}

/// The graph with these buckets, and those of several members with their names.
fn built<'m>(
    before: &Graph,
    names: &mut Names,
    members: &'m [Member],
    joined: &[bool],
) -> (Graph, Vec<(String, &'m [Member])>) {
    let mut graph = before.clone();
    let (mut flights, mut new, mut by, mut made) = (Vec::new(), Vec::new(), HashMap::default(), Vec::new());
    for (token, bucket) in before.new_tokens().zip(buckets(members, joined).filter(|bucket| bucket.len() > 1))
    {
        let name = names.fresh("bucket");
        let wait_name = names.fresh(&format!("{name}_wait"));
        let (mut args, mut started, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        for (index, Member { flight, .. }) in bucket.iter().enumerate() {
            let op = before.op(flight.start);
            let ty = graph.ty(op.outs[0]).clone();
            args.push(op.args[0]);
            started.push(graph.add_value(names, &format!("{name}_{index}"), ty.clone()));
            let done = graph.add_value(names, &format!("{wait_name}_{index}"), ty);
            ready.push(done);
            by.insert(flight.ready, done);
        }
        let last = &bucket[bucket.len() - 1];
        let kind = Kind::Start { coll: last.coll.clone(), token };
        new.push((last.flight.start, Op { name: name.clone(), kind, args, outs: started.clone() }));
        let kind = Kind::Wait { tokens: vec![token] };
        new.push((need(bucket), Op { name: wait_name, kind, args: started, outs: ready }));
        made.push((name, bucket));
        flights.extend(bucket.iter().map(|member| member.flight));
    }
    replace(&mut graph, &flights, new);
    graph.substitute(&by);
    (graph, made)
}

/// Whether frameworks have such a call of several tensors.
fn is_served(graph: &Graph, op: &Op, coll: &Coll) -> bool {
    graph.ty(op.args[0]).is_contiguous()
        && !coll.in_place
        && matches!(coll.prim, Prim::AllReduce | Prim::AllGather | Prim::ReduceScatter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Device;

    /// Up to eight sums over two groups, with products between them, that are waited for in their order.
    fn program(random: &mut impl FnMut(usize) -> usize) -> Graph {
        let mut text = String::from(
            "group tp size 2\ngroup dp size 2\n%x: f32[64,64] = input()\n%w: f32[128,128] = input()\n",
        );
        let (mut calls, mut waited, mut outputs) = (0, 0, Vec::new());
        for step in 0..24 {
            if calls < 8 && random(3) == 0 {
                let group = if random(4) == 0 { "dp" } else { "tp" };
                let rows = 1 + random(4) * 200;
                text += &format!(
                    "%g{calls}: f32[{rows},64] = opaque(%x) target=gradient\n\
                     %s{calls}: f32[{rows},64] = start(%g{calls}) prim=all_reduce group={group} red=sum token={calls}\n"
                );
                calls += 1;
            } else if waited < calls && random(3) == 0 {
                text += &format!("%r{waited}: f32[1,64] = wait(%s{waited}) tokens=[{waited}]\n");
                waited += 1;
            } else {
                text += &format!("%m{step}: f32[128,128] = matmul(%w, %w)\n");
                outputs.push(format!("%m{step}"));
            }
        }
        (waited..calls)
            .for_each(|call| text += &format!("%r{call}: f32[1,64] = wait(%s{call}) tokens=[{call}]\n"));
        outputs.extend((0..calls).map(|call| format!("%r{call}")));
        // A wait's result has the type of its operand.
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for call in 0..calls {
            let start = lines.iter().find(|line| line.starts_with(&format!("%s{call}:"))).unwrap();
            let ty = start.split_once(": ").unwrap().1.split_once(" =").unwrap().0.to_owned();
            let wait = lines.iter_mut().find(|line| line.starts_with(&format!("%r{call}:"))).unwrap();
            *wait = wait.replace("f32[1,64]", &ty);
        }
        Graph::from_text(&format!("{}\nreturn {}\n", lines.join("\n"), outputs.join(", "))).unwrap()
    }

    #[test]
    fn buckets_of_eight_calls_are_near_the_best_of_all() {
        let mut state = 5u64;
        let mut random = |limit: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % limit
        };
        let costs = Costs::of(Device::Host);
        let (mut best, mut beyond, mut worst, mut count) = (0, 0, 0u64, 0);
        for _ in 0..200 {
            let graph = program(&mut random);
            assert_eq!(verify(&graph), [], "{}", graph.to_text());
            let members = members(&graph, |_| true);
            let search = Search::new(&graph, &costs, &members);
            let all = (0..1u32 << members.len().saturating_sub(1)).map(|bits| {
                (0..members.len()).map(|at| at > 0 && bits >> (at - 1) & 1 == 1).collect::<Vec<bool>>()
            });
            let mut least = u64::MAX;
            for joined in all.filter(|joined| buckets(&members, joined).all(fits)) {
                let (after, _) = built(&graph, &mut graph.names(), &members, &joined);
                assert_eq!(verify(&after), [], "{}", after.to_text());
                assert_eq!(search.predicted(&joined), costs.predict(&after), "{}", after.to_text());
                least = least.min(search.predicted(&joined));
            }
            let (apart, largest) = (vec![false; members.len()], search.largest());
            let simple = search.predicted(&apart).min(search.predicted(&largest));
            let start = if search.predicted(&largest) < search.predicted(&apart) { largest } else { apart };
            let (time, joined) = search.improved(start);
            assert_eq!(time, search.predicted(&joined));
            assert!(least <= time && time <= simple, "{least} {time} {simple}\n{}", graph.to_text());
            count += u32::from(least < simple);
            beyond += u32::from(time < simple);
            best += u32::from(time == least);
            worst = worst.max(time * 100 / least.max(1));
        }
        assert!(count >= 20 && beyond >= 20, "{count} could be better, {beyond} are");
        assert!(best >= 180 && worst <= 115, "{best} of 200 are the best, the worst takes {worst} % of it");
    }
}
