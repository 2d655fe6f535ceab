//! The cache file as a whole: reading, replacing, locking.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::TuningError;

/// The format that is written. Formats up to it are read; a field that an older one lacks gets a default.
pub const FORMAT: u32 = 1;

/// How long to wait for another writer before going ahead without the lock.
const PATIENCE: Duration = Duration::from_secs(2);

/// What stands in a cache file. Entries are read one by one, so that one that is broken does not spoil the
/// rest.
#[derive(Serialize, Deserialize)]
pub(super) struct Contents {
    #[serde(default)]
    pub(super) format: u32,
    #[serde(default)]
    pub(super) entries: Vec<Value>,
}

/// Reads a file; one that does not exist is empty.
pub(super) fn read(path: &Path) -> Result<Contents, TuningError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Contents { format: FORMAT, entries: Vec::new() });
        }
        Err(error) => return Err(io_error("read", path)(error)),
    };
    let contents: Contents = serde_json::from_slice(&bytes)
        .map_err(|error| TuningError::CorruptFile { path: path.into(), reason: error.to_string() })?;
    match contents.format {
        0..=FORMAT => Ok(contents),
        found => Err(TuningError::NewerFormat { path: path.into(), found, supported: FORMAT }),
    }
}

/// Replaces a file as a whole: a reader sees either the old or the new one.
pub(super) fn replace(path: &Path, contents: &Contents) -> Result<(), TuningError> {
    let failed = io_error("write", path);
    let mut text = serde_json::to_vec_pretty(contents).map_err(|error| failed(error.into()))?;
    text.push(b'\n');
    let write = || {
        let mut file = temporary(folder(path))?;
        file.write_all(&text)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(failed)
}

/// A file in the same folder, for only there is renaming atomic; it goes away if it is not renamed.
fn temporary(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tuning-").suffix(".tmp");
    #[cfg(unix)]
    {
        // A cache folder may be shared by a team; the user's umask still applies.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o644));
    }
    builder.tempfile_in(folder)
}

/// Moves a corrupt file out of the way, but keeps it for whoever wants to know.
pub(super) fn set_aside(path: &Path) -> Result<(), TuningError> {
    fs::rename(path, beside(path, ".corrupt")).map_err(io_error("set aside", path))
}

/// Creates the file's folder.
pub(super) fn create_folder(path: &Path) -> Result<(), TuningError> {
    fs::create_dir_all(folder(path)).map_err(io_error("create the folder of", path))
}

/// Keeps other writers out for as long as the result lives.
///
/// What it guards against is a lost entry, never a broken file, so where locks do not work, or where somebody
/// holds one for too long, it is better to go ahead.
pub(super) fn lock(path: &Path) -> Option<File> {
    let file = File::create(beside(path, ".lock")).ok()?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => sleep(Duration::from_millis(1)),
            Err(_) => return None,
        }
    }
}

/// Turns an error of the file system into one of this crate.
fn io_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> TuningError + Copy {
    move |source| TuningError::Io { action, path: path.into(), source }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The path with something appended to its last part.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
