//! The thread blocks that do an operation.

use antiphon_plan::GroupShare;

use crate::error::{LanguageError, Result};

/// Thread blocks of a rank that do operations together, each its share of the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ThreadBlockGroup {
    blocks: Vec<u32>,
}

impl ThreadBlockGroup {
    /// The group of these thread blocks, in this order.
    ///
    /// # Errors
    /// [`LanguageError::DuplicateThreadBlock`].
    pub fn new(blocks: impl Into<Vec<u32>>) -> Result<Self> {
        let blocks = blocks.into();
        let mut sorted = blocks.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(LanguageError::DuplicateThreadBlock { tb: pair[0], group: blocks }),
            None => Ok(ThreadBlockGroup { blocks }),
        }
    }

    /// Its thread blocks.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The share of one of them.
    ///
    /// # Errors
    /// [`LanguageError::NotInGroup`].
    pub fn share(&self, tb: u32) -> Result<GroupShare> {
        match self.blocks.iter().position(|&member| member == tb) {
            Some(place) => Ok(self.share_at(place)),
            None => Err(LanguageError::NotInGroup { tb, group: self.blocks.clone() }),
        }
    }

    fn share_at(&self, place: usize) -> GroupShare {
        GroupShare { tb_id: place as u32, tbg_size: self.blocks.len() as u32 }
    }
}

/// The thread blocks of an operation: one (`0`), or all of a group (`&group`).
#[derive(Clone, Copy, Debug)]
pub enum Blocks<'a> {
    /// One thread block does all of it.
    One(u32),
    /// Each of a group does its share.
    All(&'a ThreadBlockGroup),
    /// One of a group does its share.
    Member(u32, &'a ThreadBlockGroup),
}

impl From<u32> for Blocks<'_> {
    fn from(tb: u32) -> Self {
        Blocks::One(tb)
    }
}

impl<'a> From<&'a ThreadBlockGroup> for Blocks<'a> {
    fn from(group: &'a ThreadBlockGroup) -> Self {
        Blocks::All(group)
    }
}

impl Blocks<'_> {
    /// Each of them with its share.
    pub(crate) fn each(self, mut body: impl FnMut(u32, Option<GroupShare>) -> Result<()>) -> Result<()> {
        match self {
            Blocks::One(tb) => body(tb, None),
            Blocks::All(group) => {
                let mut members = group.blocks.iter().enumerate();
                members.try_for_each(|(place, &tb)| body(tb, Some(group.share_at(place))))
            }
            Blocks::Member(tb, group) => body(tb, Some(group.share(tb)?)),
        }
    }
}
