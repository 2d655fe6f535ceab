//! The cache file as a whole: reading and replacing.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::folder::{CacheFolder, io_error};
use crate::error::{TuningError, one_line};

/// The format that is written. Formats up to it are read; a field that an older one lacks gets a default.
pub const FORMAT: u32 = 1;

/// The largest file that is read, in bytes. An entry takes some 10 KB.
pub const MAX_FILE_BYTES: u64 = 16 << 20;

/// The content of a cache file. Entries are read one by one, so that a broken entry does not spoil the
/// rest.
#[derive(Serialize, Deserialize)]
pub(super) struct Contents {
    #[serde(default)]
    pub(super) format: u32,
    #[serde(default)]
    pub(super) entries: Vec<Value>,
}

impl Default for Contents {
    fn default() -> Self {
        Self { format: FORMAT, entries: Vec::new() }
    }
}

/// Reads a file; one that does not exist is empty.
pub(super) fn read(folder: &CacheFolder, name: &str) -> Result<Contents, TuningError> {
    let Some(bytes) = folder.read(name, MAX_FILE_BYTES)? else { return Ok(Contents::default()) };
    let path = folder.path(name);
    let contents: Contents = serde_json::from_slice(&bytes)
        .map_err(|error| TuningError::CorruptFile { path: path.clone(), reason: one_line(&error) })?;
    match contents.format {
        0..=FORMAT => Ok(contents),
        found => Err(TuningError::NewerFormat { path, found, supported: FORMAT }),
    }
}

/// Replaces a file.
pub(super) fn replace(folder: &CacheFolder, name: &str, contents: &Contents) -> Result<(), TuningError> {
    let text = serde_json::to_vec_pretty(contents);
    let mut text = text.map_err(|error| io_error("encode", &folder.path(name))(error.into()))?;
    text.push(b'\n');
    folder.replace(name, &text)
}
