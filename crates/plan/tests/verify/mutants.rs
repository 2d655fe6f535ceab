//! Right plans with one mistake.

use antiphon_plan::verify::{Memory, Options, verify};
use antiphon_plan::{Op, OpKind, Plan};

use crate::{oracle, plans};

fn is_sync(op: &Op) -> bool {
    matches!(op.kind, OpKind::Nop | OpKind::Barrier { .. } | OpKind::Notify(_) | OpKind::Semaphore(_))
}

/// The lists of operations of a plan: those of blocks, then those of pipelines in them.
fn lists(plan: &mut Plan) -> Vec<&mut Vec<Op>> {
    let mut all = Vec::new();
    for block in plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.threadblocks) {
        match block.ops.iter().any(|op| matches!(op.kind, OpKind::Pipeline(_))) {
            true => all.extend(block.ops.iter_mut().filter_map(|op| match &mut op.kind {
                OpKind::Pipeline(pipeline) => Some(&mut pipeline.ops),
                _ => None,
            })),
            false => all.push(&mut block.ops),
        }
    }
    all
}

/// Every plan that has one synchronising operation less, or one in the place of its neighbour.
fn mutants(plan: &Plan) -> Vec<(String, Plan)> {
    let mut all = Vec::new();
    let lens: Vec<usize> = lists(&mut plan.clone()).iter().map(|ops| ops.len()).collect();
    for (list, &len) in lens.iter().enumerate() {
        for at in 0..len {
            let mut without = plan.clone();
            let removed = lists(&mut without)[list].remove(at);
            let name = removed.kind.name();
            if is_sync(&removed) {
                all.push((format!("list {list} without {name} at {at}"), without));
            }
            let mut swapped = plan.clone();
            let ops = &mut lists(&mut swapped)[list];
            if at + 1 < len && (is_sync(&ops[at]) || is_sync(&ops[at + 1])) && ops[at] != ops[at + 1] {
                ops.swap(at, at + 1);
                all.push((format!("list {list} with {name} at {at} behind the next"), swapped));
            }
        }
    }
    all
}

/// A mutant is proved if and only if no interleaving goes wrong.
#[test]
fn a_mutant_is_proved_only_if_it_is_right() {
    let (mut judged, mut back_to_back) = ([0, 0], [0, 0]);
    for (name, plan) in plans::tiny() {
        let expected = oracle::outputs(&plan).expect("a run that ends");
        assert!(!expected.is_empty() && verify(&plan, &Options::default()).meaning);
        assert_eq!(oracle::judge_at(&plan, 1, &expected, Memory::Host), Ok(None), "{name}");
        for (what, mutant) in mutants(&plan) {
            for memory in [Memory::Host, Memory::Device] {
                let report = verify(&mutant, &Options { memory, ..Options::default() });
                let bad = oracle::judge_at(&mutant, 1, &expected, memory).expect("few states");
                assert_eq!(report.proved, bad.is_none(), "{name}, {what}, {memory:?}: {bad:?}, but {report}");
                judged[usize::from(report.proved)] += 1;
                // A mutant of more states is left out.
                if report.proved
                    && let Ok(bad) = oracle::judge_launches(&mutant, 1, &expected, memory, 2)
                {
                    assert_eq!(
                        report.back_to_back,
                        bad.is_none(),
                        "{name}, {what}, {memory:?}: {bad:?}, but {report}"
                    );
                    back_to_back[usize::from(report.back_to_back)] += 1;
                }
            }
        }
    }
    assert!(judged[0] > 50 && judged[1] > 10, "{judged:?}");
    assert!(back_to_back.iter().all(|&mutants| mutants > 3), "{back_to_back:?}");
}
