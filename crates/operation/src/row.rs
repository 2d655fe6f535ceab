//! The columns of the table of operations.

/// The properties of an operation, from which everything else is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The name that callers know it by.
    pub name: &'static str,
    /// How many elements the tensor has that a rank passes.
    pub input: Extent,
    /// How many elements the tensor has that a rank gets.
    pub output: Extent,
    /// Whether input and output may lie at one place.
    pub in_place: InPlace,
    /// Whether a [`ReduceOp`](crate::ReduceOp) combines the ranks' elements.
    pub reduces: bool,
    /// The part of the root, in an operation that has one.
    pub root: Option<Root>,
    /// The factor from its algorithm bandwidth to its bus bandwidth.
    pub bus_factor: BusFactor,
    /// The number and the name of each algorithm. 0 has no name: it stands for the only one, or for one not yet chosen.
    pub algorithms: &'static [(u8, &'static str)],
    /// How a signature's count reads.
    pub count: Count,
    /// How a signature's detail word reads.
    pub detail: Detail,
}

impl Row {
    /// An operation without tensors.
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            input: Extent::Nothing,
            output: Extent::Nothing,
            in_place: InPlace::Never,
            reduces: false,
            root: None,
            bus_factor: BusFactor::Undefined,
            algorithms: &[],
            count: Count::Size,
            detail: Detail::Unused,
        }
    }

    /// An operation on tensors, whose signature's detail word is the root, if there is one.
    pub(crate) const fn on_tensors(name: &'static str, input: Extent, output: Extent) -> Self {
        Self { input, output, ..Self::new(name) }
    }

    /// An operation on the rows that a mixture of experts moves.
    pub(crate) const fn of_experts(name: &'static str) -> Self {
        Self {
            count: Count::Rows,
            detail: Detail::Experts,
            ..Self::on_tensors(name, Extent::Planned, Extent::Planned)
        }
    }

    /// The same operation with a root, which the detail word names.
    pub(crate) const fn with_root(self, root: Root) -> Self {
        Self { root: Some(root), detail: Detail::Number("root"), ..self }
    }

    /// A sum fused with a gather or a scatter, over a layout of tensor and data parallel ranks.
    pub(crate) const fn mixed(name: &'static str) -> Self {
        Self {
            reduces: true,
            algorithms: &[(1, "waits"), (2, "bytes1"), (3, "composed"), (4, "bytes2")],
            detail: Detail::Digest("layout and rows"),
            ..Self::on_tensors(name, Extent::Planned, Extent::Planned)
        }
    }

    /// The name of an algorithm, if it has one.
    pub fn algorithm(&self, number: u8) -> Option<&'static str> {
        self.algorithms.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
    }
}

/// How many elements a tensor has. Blocks are all of one length; parts have the lengths that the call lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Extent {
    /// There is no tensor.
    Nothing,
    /// One block.
    Block,
    /// A block for each rank, in rank order.
    Row,
    /// The part of this rank.
    Part,
    /// A part for each rank, in rank order.
    Parts,
    /// As many as the call itself says: by a layout of the ranks, by what experts tokens chose, or by a plan.
    Planned,
}

/// Whether input and output may lie at one place. Otherwise they must not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InPlace {
    /// They must not.
    Never,
    /// The output may be the input.
    Same,
    /// The input may be the rank's own block (or part) of the output.
    InputBlock,
    /// The output may be the rank's own block (or part) of the input.
    OutputBlock,
}

/// The part that only the root has in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Root {
    /// The root passes an input; the other ranks need none.
    Gives,
    /// The root gets an output; the other ranks need none.
    Gets,
}

/// The factor from algorithm bandwidth to bus bandwidth: the share of the data that must cross the busiest link. The
/// definitions are those of nccl-tests (doc/PERFORMANCE.md), so that figures compare over numbers of ranks and with theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BusFactor {
    /// Nothing is defined.
    Undefined,
    /// All data crosses once: 1.
    Once,
    /// All but a rank's own block crosses: `(W − 1) / W`.
    Others,
    /// All but a rank's own block crosses twice: `2 (W − 1) / W`.
    OthersTwice,
}

impl BusFactor {
    /// The factor among `world_size` ranks.
    pub fn among(self, world_size: usize) -> Option<f64> {
        let others = world_size.saturating_sub(1) as f64 / world_size.max(1) as f64;
        match self {
            Self::Undefined => None,
            Self::Once => Some(1.0),
            Self::Others => Some(others),
            Self::OthersTwice => Some(2.0 * others),
        }
    }
}

/// How the count of a signature reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Count {
    /// There is none, nor anything else to agree on.
    Nothing,
    /// A number of elements, or of bytes where there is no dtype.
    Size,
    /// A place in shared memory, in bytes.
    Offset,
    /// The elements of a row (the lower 32 bits) and the number of the earlier call that routed the rows (the upper 32 bits; 0 stands for
    /// none). The number of rows is free.
    Rows,
    /// The most rows of a rank (the upper 32 bits) and the elements of a row (the lower 32 bits).
    BoundedRows,
    /// A number of elements (the lower 40 bits), and the beginning of a digest of the places of registered tensors (the upper 24 bits;
    /// 0 stands for tensors that are not registered).
    Placed,
}

impl Count {
    /// A count of [`Rows`](Self::Rows): of `hidden` elements, routed by the call `routed_by` if that is not 0.
    pub fn rows(hidden: u32, routed_by: u32) -> u64 {
        u64::from(hidden) | u64::from(routed_by) << 32
    }

    /// A count of [`BoundedRows`](Self::BoundedRows): at most `most` rows of `hidden` elements.
    pub fn bounded_rows(hidden: u32, most: u32) -> u64 {
        Self::rows(hidden, most)
    }

    /// A count of [`Placed`](Self::Placed): of `elements` elements, in the places of a digest if they are registered.
    pub fn placed(elements: u64, places: Option<u32>) -> u64 {
        let places = places.map_or(0, |digest| (digest >> 8).max(1));
        elements & ((1 << Self::PLACES_AT) - 1) | u64::from(places) << Self::PLACES_AT
    }

    /// The elements and the beginning of the digest of a [`Placed`](Self::Placed) count.
    pub fn of_placed(count: u64) -> (u64, u32) {
        (count & ((1 << Self::PLACES_AT) - 1), (count >> Self::PLACES_AT) as u32)
    }

    const PLACES_AT: u32 = 40;
}

/// How the detail word of a signature reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Detail {
    /// There is none: the word is 0.
    Unused,
    /// A number behind its name: `root 3`, `rows of 7168`.
    Number(&'static str),
    /// A number behind its name, of which 0 is usual and says nothing: `tag 7`.
    Label(&'static str),
    /// The beginning of a digest behind the name of what it is made from: `plan 1f00aa31`. 0 stands for no digest.
    Digest(&'static str),
    /// A number of experts (the lower 24 bits), and how many of them a token chooses (the upper 8 bits; 0 stands for calls
    /// that move no choices).
    Experts,
}

impl Detail {
    /// A word of [`Experts`](Self::Experts).
    pub fn experts(experts: u32, top_k: u8) -> u32 {
        experts & 0x00FF_FFFF | u32::from(top_k) << 24
    }

    /// The text of a word; none if it says nothing.
    pub fn text(self, word: u32) -> Option<String> {
        match (self, word) {
            (Self::Unused | Self::Digest(_) | Self::Label(_), 0) => None,
            (Self::Unused, _) => Some(format!("detail {word}")), // a broken peer may say anything
            (Self::Number(name) | Self::Label(name), _) => Some(format!("{name} {word}")),
            (Self::Digest(name), _) => Some(format!("{name} {word:08x}")),
            (Self::Experts, _) => {
                let experts = format!("{} experts", word & 0x00FF_FFFF);
                Some(if word >> 24 == 0 { experts } else { format!("{experts}, top-{}", word >> 24) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let among_4 = [BusFactor::OthersTwice, BusFactor::Others, BusFactor::Once].map(|of| of.among(4));
        assert_eq!(among_4, [Some(1.5), Some(0.75), Some(1.0)]);
        assert_eq!(BusFactor::OthersTwice.among(1), Some(0.0));
        assert_eq!(BusFactor::Undefined.among(4), None);
    }

    #[test]
    fn a_detail_word_reads_as_its_row_says() {
        let text = |detail: Detail, word| detail.text(word).unwrap_or_default();
        assert_eq!(text(Detail::Number("root"), 0), "root 0");
        assert_eq!(text(Detail::Number("rows of"), 7168), "rows of 7168");
        assert_eq!(text(Detail::Digest("plan"), 0x1f00_aa31), "plan 1f00aa31");
        assert_eq!(text(Detail::Digest("place"), 0xab), "place 000000ab");
        assert_eq!((text(Detail::Digest("place"), 0), text(Detail::Unused, 0)), Default::default());
        assert_eq!(
            (text(Detail::Label("tag"), 7), text(Detail::Label("tag"), 0)),
            ("tag 7".into(), String::new())
        );
        assert_eq!(text(Detail::Unused, 7), "detail 7");
        assert_eq!(text(Detail::Experts, Detail::experts(256, 8)), "256 experts, top-8");
        assert_eq!(text(Detail::Experts, Detail::experts(8, 0)), "8 experts");
    }
}
