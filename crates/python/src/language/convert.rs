//! Enumerations of `antiphon.language` by their values, ranks and thread blocks by their numbers.

use antiphon_language::{Blocks, BufferType, DataSync, Protocol, ReduceOp, ReplicationPolicy};
use antiphon_plan::REDUCE_OPS;
use pyo3::{
    exceptions::{PyAssertionError, PyIndexError, PyRuntimeError, PyTypeError, PyValueError},
    intern,
    prelude::*,
};

use super::chunk::ThreadBlockGroup;
use crate::error::Result;

/// A member of one of the package's enumerations.
pub(super) fn member<T>(
    value: &Bound<'_, PyAny>,
    what: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> PyResult<T> {
    let wrong = || PyTypeError::new_err(format!("{value:?} is no {what}"));
    let name = value.getattr(intern!(value.py(), "_value_")).map_err(|_| wrong())?;
    parse(name.extract::<&str>().map_err(|_| wrong())?).ok_or_else(wrong)
}

pub(super) fn buffer_type(value: &Bound<'_, PyAny>) -> PyResult<BufferType> {
    member(value, "BufferType", |name| match name {
        "i" => Some(BufferType::Input),
        "o" => Some(BufferType::Output),
        "s" => Some(BufferType::Scratch),
        _ => None,
    })
}

pub(super) fn data_sync(value: &Bound<'_, PyAny>) -> PyResult<DataSync> {
    member(value, "SyncType", |name| match name {
        "none" => Some(DataSync::NONE),
        "before" => Some(DataSync::BEFORE),
        "after" => Some(DataSync::AFTER),
        "both" => Some(DataSync::BOTH),
        _ => None,
    })
}

pub(super) fn reduce_op(value: &Bound<'_, PyAny>) -> PyResult<ReduceOp> {
    member(value, "ReduceOperationType", |name| REDUCE_OPS.into_iter().find(|op| op.name() == name))
}

pub(super) fn replication_policy(value: &Bound<'_, PyAny>) -> PyResult<ReplicationPolicy> {
    member(value, "ReplicationPolicy", |name| match name {
        "interleaved" => Some(ReplicationPolicy::Interleaved),
        "none" => Some(ReplicationPolicy::None),
        _ => None,
    })
}

pub(super) fn protocol(name: &str) -> PyResult<Protocol> {
    match name {
        "Simple" => Ok(Protocol::Simple),
        "LL" => Ok(Protocol::LL),
        _ => Err(PyAssertionError::new_err(format!("protocol {name:?} is neither \"Simple\" nor \"LL\""))),
    }
}

/// A rank, from the end if negative, as an index into a list. What is too large is left for the program to refuse.
pub(super) fn rank(rank: i64, num_ranks: u32) -> Result<u32> {
    from_end(rank, num_ranks)
        .ok_or_else(|| PyIndexError::new_err(format!("there is no rank {rank} among {num_ranks}")).into())
}

/// A thread block, the same.
pub(super) fn thread_block(tb: i64, blocks: u32) -> Result<u32> {
    from_end(tb, blocks)
        .ok_or_else(|| PyIndexError::new_err(format!("there is no thread block {tb}, but {blocks}")).into())
}

/// A thread block of a group, which is of no rank yet and so does not count from the end.
pub(super) fn member_of_group(tb: i64) -> Result<u32> {
    u32::try_from(tb).map_err(|_| PyValueError::new_err(format!("a group has no thread block {tb}")).into())
}

fn from_end(index: i64, count: u32) -> Option<u32> {
    let from_start = if index < 0 { index + i64::from(count) } else { index };
    match from_start {
        ..0 => None,
        _ => Some(u32::try_from(from_start).unwrap_or(u32::MAX)),
    }
}

/// The error of an operation without a thread block.
#[derive(Clone, Copy)]
pub(super) enum Missing {
    Runtime,
    Value,
}

/// The thread blocks of an operation: `tb`, or else all of `tb_group`; with both, `tb` takes its share of the group's work.
pub(super) fn blocks<'a>(
    tb: Option<i64>,
    group: Option<&'a Bound<'_, ThreadBlockGroup>>,
    count: u32,
    missing: Missing,
) -> Result<Blocks<'a>> {
    let tb = tb.map(|tb| thread_block(tb, count)).transpose()?;
    let text = "neither tb nor tb_group names the thread blocks that do it";
    match (tb, group.map(|group| &group.get().0)) {
        (Some(tb), None) => Ok(Blocks::One(tb)),
        (Some(tb), Some(group)) => Ok(Blocks::Member(tb, group)),
        (None, Some(group)) => Ok(Blocks::All(group)),
        (None, None) => Err(match missing {
            Missing::Runtime => PyRuntimeError::new_err(text),
            Missing::Value => PyValueError::new_err(text),
        }
        .into()),
    }
}
