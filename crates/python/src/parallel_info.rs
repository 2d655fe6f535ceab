//! The class `ParallelInfo`: a mixed layout.

use antiphon::{prelude::MixedLayout, topology::MixedGroup};
use pyo3::prelude::*;

use crate::{arguments::Whole, error::Result, mapping::unsigned};

#[doc = stub!("ParallelInfo")]
#[pyclass(frozen, subclass, module = "antiphon.comm.mixed_comm")]
pub(crate) struct ParallelInfo {
    layout: MixedLayout,
}

/// The properties of the class, which only pass on what the layout says.
macro_rules! properties {
    (properties { $($property:ident: $value:ty,)* } $($own:tt)*) => {
        #[pymethods]
        impl ParallelInfo {
            $(
                #[getter]
                fn $property(&self) -> $value {
                    self.layout.$property()
                }
            )*

            $($own)*
        }
    };
}

properties! {
    properties {
        world_rank: usize,
        world_size: usize,
        local_rank: usize,
        local_size: usize,
        inter_rank: usize,
        inter_size: usize,
        local_tp_rank: usize,
        local_tp_size: usize,
        local_dp_rank: usize,
        local_dp_size: usize,
        inter_tp_rank: usize,
        inter_tp_size: usize,
        inter_dp_rank: usize,
        inter_dp_size: usize,
        tp_rank: usize,
        tp_size: usize,
        dp_rank: usize,
        dp_size: usize,
        use_local_tp: bool,
        use_inter_tp: bool,
        use_tp: bool,
        use_dp: bool,
        use_inter: bool,
        use_mixed: bool,
    }

    #[new]
    #[expect(clippy::too_many_arguments, reason = "the peer's constructor")]
    fn new(
        world_rank: Whole,
        world_size: Whole,
        local_rank: Whole,
        local_size: Whole,
        inter_rank: Whole,
        inter_size: Whole,
        local_tp_size: Option<Whole>,
        local_dp_size: Option<Whole>,
        inter_tp_size: Option<Whole>,
        inter_dp_size: Option<Whole>,
    ) -> Result<Self> {
        let mut builder = MixedLayout::builder(
            unsigned("world_size", world_size.0)?,
            unsigned("world_rank", world_rank.0)?,
        )
        .local_rank(unsigned("local_rank", local_rank.0)?)
        .local_size(unsigned("local_size", local_size.0)?)
        .inter_rank(unsigned("inter_rank", inter_rank.0)?)
        .inter_size(unsigned("inter_size", inter_size.0)?);
        if let Some(size) = local_tp_size {
            builder = builder.local_tp(unsigned("local_tp_size", size.0)?);
        }
        if let Some(size) = local_dp_size {
            builder = builder.local_dp(unsigned("local_dp_size", size.0)?);
        }
        if let Some(size) = inter_tp_size {
            builder = builder.inter_tp(unsigned("inter_tp_size", size.0)?);
        }
        if let Some(size) = inter_dp_size {
            builder = builder.inter_dp(unsigned("inter_dp_size", size.0)?);
        }
        Ok(Self { layout: builder.build()? })
    }

    #[doc = stub!("ParallelInfo.valid_ops")]
    fn valid_ops(&self) -> Vec<u8> {
        self.layout.valid_ops().iter().map(|&op| op as u8).collect()
    }

    #[doc = stub!("ParallelInfo.tp_ranks")]
    fn tp_ranks(&self) -> Vec<Vec<usize>> {
        self.layout.groups(MixedGroup::Tp)
    }

    #[doc = stub!("ParallelInfo.dp_ranks")]
    fn dp_ranks(&self) -> Vec<Vec<usize>> {
        self.layout.groups(MixedGroup::Dp)
    }

    #[doc = stub!("ParallelInfo.local_ranks")]
    fn local_ranks(&self) -> Vec<Vec<usize>> {
        self.layout.groups(MixedGroup::Local)
    }
}

impl ParallelInfo {
    pub(crate) fn layout(&self) -> MixedLayout {
        self.layout
    }
}
