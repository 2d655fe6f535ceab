//! The errors of measuring, choosing and caching.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::Key;

/// Why a sweep, a table or a cache cannot do what it was asked to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TuningError {
    /// There is nothing to choose from.
    #[error("a table needs at least one candidate")]
    NoCandidates,

    /// Two candidates have one name.
    #[error("candidate {name:?} is given twice")]
    DuplicateCandidate {
        /// The name.
        name: String,
    },

    /// There are no sizes.
    #[error("a sweep or a table needs at least one size")]
    NoSizes,

    /// There is nothing to take the median of.
    #[error("a sweep needs at least one round")]
    NoRounds,

    /// No candidate can run at a size.
    #[error("none of the {candidates} candidates serves {bytes} bytes")]
    Unserved {
        /// The size.
        bytes: usize,
        /// The number of candidates.
        candidates: usize,
    },

    /// A time that no clock shows, so the exchange between the ranks must have gone wrong.
    #[error("candidate {candidate:?} at {bytes} bytes took {nanoseconds} ns")]
    InvalidTime {
        /// The candidate's name.
        candidate: String,
        /// The size.
        bytes: usize,
        /// The time.
        nanoseconds: f64,
    },

    /// A row does not have one timing per candidate.
    #[error("the row of {bytes} bytes has {timings} timings for {candidates} candidates")]
    RowLength {
        /// The row's size.
        bytes: usize,
        /// The number of its timings.
        timings: usize,
        /// The number of candidates.
        candidates: usize,
    },

    /// Rows or thresholds do not ascend.
    #[error("sizes must ascend, but {next} bytes follow {previous} bytes")]
    Unordered {
        /// A size.
        previous: usize,
        /// The size after it.
        next: usize,
    },

    /// The smallest sizes have no candidate.
    #[error("the first threshold must be 0 bytes, but it is {from_bytes}")]
    FirstThreshold {
        /// The first threshold.
        from_bytes: usize,
    },

    /// A threshold names a candidate by an index that does not exist.
    #[error("there is no candidate {index}: there are {candidates}")]
    CandidateIndex {
        /// The index.
        index: usize,
        /// The number of candidates.
        candidates: usize,
    },

    /// A file names a candidate that the table does not list.
    #[error("candidate {name:?} is not in the table's list")]
    CandidateName {
        /// The name.
        name: String,
    },

    /// There is no folder to keep a cache in.
    #[error("no cache folder: set ANTIPHON_CACHE_DIR, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,

    /// The file system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },

    /// A cache's file or folder is of another kind than a cache writes.
    #[error("{path} is {found}, not {wanted}")]
    Kind {
        /// The file or folder.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What it should be.
        wanted: &'static str,
    },

    /// A cache's file or folder belongs to a user other than this one and root.
    #[error("{path} belongs to user {owner}, and this process runs as user {user}")]
    Owner {
        /// The file or folder.
        path: PathBuf,
        /// The number of its user.
        owner: u32,
        /// The number of this process's effective user.
        user: u32,
    },

    /// Users other than its owner may write a cache's file or folder.
    #[error("others may write {path} (its mode is {mode:04o}): `chmod go-w` it")]
    Writable {
        /// The file or folder.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },

    /// Users other than its owner may use a folder or file that is to be its user's alone.
    #[error("others may use {path} (its mode is {mode:04o}): `chmod go=` it")]
    Shared {
        /// The folder or file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },

    /// A cache file is larger than any that a cache writes.
    #[error("{path} is larger than {limit} bytes, the most that is read")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most bytes that are read.
        limit: u64,
    },

    /// A cache file is not what [`Cache`](crate::Cache) writes.
    #[error("{path} is not a tuning cache: {reason}")]
    CorruptFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A cache file comes from a newer version of this library.
    #[error("{path} has format {found}, but this version reads formats up to {supported}")]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format known here.
        supported: u32,
    },

    /// One entry of a cache file cannot be read; the others can.
    #[error("entry {index} of {path} is unusable: {reason}")]
    CorruptEntry {
        /// The file.
        path: PathBuf,
        /// The entry's place in the file, from 0.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// An entry was measured with other candidates than there are now.
    #[error("{key} was measured with other candidates: checksum {found}, now {expected}")]
    Stale {
        /// The entry's key.
        key: Box<Key>,
        /// The checksum over the candidates' names when it was measured.
        found: String,
        /// The checksum over their names now.
        expected: String,
    },
}

/// A message about a file's contents, with the control characters that it quotes escaped: a terminal would obey them.
pub(crate) fn one_line(message: &impl ToString) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    message.to_string().chars().map(shown).collect()
}
