//! Every plan of the library, proved and simulated.

use antiphon_language::library::{self, ALGORITHMS, Algorithm, Setting};
use antiphon_language::{LanguageError, Options, Plan, ReduceOp};
use antiphon_plan::simulate::{Cluster, SimulateError, fitting, simulate};
use antiphon_plan::verify::{Memory, Options as Proof, verify};

/// Every algorithm for that many ranks, out of place and, where it works, in place.
fn settings(ranks: u32) -> impl Iterator<Item = (&'static Algorithm, Setting)> {
    let places = move |algorithm: &'static Algorithm| {
        let places = [false, true].into_iter().filter(|&inplace| algorithm.inplace || !inplace);
        places.map(move |inplace| (algorithm, Setting { inplace, ..Setting::new(ranks) }))
    };
    ALGORITHMS.iter().flat_map(places)
}

fn plan(algorithm: &Algorithm, setting: &Setting) -> Plan {
    algorithm.plan(setting).unwrap_or_else(|error| panic!("{}: {error}", algorithm.name))
}

/// In bounds, balanced, free of deadlocks and races, right results, also in launches back to back, and nothing to remark.
fn prove(plan: &Plan) {
    for memory in [Memory::Host, Memory::Device] {
        let report = verify(plan, &Proof { memory, ..Proof::default() });
        let (name, ranks) = (plan.name.as_deref().unwrap_or_default(), plan.num_ranks());
        assert!(
            report.proved && report.meaning && report.back_to_back && report.findings.is_empty(),
            "{name} of {ranks} ranks, in place: {}, {memory:?}: {report}",
            plan.inplace
        );
    }
}

#[test]
fn every_plan_is_proved() {
    for ranks in [2, 4, 8, 16] {
        for (algorithm, setting) in settings(ranks) {
            prove(&plan(algorithm, &setting));
        }
    }
}

#[test]
fn odd_worlds_instances_and_other_reductions_are_proved() {
    for ranks in [3, 5] {
        for (algorithm, mut setting) in settings(ranks) {
            setting.nodes = ranks;
            setting.op = ReduceOp::Max;
            setting.options.instances = 2;
            prove(&plan(algorithm, &setting));
        }
    }
}

#[test]
fn hierarchies_of_more_nodes_are_proved() {
    let algorithm = library::find("hierarchical-all-reduce").unwrap();
    for (ranks, nodes) in [(8, 4), (12, 3), (32, 4)] {
        for inplace in [false, true] {
            prove(&plan(algorithm, &Setting { nodes, inplace, ..Setting::new(ranks) }));
        }
    }
}

#[test]
fn every_plan_is_named_as_the_list_says() {
    for (algorithm, setting) in settings(4) {
        let plan = plan(algorithm, &setting);
        assert_eq!(plan.name.as_deref(), Some(algorithm.name));
        assert_eq!((plan.collective.as_str(), plan.inplace), (algorithm.collective, setting.inplace));
        assert_eq!(library::find(algorithm.name).map(|found| found.name), Some(algorithm.name));
        let read = Plan::from_json(plan.to_json().as_bytes()).unwrap();
        assert_eq!(read.to_json(), plan.to_json());
    }
}

#[test]
fn the_reduction_is_the_one_that_was_asked_for() {
    for (algorithm, setting) in settings(4) {
        let with = |op| plan(algorithm, &Setting { op, ..setting.clone() }).to_json();
        let differ = with(ReduceOp::Sum) != with(ReduceOp::Min);
        assert_eq!(differ, algorithm.reduces, "{}", algorithm.name);
    }
}

/// Out of every rank go as many bytes as the algorithm's page says, and to other nodes as well.
#[test]
fn bytes_over_the_links_are_those_of_the_page() {
    const BYTES: u64 = 960 << 10;
    let n = 4;
    let from_one = (n - 1) * (BYTES / n);
    let multicast = r#"{"base": "h200x4", "name": "switch", "link": {"multicast": true}}"#;
    for (name, cluster, bytes, to_nodes) in [
        ("one-shot-all-reduce", "h200x4", 2 * (n - 1) * BYTES, 0),
        ("packet-all-reduce", "h200x4", 4 * from_one, 0),
        ("two-shot-all-reduce", "h200x4", 2 * from_one, 0),
        ("push-two-shot-all-reduce", "h200x4", 2 * from_one, 0),
        ("ring-all-reduce", "h200x4", 2 * from_one, 0),
        ("hierarchical-all-reduce", "h200x2-nodes2", BYTES, BYTES / 2),
        ("switch-all-reduce", multicast, BYTES, 0),
        ("direct-all-gather", "h200x4", from_one, 0),
        ("ring-all-gather", "h200x4", from_one, 0),
        ("direct-reduce-scatter", "h200x4", from_one, 0),
        ("ring-reduce-scatter", "h200x4", from_one, 0),
        ("direct-all-to-all", "h200x4", from_one, 0),
        ("pipelined-all-to-all", "h200x4", from_one, 0),
        ("packet-all-to-all", "h200x4", 2 * from_one, 0),
        ("send-recv", "h200x4", BYTES, 0),
        ("port-send-recv", "h200x4", BYTES, 0),
    ] {
        let plan = plan(library::find(name).unwrap(), &Setting::new(n as u32));
        let done = simulate(&plan, &Cluster::from_spec(cluster).unwrap(), BYTES).unwrap();
        let through =
            |link: String| done.links.iter().find(|of| of.name == link).map_or(0, |link| link.bytes);
        for rank in 0..n {
            let link = through(format!("rank {rank} link out"));
            let card = through(format!("node {} card {} out", rank / 2, rank % 2));
            assert_eq!((link, card), (bytes, to_nodes), "{name}, rank {rank}");
        }
    }
    assert_eq!(ALGORITHMS.len(), 16, "one of each");
}

/// On one node all of them run; between nodes, those through ports.
#[test]
fn every_plan_has_a_time_on_a_cluster() {
    let sixteen = r#"{"base": "h200x8", "name": "h200x16", "gpus_per_node": 16}"#;
    let clusters = [(2, "h200x2"), (4, "h200x4"), (8, "h200x8"), (16, sixteen), (16, "h200x8-nodes2")];
    for (ranks, spec) in clusters {
        let cluster = Cluster::from_spec(spec).unwrap();
        for (algorithm, setting) in settings(ranks) {
            let (name, plan) = (algorithm.name, plan(algorithm, &setting));
            let done = simulate(&plan, &cluster, fitting(&plan, 1 << 20));
            if cluster.nodes == 1 || ["hierarchical-all-reduce", "port-send-recv"].contains(&name) {
                let done = done.unwrap_or_else(|error| panic!("{name} on {}: {error}", cluster.name));
                assert!(done.bus_bandwidth() > 0.1, "{name} on {}: {} ns", cluster.name, done.time_ns);
            } else {
                assert!(matches!(done, Err(SimulateError::Unreachable { .. })), "{name} between nodes");
            }
        }
    }
}

#[test]
fn what_an_algorithm_cannot_do_is_refused() {
    let refused = |name: &str, setting: Setting| library::find(name).unwrap().plan(&setting).unwrap_err();
    let unsuited = |error: LanguageError| matches!(error, LanguageError::Unsuited { .. });
    for algorithm in ALGORITHMS {
        assert!(unsuited(refused(algorithm.name, Setting::new(0))), "{}", algorithm.name);
        assert!(unsuited(refused(algorithm.name, Setting::new(1))), "{}", algorithm.name);
        let error = refused(algorithm.name, Setting { nodes: 2, ..Setting::new(u32::MAX - 1) });
        assert!(matches!(error, LanguageError::TooMany { .. }), "{}: {error}", algorithm.name);
        let options = Options { instances: u32::MAX, ..Options::default() };
        assert!(algorithm.plan(&Setting { options, ..Setting::new(2) }).is_err(), "{}", algorithm.name);
    }
    let inplace = Setting { inplace: true, ..Setting::new(4) };
    assert!(unsuited(refused("direct-all-to-all", inplace)));
    let error = refused("hierarchical-all-reduce", Setting { nodes: 2, ..Setting::new(5) });
    assert_eq!(
        error.to_string(),
        "hierarchical-all-reduce needs 2 nodes with as many ranks each: not 5 ranks on 2 nodes"
    );
    assert!(unsuited(refused("pipelined-all-to-all", Setting { unit_size: 0, ..Setting::new(4) })));
    assert!(unsuited(refused("hierarchical-all-reduce", Setting { nodes: 0, ..Setting::new(4) })));
    let nowhere = Setting { nodes: 0, ..Setting::new(4) };
    assert!(library::all_reduce::hierarchical(&nowhere).is_err(), "also where the list is not asked");
    assert!(library::find("three-shot").is_none());
}

/// Plans of packets that take turns between two scratches; with one scratch only those may follow back to back whose last packets say that
/// the first ones have been read.
#[test]
fn packets_of_one_step_need_two_scratches_or_a_meeting() {
    let mut meets = Vec::new();
    for (algorithm, setting) in [2, 4, 8].into_iter().flat_map(settings) {
        let double = plan(algorithm, &setting);
        if !double.use_double_scratch_buffer {
            continue;
        }
        let single = Plan { use_double_scratch_buffer: false, ..double };
        let report = verify(&single, &Proof { memory: Memory::Device, ..Proof::default() });
        let kinds: Vec<_> = report.findings.iter().map(|finding| finding.kind.name()).collect();
        assert!(report.proved && report.back_to_back == kinds.is_empty(), "{}: {report}", algorithm.name);
        if !report.back_to_back {
            assert_eq!(kinds, ["needs_meeting"], "{}: {report}", algorithm.name);
            meets.push(algorithm.name);
        }
    }
    meets.dedup();
    meets.sort_unstable();
    meets.dedup();
    assert_eq!(meets, ["one-shot-all-reduce", "packet-all-to-all"]);
}
