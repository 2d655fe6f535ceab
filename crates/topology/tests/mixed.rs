//! Mixed layouts against tables worked out by hand.

use antiphon_topology::{MixedGroup, MixedLayout, MixedOp, TopologyError};

#[test]
fn two_nodes_of_four_that_share_everything_in_halves() {
    // Node 0 is ranks 0 to 3, node 1 ranks 4 to 7; pairs share tensors, and so do ranks across the nodes.
    let layout = MixedLayout::builder(8, 7).local_size(4).local_tp(2).inter_tp(2).build().unwrap();
    assert_eq!((layout.world_size(), layout.local_size(), layout.inter_size()), (8, 4, 2));
    assert_eq!((layout.local_tp_size(), layout.local_dp_size()), (2, 2));
    assert_eq!((layout.inter_tp_size(), layout.inter_dp_size()), (2, 1));
    assert_eq!((layout.tp_size(), layout.dp_size()), (4, 2));
    assert_eq!((layout.world_rank(), layout.local_rank(), layout.inter_rank()), (7, 3, 1));
    assert_eq!((layout.local_tp_rank(), layout.local_dp_rank()), (1, 1));
    assert_eq!((layout.inter_tp_rank(), layout.inter_dp_rank()), (1, 0));
    assert_eq!((layout.tp_rank(), layout.dp_rank()), (3, 1));

    assert_eq!(layout.groups(MixedGroup::Local), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(layout.groups(MixedGroup::Inter), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(layout.groups(MixedGroup::Tp), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(layout.groups(MixedGroup::Dp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(layout.groups(MixedGroup::LocalTp), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(layout.groups(MixedGroup::LocalDp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(layout.groups(MixedGroup::InterTp), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(layout.groups(MixedGroup::InterDp).len(), 8);
    assert_eq!(layout.inter_group(), [3, 7]);

    use MixedGroup::{Dp, Local, Tp};
    assert_eq!(layout.process_groups(), [Local, Tp, Dp]);
    assert_eq!(layout.local_comm_group(), Some(vec![4, 5, 6, 7]));
    assert_eq!(layout.tp_comm_group(), Some(vec![2, 3, 6, 7]));
    assert_eq!(layout.dp_comm_group(), Some(vec![5, 7]));
}

#[test]
fn data_parallel_nodes() {
    let layout = MixedLayout::builder(16, 10).local_size(4).inter_dp(2).local_dp(2).build().unwrap();
    assert_eq!((layout.inter_tp_size(), layout.inter_dp_size()), (2, 2));
    assert_eq!((layout.tp_rank(), layout.dp_rank()), (0, 3));
    assert_eq!(layout.tp_group(), [10, 11, 14, 15]);
    assert_eq!(layout.dp_group(), [0, 2, 8, 10]);
}

#[test]
fn one_node_by_default_and_all_tensor() {
    let layout = MixedLayout::builder(8, 5).build().unwrap();
    assert_eq!((layout.local_size(), layout.inter_size()), (8, 1));
    assert_eq!((layout.local_tp_size(), layout.local_dp_size()), (8, 1));
    assert_eq!(layout.process_groups(), []);
    assert_eq!(
        (layout.local_comm_group(), layout.tp_comm_group(), layout.dp_comm_group()),
        (None, None, None)
    );
    assert!(layout.use_tp() && layout.use_local_tp());
    assert!(!layout.use_dp() && !layout.use_inter() && !layout.use_inter_tp() && !layout.use_mixed());
    assert_eq!(MixedLayout::builder(8, 5).local_size(2).build().unwrap().inter_size(), 4);
    assert_eq!(MixedLayout::builder(8, 5).inter_size(2).build().unwrap().local_size(), 4);
}

#[test]
fn operations_follow_from_what_is_mixed() {
    let ops =
        |tp, dp| MixedLayout::builder(tp * dp, 0).local_tp(tp).local_dp(dp).build().unwrap().valid_ops();
    assert_eq!(ops(2, 2), [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce]);
    assert_eq!(ops(4, 1), [MixedOp::AllReduce]);
    assert_eq!(ops(1, 4), [MixedOp::AllGather, MixedOp::ReduceScatter]);
    assert_eq!(ops(1, 1), []);
    assert_eq!(MixedOp::ReduceScatterAllReduce as u8, 4);
}

#[test]
fn errors_state_the_numbers() {
    let base = MixedLayout::builder(8, 6).local_size(4);
    let cases = [
        (base.local_tp(3), "no even split: local_size is 4, but local_tp_size is 3"),
        (base.inter_dp(4), "no even split: inter_size is 2, but inter_dp_size is 4"),
        (base.local_tp(2).local_dp(4), "local_tp_size 2 × local_dp_size 4 = 8, but local_size is 4"),
        (base.inter_size(3), "local_size 4 × inter_size 3 = 12, but world_size is 8"),
        (base.local_tp(0), "local_tp_size must be at least 1, but it is 0"),
        (base.local_rank(6), "local_rank is 6, but world_rank 6 with local_size 4 makes it 2"),
        (base.local_rank(2).inter_rank(0), "inter_rank is 0, but world_rank 6 with local_size 4 makes it 1"),
        (MixedLayout::builder(8, 8), "rank 8 is out of range: world_size is 8"),
        (MixedLayout::builder(0, 0), "world_size must be at least 1, but it is 0"),
        (MixedLayout::builder(8, 0).local_size(3), "no even split: world_size is 8, but local_size is 3"),
    ];
    for (builder, message) in cases {
        assert_eq!(builder.build().unwrap_err().to_string(), message);
    }
    let given_ranks = base.local_rank(2).inter_rank(1).build();
    assert_eq!(given_ranks, base.build());
    let error = base.inter_size(3).build().unwrap_err();
    assert!(matches!(error, TopologyError::Mismatch { found, .. } if found.value() == 12));
}

#[test]
fn serialises_by_name() {
    let layout = MixedLayout::builder(8, 7).local_size(4).local_tp(2).build().unwrap();
    let json = concat!(
        r#"{"world_rank":7,"world_size":8,"local_rank":3,"local_size":4,"inter_rank":1,"inter_size":2,"#,
        r#""local_tp_size":2,"local_dp_size":2,"inter_tp_size":2,"inter_dp_size":1}"#,
    );
    assert_eq!(serde_json::to_string(&layout).unwrap(), json);
    assert_eq!(serde_json::from_str::<MixedLayout>(json).unwrap(), layout);
    let short = r#"{"world_rank":7,"world_size":8,"local_size":4,"local_dp_size":2}"#;
    assert_eq!(serde_json::from_str::<MixedLayout>(short).unwrap(), layout);
    let wrong = json.replace("\"local_rank\":3", "\"local_rank\":1");
    let error = serde_json::from_str::<MixedLayout>(&wrong).unwrap_err().to_string();
    assert!(error.contains("local_rank is 1, but world_rank 7 with local_size 4 makes it 3"), "{error}");
}
