//! Mappings against tables worked out by hand.

use antiphon_topology::{GroupKind, Mapping, TopologyError};

/// The ranks `from..from + len` of which every `step`th belongs to the group.
fn every(step: usize, from: usize, len: usize) -> Vec<usize> {
    (from..from + len).step_by(step).collect()
}

#[test]
fn one_rank_alone() {
    let mapping = Mapping::builder(1, 0).build().unwrap();
    for kind in GroupKind::ALL {
        assert_eq!(mapping.groups(kind), [[0]], "{kind:?}");
    }
    assert!(!mapping.is_multi_node());
    assert!(mapping.is_first_pp_rank() && mapping.is_last_pp_rank() && !mapping.is_second_last_pp_rank());
    assert_eq!((mapping.prev_pp_rank(), mapping.next_pp_rank()), (0, 0));
    assert_eq!(mapping.ep_experts(7).unwrap(), 0..7);
}

#[test]
fn tensor_context_pipeline_over_two_nodes() {
    let at = |rank| Mapping::builder(16, rank).tp(4).pp(2).cp(2).build().unwrap();
    let mapping = at(13);
    assert_eq!(mapping.tp_groups(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
    assert_eq!(mapping.cp_groups(), [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]);
    assert_eq!(mapping.pp_groups(), [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]);
    assert_eq!((mapping.tp_rank(), mapping.cp_rank(), mapping.pp_rank()), (1, 1, 1));
    assert_eq!((mapping.node_rank(), mapping.local_rank()), (1, 5));
    assert_eq!(mapping.tp_group(), [12, 13, 14, 15]);
    assert_eq!(mapping.cp_group(), [9, 13]);
    assert_eq!(mapping.pp_group(), [5, 13]);
    assert_eq!((mapping.attn_tp_size(), mapping.attn_cp_size()), (8, 1));
    assert!(mapping.has_tp() && mapping.has_cp() && mapping.has_pp() && mapping.is_multi_node());
    assert!(!mapping.is_first_pp_rank() && mapping.is_last_pp_rank());
    assert!(at(7).is_second_last_pp_rank());

    // Without experts, an expert is a layer: its tensors are spread like all others, also for context rank 1.
    assert_eq!((mapping.moe_tp_size(), mapping.moe_ep_size(), mapping.moe_cluster_size()), (4, 1, 1));
    assert_eq!(mapping.moe_tp_groups(), mapping.tp_groups());
    assert_eq!(mapping.moe_ep_groups().len(), 16);
    assert_eq!(mapping.moe_ep_group(), [13]);
}

#[test]
fn experts_and_their_tensors_in_two_stages() {
    let mapping = Mapping::builder(16, 14).tp(8).pp(2).moe_tp(2).moe_ep(4).build().unwrap();
    let mut expert_tensors: Vec<Vec<usize>> = (0..4).map(|first| every(4, first, 8)).collect();
    expert_tensors.extend((8..12).map(|first| every(4, first, 8)));
    assert_eq!(expert_tensors[7], [11, 15]);
    assert_eq!(mapping.moe_tp_groups(), expert_tensors);
    assert_eq!(mapping.moe_ep_groups(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
    assert_eq!(mapping.moe_cluster_groups(), mapping.moe_ep_groups());
    assert_eq!((mapping.moe_tp_rank(), mapping.moe_cluster_rank(), mapping.moe_ep_rank()), (1, 0, 2));
    assert_eq!(mapping.moe_tp_group(), [10, 14]);
    assert_eq!(mapping.moe_ep_group(), [12, 13, 14, 15]);
    assert_eq!(mapping.ep_experts(128).unwrap(), 64..96);
    assert!(mapping.has_moe_tp() && mapping.has_moe_ep() && !mapping.has_moe_cluster());
}

#[test]
fn clusters_of_experts() {
    let mapping = Mapping::builder(16, 9).tp(8).pp(2).moe_cluster(4).build().unwrap();
    assert_eq!((mapping.moe_tp_size(), mapping.moe_cluster_size(), mapping.moe_ep_size()), (2, 4, 1));
    assert_eq!(mapping.moe_cluster_groups(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
    assert_eq!(
        mapping.moe_tp_groups(),
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    );
    assert_eq!((mapping.moe_tp_rank(), mapping.moe_cluster_rank(), mapping.moe_ep_rank()), (0, 1, 0));
    assert_eq!(mapping.moe_cluster_group(), [8, 9, 10, 11]);
    assert_eq!(mapping.moe_tp_group(), [9, 13]);
    assert_eq!(mapping.moe_ep_group(), [9]);
    assert!(mapping.has_moe_cluster() && !mapping.has_moe_ep());
}

#[test]
fn automatic_parallelism_leaves_each_rank_alone() {
    let mapping = Mapping::builder(4, 3).auto_parallel(true).build().unwrap();
    for kind in GroupKind::ALL {
        assert_eq!(mapping.groups(kind), [[0], [1], [2], [3]], "{kind:?}");
        assert_eq!(mapping.group(kind), [3], "{kind:?}");
    }
    assert_eq!((mapping.tp_rank(), mapping.cp_rank(), mapping.pp_rank()), (0, 0, 0));
    assert_eq!((mapping.prev_pp_rank(), mapping.next_pp_rank()), (3, 3));
}

#[test]
fn pipeline_neighbours_wrap() {
    let neighbours = |rank| {
        let mapping = Mapping::builder(8, rank).tp(2).pp(4).build().unwrap();
        (mapping.prev_pp_rank(), mapping.next_pp_rank())
    };
    assert_eq!([0, 3, 7].map(neighbours), [(6, 2), (1, 5), (5, 1)]);
}

#[test]
fn first_stages_take_the_extra_layers() {
    let layers = |num_layers| {
        [0, 1, 2, 3].map(|rank| Mapping::builder(4, rank).pp(4).build().unwrap().pp_layers(num_layers))
    };
    assert_eq!(layers(10), [0..3, 3..6, 6..8, 8..10]);
    assert_eq!(layers(2), [0..1, 1..2, 2..2, 2..2]);
    assert_eq!(layers(0), [0..0, 0..0, 0..0, 0..0]);
}

#[test]
fn one_size_left_open_follows_from_the_others() {
    let base = Mapping::builder(8, 0).tp(8);
    let sizes = |mapping: Mapping| (mapping.moe_tp_size(), mapping.moe_cluster_size(), mapping.moe_ep_size());
    assert_eq!(sizes(base.build().unwrap()), (8, 1, 1));
    assert_eq!(sizes(base.moe_ep(4).build().unwrap()), (2, 1, 4));
    assert_eq!(sizes(base.moe_tp(4).build().unwrap()), (4, 1, 2));
    assert_eq!(sizes(base.moe_cluster(2).build().unwrap()), (4, 2, 1));
    assert_eq!(sizes(base.moe_cluster(2).moe_tp(4).build().unwrap()), (4, 2, 1));
    assert_eq!(base.attn_cp(1).build().unwrap().attn_tp_size(), 8);
}

#[test]
fn errors_state_the_numbers() {
    let base = Mapping::builder(8, 0);
    let cases = [
        (Mapping::builder(16, 0).tp(4).pp(2), "tp_size 4 × pp_size 2 × cp_size 1 = 8, but world_size is 16"),
        (Mapping::builder(8, 8).tp(8), "rank 8 is out of range: world_size is 8"),
        (Mapping::builder(8, 9).tp(8).enable_attention_dp(true), "rank 9 is out of range: world_size is 8"),
        (base.tp(0), "tp_size must be at least 1, but it is 0"),
        (base.tp(8).gpus_per_node(0), "gpus_per_node must be at least 1, but it is 0"),
        (base.tp(8).moe_ep(0), "moe_ep_size must be at least 1, but it is 0"),
        (base.tp(8).moe_ep(3), "no even split: tp_size is 8, but moe_ep_size is 3"),
        (base.tp(8).moe_cluster(3), "no even split: tp_size is 8, but moe_cluster_size is 3"),
        (
            base.tp(8).moe_cluster(2).moe_tp(8),
            "no even split: tp_size is 8, but moe_tp_size 8 × moe_cluster_size 2 = 16",
        ),
        (base.tp(8).moe_tp(4).moe_ep(4), "moe_tp_size 4 × moe_ep_size 4 = 16, but tp_size is 8"),
        (
            base.tp(4).cp(2).attn_tp(4).attn_cp(1),
            "attn_tp_size 4 × attn_cp_size 1 = 4, but tp_size 4 × cp_size 2 = 8",
        ),
        (base.tp(4).cp(2).attn_tp(4), "attn_cp_size must be 1, but it is 2 (attn_tp_size is 4)"),
        (
            base.cp(2).auto_parallel(true),
            "auto_parallel needs tp_size, pp_size and cp_size 1, but they are 1, 1 and 2",
        ),
        (
            base.tp(4).cp(2).moe_ep(2),
            "expert parallelism (moe_ep_size 2) does not combine with context parallelism (cp_size 2)",
        ),
        (
            base.tp(8).moe_cluster(2).moe_ep(2),
            "expert parallelism (moe_ep_size 2) does not combine with expert clusters (moe_cluster_size 2)",
        ),
        (
            base.tp(1 << 63).pp(2),
            "tp_size 9223372036854775808 × pp_size 2 × cp_size 1 = 18446744073709551616, but world_size is 8",
        ),
    ];
    for (builder, message) in cases {
        assert_eq!(builder.build().unwrap_err().to_string(), message);
    }
}

#[test]
fn experts_must_spread_evenly() {
    let mapping = Mapping::builder(4, 1).tp(4).moe_ep(4).build().unwrap();
    let error = mapping.ep_experts(10).unwrap_err();
    assert_eq!(error.to_string(), "no even split: num_experts is 10, but moe_ep_size is 4");
    let context = Mapping::builder(4, 1).tp(2).cp(2).build().unwrap();
    let refused = TopologyError::ExpertsWithContext { moe_ep_size: 1, cp_size: 2 };
    assert_eq!(context.ep_experts(8), Err(refused));
}

#[test]
fn serialises_twelve_keys() {
    let mapping = Mapping::builder(16, 3).tp(8).pp(2).moe_ep(2).enable_attention_dp(true).build().unwrap();
    let json = concat!(
        r#"{"world_size":16,"rank":3,"gpus_per_node":8,"cp_size":1,"tp_size":8,"pp_size":2,"#,
        r#""moe_tp_size":4,"moe_cluster_size":1,"moe_ep_size":2,"#,
        r#""attn_tp_size":8,"attn_cp_size":1,"auto_parallel":false}"#,
    );
    assert_eq!(serde_json::to_string(&mapping).unwrap(), json);
    let back: Mapping = serde_json::from_str(json).unwrap();
    assert_eq!(back, mapping);
    assert!(mapping.enable_attention_dp() && !back.enable_attention_dp());
}

#[test]
fn deserialising_fills_in_and_checks() {
    let mapping: Mapping =
        serde_json::from_str(r#"{"world_size":4,"tp_size":4,"moe_ep_size":null}"#).unwrap();
    assert_eq!(mapping, Mapping::builder(4, 0).tp(4).build().unwrap());
    let refused = |json| serde_json::from_str::<Mapping>(json).unwrap_err().to_string();
    assert!(
        refused(r#"{"world_size":4}"#).contains("tp_size 1 × pp_size 1 × cp_size 1 = 1, but world_size is 4")
    );
    assert!(refused(r#"{"rank":1}"#).contains("rank 1 is out of range: world_size is 1"));
    assert!(refused(r#"{"tp":1}"#).contains("unknown field `tp`"));
}

#[test]
fn another_rank_of_the_same_mapping() {
    let mapping = Mapping::builder(4, 0).tp(2).pp(2).build().unwrap();
    assert_eq!(mapping.with_rank(3), Mapping::builder(4, 3).tp(2).pp(2).build());
    assert_eq!(mapping.with_rank(4), Err(TopologyError::RankOutOfRange { rank: 4, world_size: 4 }));
    assert_eq!((mapping.get_node_rank(17), mapping.get_local_rank(17)), (2, 1));
}
