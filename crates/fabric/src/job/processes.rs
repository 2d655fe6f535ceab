//! The processes of this machine, as `/proc` lists them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
};

use super::board::{BYTES, Record};

/// A process with a board.
pub(super) struct Process {
    pub(super) id: u32,
    pub(super) records: Vec<Record>,
}

impl Process {
    /// The communicators that it has ranks of.
    pub(super) fn communicators(&self) -> impl Iterator<Item = u64> {
        self.records.iter().map(|record| record.communicator)
    }
}

fn ids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A process and all that it has started, and those, and so on; nothing if it is not there.
pub(super) fn family(of: u32) -> Option<BTreeSet<u32>> {
    let parents: BTreeMap<u32, u32> = ids().filter_map(|id| Some((id, parent(id)?))).collect();
    parents.contains_key(&of).then(|| {
        let is_of =
            |&id: &u32| std::iter::successors(Some(id), |id| parents.get(id).copied()).any(|id| id == of);
        parents.keys().copied().filter(is_of).collect()
    })
}

fn parent(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything; then come the state and the parent.
    stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
}

/// The processes with a board that this user may read.
pub(super) fn with_boards() -> Vec<Process> {
    ids().filter_map(|id| Some(Process { id, records: records(id)? })).collect()
}

/// The records of a process's board. A board that a process has only inherited is not its own.
fn records(id: u32) -> Option<Vec<Record>> {
    let own = own_id(id)?;
    let descriptors = fs::read_dir(format!("/proc/{id}/fd")).ok()?.flatten();
    let anonymous = descriptors.map(|entry| entry.path()).filter(|path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:antiphon"))
    });
    let mut boards = anonymous.filter_map(|path| {
        let file = File::open(path).ok()?;
        // Other memory of that name, which is longer, is on its way between ranks that meet.
        (file.metadata().ok()?.len() == BYTES as u64).then_some(())?;
        let mut bytes = Vec::new();
        file.take(BYTES as u64).read_to_end(&mut bytes).ok()?;
        Record::all(&bytes)
    });
    boards.find_map(|(process, records)| (process == own).then_some(records))
}

/// The id of a process where it lives, which is another one inside a container.
fn own_id(id: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.map_or(Some(id), |ids| ids.split_whitespace().last()?.parse().ok())
}
