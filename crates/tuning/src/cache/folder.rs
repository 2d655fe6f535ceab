//! Folders of cache files, and the users that may write to them.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, openat};
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};

use crate::error::TuningError;

/// How long to wait for another writer before going ahead without the lock.
const PATIENCE: Duration = Duration::from_secs(2);

/// An open folder of cache files, in which only this user and root can have created files.
///
/// What a cache holds decides what is computed and, for kernels, what is executed. So the folder and each file must
/// belong to this process's effective user or to root, and no other user may have the right to write them. Neither
/// the folder nor a file may be a symbolic link, and a file must be a regular one: opening a FIFO would wait for its
/// writer. The folders around this one are the caller's choice, and symbolic links among them are followed.
///
/// Names are those of files in the folder, without a slash.
#[derive(Debug)]
pub struct CacheFolder {
    path: PathBuf,
    folder: OwnedFd,
}

impl CacheFolder {
    /// Opens a folder; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// [`TuningError::Kind`], [`TuningError::Owner`] or [`TuningError::Writable`] if it cannot be trusted,
    /// [`TuningError::Io`] if it cannot be opened.
    pub fn open(path: &Path) -> Result<Option<Self>, TuningError> {
        // Without a slash at the end, behind which a symbolic link would be followed.
        let path: PathBuf =
            if path.as_os_str().is_empty() { ".".into() } else { path.components().collect() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat(CWD, &path, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(None),
            Err(_) if path.is_symlink() => {
                return Err(TuningError::Kind { path, found: "a symbolic link", wanted: "a folder" });
            }
            Err(error) => return Err(io_error("open", &path)(error.into())),
        };
        let stat = fstat(&folder).map_err(|error| io_error("look at", &path)(error.into()))?;
        trust(&path, &stat, geteuid().as_raw())?;
        Ok(Some(Self { path, folder }))
    }

    /// Opens a folder; one that does not exist is created, for this user alone.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn create(path: &Path) -> Result<Self, TuningError> {
        if let Some(folder) = Self::open(path)? {
            return Ok(folder);
        }
        let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
        created.map_err(io_error("create", path))?;
        Self::open(path)?.ok_or_else(|| io_error("open", path)(io::ErrorKind::NotFound.into()))
    }

    /// Where a file of the folder is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The bytes of a file, at most `limit` of them; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// [`TuningError::Kind`], [`TuningError::Owner`], [`TuningError::Writable`] or [`TuningError::TooLarge`] if it
    /// cannot be trusted, [`TuningError::Io`] if it cannot be read.
    pub fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, TuningError> {
        let path = self.path(name);
        let file = match self.open_file(name, OFlags::RDONLY) {
            Err(TuningError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            file => file?,
        };
        let mut bytes = Vec::new();
        // The size may grow while it is read, and some files do not tell it.
        let read = file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error("read", &path))?;
        if read as u64 > limit { Err(TuningError::TooLarge { path, limit }) } else { Ok(Some(bytes)) }
    }

    /// Replaces a file as a whole: a reader sees either the old or the new one. What has the name is not followed and
    /// not written to.
    ///
    /// # Errors
    ///
    /// [`TuningError::Io`].
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), TuningError> {
        let path = self.path(name);
        let write = || {
            // The kernel would send SIGXFSZ, which kills the program that uses this library.
            if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes.len() as u64) {
                return Err(Errno::FBIG.into());
            }
            // Only within a folder is renaming atomic. The temporary file goes away if it is not renamed; one that a
            // killed process left is never looked at. Others may read: root may keep a cache for all users.
            let mut builder = tempfile::Builder::new();
            builder.prefix(".cache-").suffix(".tmp").permissions(fs::Permissions::from_mode(0o644));
            let mut file = builder.tempfile_in(&self.path)?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(io_error("write", &path))
    }

    /// Renames a file.
    ///
    /// # Errors
    ///
    /// [`TuningError::Io`].
    pub fn rename(&self, from: &str, to: &str) -> Result<(), TuningError> {
        fs::rename(self.path(from), self.path(to)).map_err(io_error("set aside", &self.path(from)))
    }

    /// Keeps other writers out for as long as the result lives, by a lock on a file of this name.
    ///
    /// The lock guards against a lost entry, never a broken file, so where locks do not work, or where somebody
    /// holds one for too long, it is better to go ahead: that is `None`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn lock(&self, name: &str) -> Result<Option<File>, TuningError> {
        let file = self.open_file(name, OFlags::RDWR | OFlags::CREATE)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => {
                    sleep(Duration::from_millis(1))
                }
                Err(_) => return Ok(None),
            }
        }
    }

    /// Opens a regular file that can be trusted, without following a symbolic link and without waiting for the writer
    /// of a FIFO.
    fn open_file(&self, name: &str, flags: OFlags) -> Result<File, TuningError> {
        let path = self.path(name);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => file,
            Err(Errno::LOOP) => {
                return Err(TuningError::Kind { path, found: "a symbolic link", wanted: "a regular file" });
            }
            Err(error) => return Err(io_error("open", &path)(error.into())),
        };
        let stat = fstat(&file).map_err(|error| io_error("look at", &path)(error.into()))?;
        let found = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => None,
            FileType::Fifo => Some("a FIFO"),
            FileType::Directory => Some("a folder"),
            FileType::CharacterDevice | FileType::BlockDevice => Some("a device"),
            _ => Some("something else"),
        };
        if let Some(found) = found {
            return Err(TuningError::Kind { path, found, wanted: "a regular file" });
        }
        trust(&path, &stat, geteuid().as_raw())?;
        Ok(file.into())
    }
}

/// Whether only `user` and root can have written it.
fn trust(path: &Path, stat: &Stat, user: u32) -> Result<(), TuningError> {
    const OTHERS_WRITE: u32 = 0o022;
    let (owner, mode) = (stat.st_uid, stat.st_mode & 0o7777);
    if owner != user && owner != 0 {
        return Err(TuningError::Owner { path: path.into(), owner, user });
    }
    if mode & OTHERS_WRITE != 0 {
        return Err(TuningError::Writable { path: path.into(), mode });
    }
    Ok(())
}

/// Turns an error of the file system into one of this crate.
pub(super) fn io_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> TuningError + Copy {
    move |source| TuningError::Io { action, path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The warning about a file of this owner and mode, when user 1000 finds it.
    fn said(owner: u32, mode: u32) -> Option<String> {
        let mut stat = fstat(File::open("/").unwrap()).unwrap();
        (stat.st_uid, stat.st_mode) = (owner, mode);
        trust(Path::new("/cache"), &stat, 1000).err().map(|error| error.to_string())
    }

    #[test]
    fn only_what_the_user_or_root_alone_can_write_is_trusted() {
        assert_eq!([said(1000, 0o644), said(0, 0o755), said(1000, 0o100600)], [None, None, None]);
        let foreign = "/cache belongs to user 1001, and this process runs as user 1000";
        assert_eq!(said(1001, 0o600).unwrap(), foreign);
        let open = "others may write /cache (its mode is 0664): `chmod go-w` it";
        assert_eq!(said(1000, 0o100664).unwrap(), open);
        assert!(said(0, 0o1777).unwrap().contains("1777"));
        assert!(said(1000, 0o602).is_some());
    }
}
