//! The class `Mapping`.

use std::hash::{DefaultHasher, Hash, Hasher};

use antiphon::topology::{Mapping as Layout, MappingBuilder, TopologyError};
use pyo3::{
    exceptions::{PyAssertionError, PyValueError},
    prelude::*,
    types::{PyDict, PyTuple, PyType},
};

use crate::error::Result;

#[doc = stub!("Mapping")]
#[pyclass(eq, subclass, module = "antiphon.comm")]
pub(crate) struct Mapping {
    layout: Layout,
    /// Whatever the caller gave.
    #[pyo3(get, set)]
    cp_config: Option<Py<PyAny>>,
}

impl PartialEq for Mapping {
    fn eq(&self, other: &Self) -> bool {
        self.layout == other.layout
    }
}

/// The fields by which mappings are compared, as keywords of the constructor.
const IDENTITY: [&str; 12] = [
    "world_size",
    "rank",
    "gpus_per_node",
    "cp_size",
    "tp_size",
    "pp_size",
    "moe_tp_size",
    "moe_cluster_size",
    "moe_ep_size",
    "attn_tp_size",
    "attn_cp_size",
    "auto_parallel",
];

/// How a size is set that may be left open.
type Set = fn(MappingBuilder, usize) -> MappingBuilder;

/// A number that must not be negative.
pub(crate) fn unsigned(name: &str, value: i64) -> Result<usize> {
    let negative = |_| PyValueError::new_err(format!("{name} must not be negative, but it is {value}"));
    Ok(usize::try_from(value).map_err(negative)?)
}

/// A rank from the caller; every invalid value raises `ValueError`.
fn as_rank(rank: &Bound<'_, PyAny>) -> PyResult<usize> {
    rank.extract().map_err(|_| PyValueError::new_err(format!("rank is {rank:?}, which is no rank")))
}

/// The methods of the class: those that only pass on what the layout says, and its own.
macro_rules! methods {
    (
        properties { $($(#[$meta:meta])* $property:ident: $value:ty,)* }
        methods { $($(#[$doc:meta])* $method:ident($($argument:ident)?): $answer:ty,)* }
        $($own:tt)*
    ) => {
        #[pymethods]
        impl Mapping {
            $(
                $(#[$meta])*
                #[getter]
                fn $property(&self) -> $value {
                    self.layout.$property()
                }
            )*

            $(
                $(#[$doc])*
                fn $method(&self $(, $argument: usize)?) -> $answer {
                    self.layout.$method($($argument)?)
                }
            )*

            $($own)*
        }
    };
}

methods! {
    properties {
        world_size: usize,
        #[doc = stub!("Mapping.rank")]
        rank: usize,
        gpus_per_node: usize,
        cp_size: usize,
        tp_size: usize,
        pp_size: usize,
        moe_tp_size: usize,
        moe_cluster_size: usize,
        moe_ep_size: usize,
        attn_tp_size: usize,
        attn_cp_size: usize,
        auto_parallel: bool,
        #[doc = stub!("Mapping.enable_attention_dp")]
        enable_attention_dp: bool,
        tp_rank: usize,
        cp_rank: usize,
        pp_rank: usize,
        moe_tp_rank: usize,
        moe_cluster_rank: usize,
        moe_ep_rank: usize,
        tp_group: Vec<usize>,
        cp_group: Vec<usize>,
        pp_group: Vec<usize>,
        moe_tp_group: Vec<usize>,
        moe_cluster_group: Vec<usize>,
        moe_ep_group: Vec<usize>,
        tp_groups: Vec<Vec<usize>>,
        cp_groups: Vec<Vec<usize>>,
        pp_groups: Vec<Vec<usize>>,
        moe_tp_groups: Vec<Vec<usize>>,
        moe_cluster_groups: Vec<Vec<usize>>,
        moe_ep_groups: Vec<Vec<usize>>,
    }
    methods {
        has_tp(): bool,
        has_cp(): bool,
        has_pp(): bool,
        has_moe_tp(): bool,
        has_moe_cluster(): bool,
        has_moe_ep(): bool,
        #[doc = stub!("Mapping.is_multi_node")]
        is_multi_node(): bool,
        is_first_pp_rank(): bool,
        is_last_pp_rank(): bool,
        is_second_last_pp_rank(): bool,
        #[doc = stub!("Mapping.prev_pp_rank")]
        prev_pp_rank(): usize,
        #[doc = stub!("Mapping.next_pp_rank")]
        next_pp_rank(): usize,
        get_node_rank(rank): usize,
        get_local_rank(rank): usize,
    }

    // Named apart, as PyO3 makes `get_…` of properties too.
    #[getter(node_rank)]
    fn own_node_rank(&self) -> usize {
        self.layout.node_rank()
    }

    #[getter(local_rank)]
    fn own_local_rank(&self) -> usize {
        self.layout.local_rank()
    }

    #[new]
    #[pyo3(signature = (
        world_size = 1, rank = None, gpus_per_node = 8, *, cp_size = 1, cp_config = None, tp_size = 1, pp_size = 1,
        moe_cluster_size = -1, moe_tp_size = -1, moe_ep_size = -1, attn_tp_size = -1, attn_cp_size = -1,
        auto_parallel = false, enable_attention_dp = false
    ))]
    #[pyo3(text_signature = "(world_size=1, rank=0, gpus_per_node=8, *, cp_size=1, cp_config=None, tp_size=1, \
        pp_size=1, moe_cluster_size=-1, moe_tp_size=-1, moe_ep_size=-1, attn_tp_size=-1, attn_cp_size=-1, \
        auto_parallel=False, enable_attention_dp=False)")]
    #[expect(clippy::too_many_arguments, reason = "a constructor of keywords")]
    fn new(
        world_size: i64,
        rank: Option<&Bound<'_, PyAny>>,
        gpus_per_node: i64,
        cp_size: i64,
        cp_config: Option<Py<PyAny>>,
        tp_size: i64,
        pp_size: i64,
        moe_cluster_size: i64,
        moe_tp_size: i64,
        moe_ep_size: i64,
        attn_tp_size: i64,
        attn_cp_size: i64,
        auto_parallel: bool,
        enable_attention_dp: bool,
    ) -> Result<Self> {
        let rank = rank.map_or(Ok(0), as_rank)?;
        let mut builder = Layout::builder(unsigned("world_size", world_size)?, rank)
            .gpus_per_node(unsigned("gpus_per_node", gpus_per_node)?)
            .cp(unsigned("cp_size", cp_size)?)
            .tp(unsigned("tp_size", tp_size)?)
            .pp(unsigned("pp_size", pp_size)?)
            .auto_parallel(auto_parallel)
            .enable_attention_dp(enable_attention_dp);
        let open: [(_, _, Set); 5] = [
            ("moe_cluster_size", moe_cluster_size, MappingBuilder::moe_cluster),
            ("moe_tp_size", moe_tp_size, MappingBuilder::moe_tp),
            ("moe_ep_size", moe_ep_size, MappingBuilder::moe_ep),
            ("attn_tp_size", attn_tp_size, MappingBuilder::attn_tp),
            ("attn_cp_size", attn_cp_size, MappingBuilder::attn_cp),
        ];
        for (name, size, set) in open.into_iter().filter(|&(_, size, _)| size != -1) {
            builder = set(builder, unsigned(name, size)?);
        }
        Ok(Self { layout: builder.build()?, cp_config })
    }

    #[setter]
    fn set_rank(&mut self, rank: &Bound<'_, PyAny>) -> Result<()> {
        self.layout = self.layout.with_rank(as_rank(rank)?)?;
        Ok(())
    }

    #[doc = stub!("Mapping.pp_layers")]
    fn pp_layers(&self, num_layers: usize) -> Vec<usize> {
        self.layout.pp_layers(num_layers).collect()
    }

    #[doc = stub!("Mapping.ep_experts")]
    fn ep_experts(&self, num_experts: usize) -> Result<Vec<usize>> {
        match self.layout.ep_experts(num_experts) {
            Ok(experts) => Ok(experts.collect()),
            Err(error @ TopologyError::ExpertsWithContext { .. }) => {
                Err(PyAssertionError::new_err(error.to_string()).into()) // what the peer raises here
            }
            Err(error) => Err(error.into()),
        }
    }

    #[doc = stub!("Mapping.from_dict")]
    #[classmethod]
    fn from_dict<'py>(class: &Bound<'py, PyType>, mapping: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        class.call((), Some(mapping))
    }

    #[doc = stub!("Mapping.to_dict")]
    fn to_dict<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let values = PyDict::new(this.py());
        IDENTITY.iter().try_for_each(|&name| values.set_item(name, this.getattr(name)?))?;
        Ok(values)
    }

    /// For pickle and copy: all that the constructor was given.
    fn __getnewargs_ex__<'py>(this: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let keywords = Self::to_dict(this)?;
        ["cp_config", "enable_attention_dp"].iter().try_for_each(|&name| {
            keywords.set_item(name, this.getattr(name)?)
        })?;
        Ok((PyTuple::empty(this.py()), keywords))
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.layout.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(this: &Bound<'_, Self>) -> PyResult<String> {
        let value = |&name: &&str| Ok(format!("{name}={:?}", this.getattr(name)?));
        let values = IDENTITY.iter().map(value).collect::<PyResult<Vec<_>>>()?;
        Ok(format!("{}({})", this.get_type().name()?, values.join(", ")))
    }
}
