//! The properties of every layout.

use std::collections::HashSet;

use antiphon_topology::{GroupKind, Mapping, MappingBuilder, Mesh, MixedGroup, MixedLayout, Partition};
use proptest::prelude::*;

fn config() -> ProptestConfig {
    ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() }
}

/// Every rank is in exactly one group, at the place and index that the partition states.
fn is_partition<const AXES: usize>(groups: Partition<AXES>, world_size: usize) -> Result<(), TestCaseError> {
    let lists = groups.to_vecs();
    prop_assert_eq!(lists.len(), groups.count());
    let mut seen = HashSet::new();
    for (index, list) in lists.iter().enumerate() {
        prop_assert_eq!(list.len(), groups.size());
        prop_assert!(list.is_sorted());
        for (position, &rank) in list.iter().enumerate() {
            prop_assert!(rank < world_size && seen.insert(rank), "rank {} twice or outside", rank);
            prop_assert_eq!((groups.index_of(rank), groups.position_of(rank)), (index, position));
            prop_assert_eq!(groups.rank(index, position), rank);
        }
    }
    prop_assert_eq!(seen.len(), world_size);
    prop_assert!(lists.is_sorted());
    Ok(())
}

/// Mappings that exist, of all supported combinations.
fn mappings() -> impl Strategy<Value = Mapping> {
    let sizes = (1..=3usize, 1..=3usize, 1..=3usize, 1..=4usize, 0..4u8);
    (sizes, 1..=8usize, any::<prop::sample::Index>()).prop_map(
        |((cp, pp, moe_tp, inner, kind), gpus_per_node, rank)| {
            let tp = moe_tp * inner;
            let of = |world: usize| Mapping::builder(world, rank.index(world)).gpus_per_node(gpus_per_node);
            let builder = match kind {
                0 => of(tp * cp * pp).tp(tp).cp(cp).pp(pp).moe_cluster(inner),
                1 => of(tp * pp).tp(tp).pp(pp).moe_ep(inner),
                2 => of(tp * cp * pp).tp(tp).cp(cp).pp(pp),
                _ => of(tp).auto_parallel(true),
            };
            builder.build().expect("sizes that multiply")
        },
    )
}

fn mixed_layouts() -> impl Strategy<Value = MixedLayout> {
    let sizes = (1..=3usize, 1..=3usize, 1..=3usize, 1..=3usize);
    (sizes, any::<prop::sample::Index>()).prop_map(|((local_tp, local_dp, inter_tp, inter_dp), rank)| {
        let local = local_tp * local_dp;
        let world = local * inter_tp * inter_dp;
        let builder = MixedLayout::builder(world, rank.index(world)).local_size(local);
        builder.local_tp(local_tp).inter_dp(inter_dp).build().expect("sizes that multiply")
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn meshes_partition_along_any_axes(sizes in prop::array::uniform4(1..=4usize), along: [bool; 4]) {
        let mesh = Mesh::new(sizes).unwrap();
        is_partition(mesh.partition(along), mesh.size())?;
        for rank in 0..mesh.size() {
            prop_assert_eq!(mesh.rank(mesh.coordinates(rank)), rank);
        }
    }

    #[test]
    fn groups_partition_the_world(mapping in mappings()) {
        for kind in GroupKind::ALL {
            is_partition(mapping.partition(kind), mapping.world_size())?;
            prop_assert!(mapping.group(kind).contains(&mapping.rank()), "{:?}", kind);
            prop_assert!(mapping.groups(kind).contains(&mapping.group(kind)), "{:?}", kind);
        }
    }

    #[test]
    fn ranks_recompose(mapping in mappings()) {
        let m = &mapping;
        let cluster = m.moe_cluster_rank() + m.moe_cluster_size() * m.moe_tp_rank();
        prop_assert_eq!(m.tp_rank(), m.moe_ep_rank() + m.moe_ep_size() * cluster);
        prop_assert_eq!(m.rank(), m.local_rank() + m.gpus_per_node() * m.node_rank());
        if !m.auto_parallel() {
            prop_assert_eq!(m.rank(), m.tp_rank() + m.tp_size() * (m.cp_rank() + m.cp_size() * m.pp_rank()));
        }
    }

    #[test]
    fn pipeline_neighbours_are_mutual(mapping in mappings()) {
        let next = mapping.with_rank(mapping.next_pp_rank()).unwrap();
        prop_assert_eq!(next.prev_pp_rank(), mapping.rank());
        prop_assert_eq!(next.pp_rank(), (mapping.pp_rank() + 1) % mapping.pp_size());
        prop_assert_eq!(next.pp_group(), mapping.pp_group());
    }

    #[test]
    fn layers_and_experts_are_dealt_out_once(
        mapping in mappings(),
        num_layers in 0..40usize,
        per_rank in 0..5usize,
    ) {
        let of = |group: Vec<usize>| group.into_iter().map(|rank| mapping.with_rank(rank).unwrap());
        let layers: Vec<usize> = of(mapping.pp_group()).flat_map(|m| m.pp_layers(num_layers)).collect();
        prop_assert_eq!(layers, Vec::from_iter(0..num_layers));
        if mapping.cp_size() == 1 {
            let num_experts = per_rank * mapping.moe_ep_size();
            let experts: Vec<usize> =
                of(mapping.moe_ep_group()).flat_map(|m| m.ep_experts(num_experts).unwrap()).collect();
            prop_assert_eq!(experts, Vec::from_iter(0..num_experts));
        }
    }

    #[test]
    fn mappings_survive_json(mapping in mappings()) {
        let json = serde_json::to_value(mapping).unwrap();
        prop_assert_eq!(json.as_object().unwrap().len(), 12);
        prop_assert_eq!(serde_json::from_value::<Mapping>(json).unwrap(), mapping);
    }

    #[test]
    fn equality_is_that_of_the_serialised_values(a in mappings(), b in mappings()) {
        let json = |mapping| serde_json::to_string(&mapping).unwrap();
        prop_assert_eq!(a == b, json(a) == json(b));
        prop_assert_eq!(HashSet::from([a, b]).len(), if a == b { 1 } else { 2 });
    }

    #[test]
    fn wrong_products_are_refused_with_their_numbers(
        world in 1..64usize,
        [tp, pp, cp] in prop::array::uniform3(1..8usize),
    ) {
        let product = tp * pp * cp;
        let message = match Mapping::builder(world, 0).tp(tp).pp(pp).cp(cp).build() {
            Ok(mapping) => {
                prop_assert_eq!(mapping.world_size(), product);
                return Ok(());
            }
            Err(error) => error.to_string(),
        };
        let sizes = format!("tp_size {tp} × pp_size {pp} × cp_size {cp} = {product}");
        prop_assert_eq!(message, format!("{sizes}, but world_size is {world}"));
        prop_assert_ne!(product, world);
    }

    #[test]
    fn no_numbers_make_it_panic(values: [usize; 8], auto in any::<bool>()) {
        let [world, rank, tp, cp, pp, moe_tp, moe_ep, cluster] = values;
        let builder: MappingBuilder = Mapping::builder(world, rank).tp(tp).cp(cp).pp(pp).auto_parallel(auto);
        let _ = builder.build();
        let _ = builder.moe_tp(moe_tp).moe_ep(moe_ep).moe_cluster(cluster).attn_tp(rank).build();
        let _ = MixedLayout::builder(world, rank).local_size(tp).inter_tp(cp).local_dp(pp).build();
    }

    #[test]
    fn mixed_groups_partition_the_world(layout in mixed_layouts()) {
        for kind in MixedGroup::ALL {
            is_partition(layout.partition(kind), layout.world_size())?;
            prop_assert!(layout.group(kind).contains(&layout.world_rank()), "{:?}", kind);
        }
    }

    #[test]
    fn mixed_ranks_recompose(layout in mixed_layouts()) {
        let l = &layout;
        prop_assert_eq!(l.world_rank(), l.local_rank() + l.inter_rank() * l.local_size());
        prop_assert_eq!(l.world_size(), l.local_size() * l.inter_size());
        prop_assert_eq!(l.local_rank(), l.local_tp_rank() + l.local_dp_rank() * l.local_tp_size());
        prop_assert_eq!(l.inter_rank(), l.inter_tp_rank() + l.inter_dp_rank() * l.inter_tp_size());
        prop_assert_eq!(l.tp_rank(), l.local_tp_rank() + l.inter_tp_rank() * l.local_tp_size());
        prop_assert_eq!(l.dp_rank(), l.local_dp_rank() + l.inter_dp_rank() * l.local_dp_size());
        prop_assert_eq!(l.tp_group()[l.tp_rank()], l.world_rank());
        prop_assert_eq!(l.dp_group()[l.dp_rank()], l.world_rank());
        prop_assert_eq!(l.tp_size() * l.dp_size(), l.world_size());
    }

    #[test]
    fn mixed_layouts_survive_json(layout in mixed_layouts()) {
        let json = serde_json::to_string(&layout).unwrap();
        prop_assert_eq!(serde_json::from_str::<MixedLayout>(&json).unwrap(), layout);
    }
}
