//! Tables that outlive a process.

mod file;
mod folder;
mod location;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use file::{FORMAT, MAX_FILE_BYTES};
pub use folder::CacheFolder;
pub use location::cache_dir;

use crate::checksum::of_candidates;
use crate::error::{TuningError, one_line};
use crate::{Key, Table};

/// One table in a cache file, with all its measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The key of the table.
    pub key: Key,
    /// A checksum over the candidates' names, in order. An entry with another one than today's is not used.
    pub checksum: String,
    /// When it was recorded, in seconds since 1970; 0 if unknown.
    #[serde(default)]
    pub recorded_unix_s: u64,
    /// The table.
    pub table: Table,
}

/// A file of tables, in JSON that a person can read.
///
/// ```text
/// {
///   "format": 1,
///   "entries": [
///     {
///       "checksum": "bfa0f267acf4d3df",
///       "key": { "operation": "all_reduce", "dtype": "bf16", "world_size": 8, "machine": "8x H200" },
///       "recorded_unix_s": 1795248000,
///       "table": {
///         "candidates": ["one_shot", "two_shot"],
///         "choices": [
///           { "candidate": "one_shot", "from_bytes": 0 },
///           { "candidate": "two_shot", "from_bytes": 666694 }
///         ],
///         "rows": [
///           {
///             "bytes": 524288,
///             "timings": [
///               { "candidate": "one_shot", "max_ns": 9310.0, "median_ns": 9242.0, "min_ns": 9201.0, ... },
///               { "candidate": "two_shot", "max_ns": 10400.0, "median_ns": 10310.0, "min_ns": 10288.0, ... }
///             ],
///             "winner": "one_shot"
///           },
///           ...
///         ]
///       }
///     }
///   ]
/// }
/// ```
///
/// The selection follows from `choices`, which may be edited; the rows are the measurements behind it.
///
/// Any number of processes and threads may use one file. It is replaced as a whole, so a reader never sees
/// half of it, and writers wait for each other (with a lock on a file beside it), so none loses an entry. A
/// reader does not wait. Nothing is kept in memory.
///
/// A file that another user may have written, and one that is no regular file, is not read: [`CacheFolder`] says what
/// is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    path: PathBuf,
}

impl Cache {
    /// The cache in its usual place: `tuning.json` in [`cache_dir`].
    ///
    /// # Errors
    ///
    /// [`TuningError::NoCacheFolder`].
    pub fn open() -> Result<Self, TuningError> {
        Ok(Self::at(cache_dir()?.join("tuning.json")))
    }

    /// A cache in this file, which need not exist yet.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The table for a key, or `None` if none was recorded.
    ///
    /// # Errors
    ///
    /// They say why a table cannot be used, and a caller may well print that and measure anew:
    /// [`TuningError::Stale`] if it was measured with other candidates than these,
    /// [`TuningError::CorruptEntry`], [`TuningError::CorruptFile`] or [`TuningError::NewerFormat`] if its file is not
    /// understood, and those of [`CacheFolder::open`] and [`CacheFolder::read`].
    pub fn get(&self, key: &Key, candidates: &[impl AsRef<str>]) -> Result<Option<Table>, TuningError> {
        let entries = self.read()?;
        let Some(index) = entries.iter().position(|value| is_about(value, key)) else {
            return Ok(None);
        };
        let entry = self.parse(index, &entries[index])?;
        let expected = of_candidates(candidates);
        if entry.checksum == expected {
            Ok(Some(entry.table))
        } else {
            Err(TuningError::Stale { key: Box::new(entry.key), found: entry.checksum, expected })
        }
    }

    /// Records a table, in place of an earlier one for the same key.
    ///
    /// A corrupt file is moved aside (`.corrupt` is appended to its name), and a new one begun.
    ///
    /// # Errors
    ///
    /// [`TuningError::NewerFormat`] if the file belongs to a newer version of this library,
    /// [`TuningError::Io`] if it cannot be written, and those of [`CacheFolder::create`] and [`CacheFolder::read`].
    pub fn put(&self, key: &Key, table: &Table) -> Result<(), TuningError> {
        let (folder, name) = self.place()?;
        let folder = CacheFolder::create(folder)?;
        let _lock = folder.lock(&format!("{name}.lock"))?;
        let mut contents = match file::read(&folder, name) {
            Err(TuningError::CorruptFile { .. }) => {
                folder.rename(name, &format!("{name}.corrupt"))?;
                file::Contents::default()
            }
            contents => contents?,
        };
        contents.format = FORMAT;
        contents.entries.retain(|value| !is_about(value, key));
        contents.entries.push(self.new_entry(key, table)?);
        file::replace(&folder, name, &contents)
    }

    /// All entries, for inspection: in the order in which they were recorded, each with the reason if it is
    /// unusable.
    ///
    /// # Errors
    ///
    /// [`TuningError::CorruptFile`] or [`TuningError::NewerFormat`] if there is no reading the file at all, and those of
    /// [`CacheFolder::open`] and [`CacheFolder::read`].
    pub fn entries(&self) -> Result<Vec<Result<Entry, TuningError>>, TuningError> {
        let values = self.read()?;
        Ok(values.iter().enumerate().map(|(index, value)| self.parse(index, value)).collect())
    }

    /// The entries as they stand in the file.
    fn read(&self) -> Result<Vec<Value>, TuningError> {
        let (folder, name) = self.place()?;
        match CacheFolder::open(folder)? {
            Some(folder) => Ok(file::read(&folder, name)?.entries),
            None => Ok(Vec::new()),
        }
    }

    /// The file's folder and name.
    fn place(&self) -> Result<(&Path, &str), TuningError> {
        let parts = self.path.parent().zip(self.path.file_name().and_then(OsStr::to_str));
        parts.ok_or_else(|| folder::io_error("name", &self.path)(io::ErrorKind::InvalidFilename.into()))
    }

    /// Reads an entry, which must be consistent in itself.
    fn parse(&self, index: usize, value: &Value) -> Result<Entry, TuningError> {
        let corrupt = |reason| TuningError::CorruptEntry { path: self.path.clone(), index, reason };
        let entry = Entry::deserialize(value).map_err(|error| corrupt(one_line(&error)))?;
        let expected = of_candidates(entry.table.candidates());
        if entry.checksum == expected {
            Ok(entry)
        } else {
            Err(corrupt(format!("checksum {:?}, but its candidates have {expected:?}", entry.checksum)))
        }
    }

    fn new_entry(&self, key: &Key, table: &Table) -> Result<Value, TuningError> {
        let entry = Entry {
            key: key.clone(),
            checksum: of_candidates(table.candidates()),
            recorded_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            table: table.clone(),
        };
        serde_json::to_value(entry).map_err(|error| TuningError::Io {
            action: "encode an entry of",
            path: self.path.clone(),
            source: error.into(),
        })
    }
}

/// Whether an entry is about this key, whatever the state of the rest of it.
fn is_about(entry: &Value, key: &Key) -> bool {
    entry.get("key").and_then(|found| Key::deserialize(found).ok()).is_some_and(|found| found == *key)
}
