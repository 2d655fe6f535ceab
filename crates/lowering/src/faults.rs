//! Mistakes that tests put into the rules or the proof, to see that they are found.

macro_rules! faults {
    ($($(#[doc = $doc:literal])* $fault:ident,)*) => {
        /// A mistake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Fault {
            $($(#[doc = $doc])* $fault,)*
        }

        impl Fault {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$fault),*];
        }
    };
}

faults! {
    // Identities that do not hold, in the proof.
    /// `a − b = b − a`
    SubtractionCommutes,
    /// What a cast to fewer values takes away is forgotten.
    CastsKeepAll,
    /// The first place of a view is forgotten.
    OffsetsAreForgotten,
    /// A row that is repeated is a column that is repeated.
    RowsAreColumns,
    /// What a write leaves is forgotten.
    WritesCoverAll,
    /// Numbers are compared as f32.
    NumbersAreSingle,
    /// Reductions of rows of different extents are equal.
    ExtentsAreForgotten,
    /// `−x = |x|`
    SignsAreForgotten,
    /// What an unknown operation is given as text is forgotten.
    AttributesAreForgotten,
    /// Sums of integers wrap nowhere.
    SumsAreEndless,
    /// Roundings that a program did not have are none.
    RoundingsAreFree,
    // Values that only look alike, in the rules.
    /// Values of one operation are equal, whatever their operands are.
    OperandsAreForgotten,
    /// Strided views of one storage are equal.
    PlacesAreForgotten,
    // Lifetimes, in the rules.
    /// They begin at the second access.
    BeginsLate,
    /// They end at the access before the last one.
    EndsEarly,
    /// They end at the start of a collective.
    EndsAtStart,
    /// They last until the end.
    NeverEnds,
    /// Accesses through views do not count.
    ViewsAreNone,
    // Lifetimes, in the proof.
    /// They begin at the second operation.
    ProofBeginsLate,
    /// They end at the first use.
    ProofEndsAtFirstUse,
    /// They end at the start of a collective.
    ProofEndsAtStart,
    /// They last until the end.
    ProofNeverEnds,
    /// Storages are never in use at once.
    ProofIsBlind,
}

#[cfg(feature = "faults")]
std::thread_local! {
    static PRESENT: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

/// Puts a mistake into what this thread does from now on, or takes it away.
#[cfg(feature = "faults")]
pub fn put(fault: Option<Fault>) {
    PRESENT.set(fault);
}

impl Fault {
    /// Whether this mistake is to be made.
    #[cfg(feature = "faults")]
    pub(crate) fn is_present(self) -> bool {
        PRESENT.get() == Some(self)
    }

    /// Whether this mistake is to be made: never.
    #[cfg(not(feature = "faults"))]
    #[inline(always)]
    pub(crate) fn is_present(self) -> bool {
        false
    }
}
