//! Folders of cache files, and the users that may write to them.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getpid, getrlimit};

use crate::error::TuningError;

/// How long to wait for another writer before going ahead without the lock.
const PATIENCE: Duration = Duration::from_secs(2);

/// An open folder of this library's files, in which only this user and root can have created files.
///
/// What a cache holds decides what is computed and, for kernels, what is executed. So the folder belongs to this
/// process's effective user or to root, and so does each file, and no other user may write them. A folder that is made
/// here has mode 0700. Neither the folder nor a file may be a symbolic link, and a file must be a regular one: opening a
/// FIFO would wait for its writer. The folders around this one are the caller's choice, and symbolic links among them
/// are followed.
///
/// Names are those of files in the folder, without a slash. Files are opened relative to the open folder, so it does
/// no harm if another folder takes its path in between.
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
        Self::open_in(CWD, &path.clone(), path)
    }

    /// Opens the folder `name` of the open folder `parent`; the two together are at `path`.
    fn open_in(parent: BorrowedFd<'_>, name: &Path, path: PathBuf) -> Result<Option<Self>, TuningError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat(parent, name, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(refusal(parent, name, path, FileType::Directory, error)),
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

    /// Opens a folder as [`create`](Self::create) does, for files that nobody else may see: it must be this user's, with
    /// mode 0700.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create); [`TuningError::Owner`] or [`TuningError::Shared`] if it is not this user's alone.
    pub fn create_private(path: &Path) -> Result<Self, TuningError> {
        let folder = Self::create(path).map_err(|error| match error {
            // Without the right to write, others could still read: the advice is that of `private`.
            TuningError::Writable { path: found, mode } if found == path => {
                TuningError::Shared { path: found, mode }
            }
            other => other,
        })?;
        let stat = fstat(&folder.folder).map_err(|error| io_error("look at", path)(error.into()))?;
        private(path, &stat, geteuid().as_raw())?;
        Ok(folder)
    }

    /// Opens a folder of this folder; one that does not exist is created, for this user alone.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn subfolder(&self, name: &str) -> Result<Self, TuningError> {
        let path = self.path(name);
        match mkdirat(&self.folder, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(io_error("create", &path)(error.into())),
        }
        Self::open_in(self.as_fd(), Path::new(name), path.clone())?
            .ok_or_else(|| io_error("open", &path)(io::ErrorKind::NotFound.into()))
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
        let write = || {
            // The kernel would send SIGXFSZ, which kills the program that uses this library.
            if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes.len() as u64) {
                return Err(Errno::FBIG.into());
            }
            // Only within a folder is renaming atomic.
            let (mut file, temporary) = self.temporary()?;
            let replaced = file.write_all(bytes).and_then(|()| file.sync_all());
            let replaced =
                replaced.and_then(|()| Ok(renameat(&self.folder, &temporary, &self.folder, name)?));
            replaced.inspect_err(|_| {
                let _ = unlinkat(&self.folder, &temporary, AtFlags::empty());
            })
        };
        write().map_err(io_error("write", &self.path(name)))
    }

    /// A new file and its name. A file that a killed process left under such a name is never looked at.
    fn temporary(&self) -> io::Result<(File, String)> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut attempt = 0;
        loop {
            // Other threads, and processes of other PID namespaces, may have made a file of this name.
            let name = format!(".cache-{}-{attempt}.tmp", getpid());
            // Others may read: root may keep a cache for all users.
            match openat(&self.folder, &name, flags, Mode::from_raw_mode(0o644)) {
                Ok(file) => return Ok((file.into(), name)),
                Err(Errno::EXIST) => attempt += 1,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Renames a file.
    ///
    /// # Errors
    ///
    /// [`TuningError::Io`].
    pub fn rename(&self, from: &str, to: &str) -> Result<(), TuningError> {
        renameat(&self.folder, from, &self.folder, to)
            .map_err(|error| io_error("set aside", &self.path(from))(error.into()))
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

    /// Opens a file for reading and writing that this user alone may read and write; creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); [`TuningError::Owner`] or [`TuningError::Shared`] if it is not this user's alone.
    pub fn open_private(&self, name: &str) -> Result<File, TuningError> {
        let file = self.open_file(name, OFlags::RDWR | OFlags::CREATE)?;
        let stat = fstat(&file).map_err(|error| io_error("look at", &self.path(name))(error.into()))?;
        private(&self.path(name), &stat, geteuid().as_raw())?;
        Ok(file)
    }

    /// Opens a regular file that can be trusted, without following a symbolic link and without waiting for the writer
    /// of a FIFO.
    fn open_file(&self, name: &str, flags: OFlags) -> Result<File, TuningError> {
        let path = self.path(name);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => file,
            Err(error) => {
                return Err(refusal(self.as_fd(), Path::new(name), path, FileType::RegularFile, error));
            }
        };
        let stat = fstat(&file).map_err(|error| io_error("look at", &path)(error.into()))?;
        if let Some(error) = wrong_kind(&path, &stat, FileType::RegularFile) {
            return Err(error);
        }
        trust(&path, &stat, geteuid().as_raw())?;
        Ok(file.into())
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.folder)
    }
}

/// Why something could not be opened: it is of another kind than `wanted`, or another user's, or what the system says.
fn refusal(
    parent: BorrowedFd<'_>,
    name: &Path,
    path: PathBuf,
    wanted: FileType,
    error: Errno,
) -> TuningError {
    let found = |stat| {
        let untrusted = || trust(&path, &stat, geteuid().as_raw()).err();
        wrong_kind(&path, &stat, wanted).or_else(untrusted)
    };
    let found = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok().and_then(found);
    found.unwrap_or_else(|| io_error("open", &path)(error.into()))
}

/// The error if it is of another kind than `wanted`.
fn wrong_kind(path: &Path, stat: &Stat, wanted: FileType) -> Option<TuningError> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let name = |kind| match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a folder",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "something else",
    };
    (kind != wanted).then(|| TuningError::Kind { path: path.into(), found: name(kind), wanted: name(wanted) })
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

/// Whether only `user` can use it.
fn private(path: &Path, stat: &Stat, user: u32) -> Result<(), TuningError> {
    const OTHERS_USE: u32 = 0o077;
    let (owner, mode) = (stat.st_uid, stat.st_mode & 0o7777);
    if owner != user {
        return Err(TuningError::Owner { path: path.into(), owner, user });
    }
    if mode & OTHERS_USE != 0 {
        return Err(TuningError::Shared { path: path.into(), mode });
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

    #[test]
    fn only_what_the_user_alone_can_use_is_private() {
        let said = |owner, mode| {
            let mut stat = fstat(File::open("/").unwrap()).unwrap();
            (stat.st_uid, stat.st_mode) = (owner, mode);
            private(Path::new("/cache"), &stat, 1000).err().map(|error| error.to_string())
        };
        assert_eq!([said(1000, 0o40700), said(1000, 0o100600)], [None, None]);
        let shared = "others may use /cache (its mode is 0755): `chmod go=` it";
        assert_eq!(said(1000, 0o40755).unwrap(), shared);
        assert!(said(1000, 0o40710).is_some() && said(1000, 0o100604).is_some());
        assert!(said(0, 0o40700).unwrap().contains("belongs to user 0"));
    }
}
