//! The table.

use std::fmt;

use crate::row::{BusFactor, Count, Detail, Extent, InPlace, Root, Row};

/// The table of operations becomes the type, its codes and its rows.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $code:literal: $row:expr,)*) => {
        /// The operations that ranks do together, each with its code on the wire and its [`Row`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Operation {
            $($(#[$doc])* $name = $code,)*
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Its row.
            #[inline]
            pub const fn row(self) -> &'static Row {
                match self {
                    $(Self::$name => const { &$row },)*
                }
            }
        }
    };
}

/// The row of an all-reduce, and of the operations that contain one.
const ALL_REDUCE: Row = Row {
    in_place: InPlace::Same,
    reduces: true,
    bus_factor: BusFactor::OthersTwice,
    ..Row::on_tensors("all_reduce", Extent::Block, Extent::Block)
};

operations! {
    /// Ranks wait for each other.
    Barrier = 1: Row { count: Count::Nothing, ..Row::new("barrier") },
    /// Every rank gets bytes of every rank.
    ExchangeObjects = 2: Row::new("exchange_objects"),
    /// Ranks take symmetric memory.
    Allocate = 3: Row::new("symmetric"),
    /// Ranks give symmetric memory back.
    Free = 4: Row { count: Count::Offset, ..Row::new("free") },
    /// Every rank gets the reduction of all ranks' blocks.
    AllReduce = 5: Row {
        algorithms: &[
            (1, "one-shot"),
            (2, "two-shot"),
            (3, "one-shot, registered"),
            (4, "two-shot, registered"),
            (0x42, "two-shot, hierarchical"), // on several nodes
            (0x43, "two-shot, sums of nodes"), // a mixed all-reduce on several nodes
        ],
        detail: Detail::Digest("place"), // where in registered memory
        ..ALL_REDUCE
    },
    /// Every rank gets all ranks' blocks.
    AllGather = 6: Row {
        in_place: InPlace::InputBlock,
        bus_factor: BusFactor::Others,
        algorithms: &[(1, "coalesced")], // of a list of tensors, whose counts it digests
        detail: Detail::Digest("counts"),
        ..Row::on_tensors("all_gather", Extent::Block, Extent::Row)
    },
    /// Rank `r` gets the reduction of all ranks' `r`-th blocks.
    ReduceScatter = 7: Row {
        in_place: InPlace::OutputBlock,
        reduces: true,
        bus_factor: BusFactor::Others,
        algorithms: &[(1, "coalesced"), (0x40, "hierarchical")],
        detail: Detail::Digest("counts"),
        ..Row::on_tensors("reduce_scatter", Extent::Row, Extent::Block)
    },
    /// Rank `r` gets all ranks' `r`-th blocks.
    AllToAll = 8: Row {
        in_place: InPlace::Same,
        bus_factor: BusFactor::Others,
        ..Row::on_tensors("all_to_all", Extent::Row, Extent::Row)
    },
    /// Every rank gets the root's block.
    Broadcast = 9: Row {
        in_place: InPlace::Same,
        bus_factor: BusFactor::Once,
        algorithms: &[(0x40, "hierarchical")],
        ..Row::on_tensors("broadcast", Extent::Block, Extent::Block).with_root(Root::Gives)
    },
    /// The root gets the reduction of all ranks' blocks.
    Reduce = 10: Row {
        in_place: InPlace::Same,
        reduces: true,
        bus_factor: BusFactor::Once,
        algorithms: &[(0x40, "hierarchical")],
        ..Row::on_tensors("reduce", Extent::Block, Extent::Block).with_root(Root::Gets)
    },
    /// The root gets all ranks' blocks.
    Gather = 11: Row {
        bus_factor: BusFactor::Others,
        ..Row::on_tensors("gather", Extent::Block, Extent::Row).with_root(Root::Gets)
    },
    /// Rank `r` gets the root's `r`-th block.
    Scatter = 12: Row {
        bus_factor: BusFactor::Others,
        ..Row::on_tensors("scatter", Extent::Row, Extent::Block).with_root(Root::Gives)
    },
    /// One rank gets a tensor of another.
    Message = 13: Row {
        bus_factor: BusFactor::Once,
        detail: Detail::Label("tag"),
        ..Row::on_tensors("send/recv", Extent::Block, Extent::Block)
    },
    /// An all-reduce with what follows it: residual, norm, quantisation.
    FusedAllReduce = 14: Row {
        name: "all_reduce_fused",
        algorithms: &[
            (0x01, "one-shot"),
            (0x02, "two-shot"),
            (0x10, "rounded"),
            (0x11, "one-shot, rounded"),
            (0x12, "two-shot, rounded"),
            (0x42, "two-shot, hierarchical"),
            (0x52, "two-shot, rounded, hierarchical"),
        ],
        detail: Detail::Number("rows of"),
        ..ALL_REDUCE
    },
    /// A loaded plan runs.
    ExecutePlan = 15: Row {
        algorithms: &[
            (1, "in place"),
            (2, "registered"),
            (3, "in place, registered"),
            (4, "last part"),
            (5, "in place, last part"),
            (6, "registered, last part"),
            (7, "in place, registered, last part"),
        ],
        count: Count::Placed,
        detail: Detail::Digest("plan"),
        ..Row::on_tensors("execute", Extent::Planned, Extent::Planned)
    },
    /// Rank `r` gets all ranks' `r`-th parts.
    AllToAllV = 16: Row {
        bus_factor: BusFactor::Others,
        ..Row::on_tensors("all_to_all_v", Extent::Parts, Extent::Parts)
    },
    /// Every rank gets all ranks' parts.
    AllGatherV = 17: Row {
        in_place: InPlace::InputBlock,
        bus_factor: BusFactor::Others,
        detail: Detail::Digest("counts"),
        ..Row::on_tensors("all_gather_v", Extent::Part, Extent::Parts)
    },
    /// Rank `r` gets the reduction of all ranks' `r`-th parts.
    ReduceScatterV = 18: Row {
        in_place: InPlace::OutputBlock,
        reduces: true,
        bus_factor: BusFactor::Others,
        algorithms: &[(0x40, "hierarchical")],
        detail: Detail::Digest("counts"),
        ..Row::on_tensors("reduce_scatter_v", Extent::Parts, Extent::Part)
    },
    /// Rank `r` gets the tokens that chose one of its experts.
    Dispatch = 19: Row {
        algorithms: &[
            (1, "blocking"),
            (2, "blocking, f32 scales"),
            (3, "blocking, i32 scales"),
            (4, "capacity"),
            (5, "capacity, f32 scales"),
            (6, "capacity, i32 scales"),
            (7, "cached"),
            (8, "cached, f32 scales"),
            (9, "cached, i32 scales"),
        ],
        ..Row::of_experts("dispatch")
    },
    /// Every rank gets, for each of its tokens, the sum of what the ranks of the token's experts made of it.
    Combine = 20: Row::of_experts("combine"),
    /// Every rank gets the sums of all groups of tensor parallel ranks, one block for each data parallel rank.
    AllReduceAllGather = 21: Row {
        in_place: InPlace::InputBlock,
        ..Row::mixed("all_reduce_all_gather")
    },
    /// Every group of tensor parallel ranks gets the sum over all ranks of the group's block.
    ReduceScatterAllReduce = 22: Row {
        in_place: InPlace::OutputBlock,
        ..Row::mixed("reduce_scatter_all_reduce")
    },
    /// Rank `r` gets the tokens that chose one of its experts, in slots of each expert. The number of tokens of each rank has a bound.
    DispatchToSlots = 23: Row {
        algorithms: &[(1, "bf16"), (2, "fp8"), (3, "fp8, powers of two"), (4, "fp8, packed scales")],
        count: Count::BoundedRows,
        ..Row::of_experts("dispatch_to_slots")
    },
    /// Every rank gets, for each of its tokens, the weighted sum of what the token's experts made of it.
    CombineFromSlots = 24: Row { algorithms: &[(1, "logfmt")], ..Row::of_experts("combine_from_slots") },
    /// Rank `r` gets the tokens that chose one of its experts, ordered by expert.
    DispatchByExpert = 25: Row {
        algorithms: &[
            (1, "blocking"),
            (2, "capacity"),
            (3, "rows"),
            (4, "rows, probs"),
            (5, "rows, f32 scales"),
            (6, "rows, f32 scales, probs"),
            (7, "rows, i32 scales"),
            (8, "rows, i32 scales, probs"),
        ],
        ..Row::of_experts("dispatch_by_expert")
    },
    /// Every rank gets, for each of its tokens, the sum of what the ranks of the token's experts made of it, of which each has
    /// summed what its own experts made.
    CombineByExpert = 26: Row { algorithms: &[(1, "probs")], ..Row::of_experts("combine_by_expert") },
    /// Ranks make a plan ready.
    LoadPlan = 27: Row { count: Count::Nothing, ..Row::new("load_plan") },
}

impl Operation {
    /// The name that callers know it by.
    #[inline]
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Whether a [`Call`](crate::Call) says all that there is to say but for one input and one output.
    pub const fn is_call(self) -> bool {
        let moves = matches!(self.row().input, Extent::Block | Extent::Row | Extent::Part | Extent::Parts);
        moves && !matches!(self, Self::Message | Self::FusedAllReduce)
    }

    /// The stable number that stands for the operation in shared memory; never 0 nor 255.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The operation of a [`code`](Self::code).
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|operation| operation.code() == code)
    }

    /// The operation of a [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|operation| operation.name() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_say_which_operation_it_is() {
        for &operation in Operation::ALL {
            assert_eq!(Operation::from_code(operation.code()), Some(operation));
            assert_eq!(Operation::from_name(operation.name()), Some(operation));
            assert!(!matches!(operation.code(), 0 | 255), "words of nothing, and of broken memory");
        }
        assert_eq!((Operation::from_code(0), Operation::from_name("all_reduced")), (None, None));
    }

    #[test]
    fn codes_are_those_that_ranks_of_this_version_write() {
        let codes: Vec<_> = Operation::ALL.iter().map(|operation| operation.code()).collect();
        assert_eq!(codes, Vec::from_iter(1..=27));
    }

    #[test]
    fn a_root_is_what_the_detail_word_says() {
        for &operation in Operation::ALL {
            let row = operation.row();
            assert_eq!(row.root.is_some(), row.detail == Detail::Number("root"), "{operation}");
        }
    }

    #[test]
    fn in_place_a_block_lies_in_the_row() {
        for &operation in Operation::ALL {
            let row = operation.row();
            let allowed = match (row.input, row.output) {
                (Extent::Block, Extent::Row) | (Extent::Part, Extent::Parts) => {
                    [InPlace::Never, InPlace::InputBlock]
                }
                (Extent::Row, Extent::Block) | (Extent::Parts, Extent::Part) => {
                    [InPlace::Never, InPlace::OutputBlock]
                }
                (Extent::Planned, Extent::Planned) => continue, // the call itself says what lies where
                (input, output) if input == output => [InPlace::Never, InPlace::Same],
                _ => [InPlace::Never; 2],
            };
            assert!(allowed.contains(&row.in_place), "{operation}");
        }
    }

    #[test]
    fn algorithms_have_names_of_their_own() {
        for &operation in Operation::ALL {
            let row = operation.row();
            for (index, (number, name)) in row.algorithms.iter().enumerate() {
                assert_eq!(row.algorithm(*number), Some(*name), "{operation}");
                assert!(*number != 0 && row.algorithms[..index].iter().all(|(_, other)| other != name));
            }
        }
        assert_eq!(Operation::AllReduce.row().algorithm(0), None);
    }

    #[test]
    fn operations_that_reduce_are_the_four_and_the_fused_ones() {
        let reducing: Vec<_> = Operation::ALL.iter().filter(|operation| operation.row().reduces).collect();
        let names: Vec<_> = reducing.iter().map(|operation| operation.name()).collect();
        let plain = ["all_reduce", "reduce_scatter", "reduce", "all_reduce_fused", "reduce_scatter_v"];
        assert_eq!(names, [&plain[..], &["all_reduce_all_gather", "reduce_scatter_all_reduce"]].concat());
    }
}
