//! Routes as 32-bit integers, for kernels and for callers that keep arrays: where each part of them lies.

/// Makes the type that says where the parts of an array of 32-bit integers lie, one behind the other: a method for each part, whose
/// number of words follows from the type's fields, [`total`](RouteWords::total) and [`named`](RouteWords::named).
macro_rules! words {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $Words:ident($($size:ident),+) from $begin:expr;
        $($(#[$of_part:meta])* $seen:vis $part:ident: $count:expr,)+
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $visibility struct $Words {
            $($size: usize,)+
        }

        impl $Words {
            words!(@parts $Words, $begin; $({ $(#[$of_part])* $seen $part: $count })+);

            /// The parts by name, in their order.
            pub fn named(&self) -> Vec<(&'static str, std::ops::Range<usize>)> {
                vec![$((stringify!($part), self.$part()),)+]
            }
        }
    };
    (@parts $Words:ident, $begin:expr; { $(#[$meta:meta])* $seen:vis $part:ident: $count:expr } $($rest:tt)*) => {
        $(#[$meta])*
        $seen fn $part(&self) -> std::ops::Range<usize> {
            let (begin, count): (fn(&Self) -> usize, fn(&Self) -> usize) = ($begin, $count);
            let begin = begin(self);
            begin..begin + count(self)
        }

        words!(@parts $Words, |words: &$Words| words.$part().end; $($rest)*);
    };
    (@parts $Words:ident, $end:expr;) => {
        /// The number of words.
        pub fn total(&self) -> usize {
            let end: fn(&Self) -> usize = $end;
            end(self)
        }
    };
}
pub(crate) use words;

words! {
    /// The words of routes by token, by where they lie: what Notify leaves on a GPU for the kernels along routes, and
    /// [`ByTokenRoutes::parts`](crate::ByTokenRoutes::parts) gives on the host.
    ///
    /// All are 32-bit integers. `R` ranks, `L` experts of each, `T` tokens of this rank.
    pub struct RouteWords(world_size, local, tokens) from |_| 0;
    /// `[R, R]`: how many rows go from rank to rank, as far as there is room.
    pub counts: |w| w.world_size * w.world_size,
    /// `[R]`: where the rows of each rank begin at this rank.
    pub starts: |w| w.world_size,
    /// `[R, R]`: how many tokens the ranks up to and with the row's route to the column's.
    pub rank_prefix_matrix: |w| w.world_size * w.world_size,
    /// `[R]`: how many tokens this rank routes to each.
    pub routed_to_each: |w| w.world_size,
    /// `[1]`: 1 if more rows are routed here than there is room for, else 0.
    pub overflow: |_| 1,
    /// `[L]`: how often all ranks' tokens chose each of this rank's experts.
    pub tokens_per_expert: |w| w.local,
    /// `[T, R]`: the number of a token among those of this rank for a rank, or −1.
    pub send_head: |w| w.tokens * w.world_size,
}

impl RouteWords {
    /// The words of routes of `world_size` ranks, with `num_experts` experts in all and `tokens` tokens of this rank.
    pub fn new(world_size: usize, num_experts: usize, tokens: usize) -> Self {
        Self { world_size, local: num_experts / world_size.max(1), tokens }
    }

    /// How many experts a rank has.
    pub(crate) fn local(&self) -> usize {
        self.local
    }

    /// How many tokens this rank has.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        let words = RouteWords::new(2, 8, 3);
        assert_eq!(
            words.named(),
            [
                ("counts", 0..4),
                ("starts", 4..6),
                ("rank_prefix_matrix", 6..10),
                ("routed_to_each", 10..12),
                ("overflow", 12..13),
                ("tokens_per_expert", 13..17),
                ("send_head", 17..23),
            ]
        );
        assert_eq!(words.total(), 23);
    }
}
