//! The secret of ranks whose environment has none: random bytes in a file that only their user can read.

use std::{
    fs::{DirBuilder, File},
    io::{Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    io::Errno,
};

use super::{PATIENCE, RETRY, RendezvousError, Secret, secret::random_hex};

/// In which file of its folder.
const FILE: &str = "secret";
/// How long the file is: 32 bytes in hexadecimal.
const LENGTH: usize = 64;

/// The secret of this process's user on this machine, made by the first process that needs it: in the cache folder, or, if that cannot
/// be used, in a folder of the user's among the temporary files.
///
/// # Errors
/// [`RendezvousError::UserSecret`] with the file and what is wrong with it.
pub(super) fn of_user() -> Result<Secret, RendezvousError> {
    let user = rustix::process::geteuid().as_raw();
    let temporary = std::env::temp_dir().join(format!("antiphon-{user}"));
    let folders = antiphon_tuning::cache_dir().ok().into_iter().chain([temporary]);
    first_usable(folders)
}

/// The secret in the first of the folders in which a file can be opened.
fn first_usable(folders: impl IntoIterator<Item = PathBuf>) -> Result<Secret, RendezvousError> {
    let mut failed = None;
    for folder in folders {
        let path = folder.join(FILE);
        match open(&folder, &path) {
            Ok(file) => return of_file(file, &path),
            Err(error) => drop(failed.get_or_insert(problem(&path, error.to_string()))),
        }
    }
    Err(failed.expect("at least one folder was tried"))
}

fn open(folder: &Path, path: &Path) -> std::io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // A symbolic link or a pipe that another process has put there is refused.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn of_file(mut file: File, path: &Path) -> Result<Secret, RendezvousError> {
    let failed = |error: std::io::Error| problem(path, error.to_string());
    let (metadata, user) = (file.metadata().map_err(failed)?, rustix::process::geteuid().as_raw());
    if !metadata.is_file() {
        return Err(problem(path, "it is not a file".into()));
    }
    if metadata.uid() != user {
        return Err(problem(path, format!("it belongs to user {}, and this is user {user}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(problem(
            path,
            format!("others may use it (mode {:03o}): remove it", metadata.mode() & 0o777),
        ));
    }
    lock(&file, path)?;
    let mut text = String::new();
    (&mut file).take(LENGTH as u64 + 1).read_to_string(&mut text).map_err(failed)?;
    if text.is_empty() {
        text = random_hex();
        file.write_all(text.as_bytes()).map_err(failed)?;
    }
    match text.len() == LENGTH && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => Ok(Secret::new(text)),
        false => Err(problem(path, format!("it is not {LENGTH} hexadecimal digits: remove it"))),
    }
}

/// Locks the file until it is closed, so that no process reads it before it is complete.
fn lock(file: &File, path: &Path) -> Result<(), RendezvousError> {
    let start = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::AGAIN | Errno::INTR) if start.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Err(Errno::AGAIN) => {
                return Err(problem(path, format!("another process has locked it for {PATIENCE:?}")));
            }
            Err(error) => return Err(problem(path, error.to_string())),
        }
    }
}

fn problem(path: &Path, problem: String) -> RendezvousError {
    RendezvousError::UserSecret { path: path.into(), problem }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    fn of(folder: &Path) -> Result<Secret, RendezvousError> {
        first_usable([folder.to_owned()])
    }

    #[test]
    fn concurrent_callers_get_the_same_random_secret() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("not/there/yet");
        let secrets: Vec<Secret> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| of(&inner).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        assert_eq!(std::fs::metadata(inner.join(FILE)).unwrap().mode() & 0o777, 0o600);
        assert_ne!(secrets[0], of(folder.path()).unwrap(), "another folder has another one");
    }

    #[test]
    fn a_file_that_is_not_the_users_alone_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let told = || of(folder.path()).unwrap_err().to_string();
        std::fs::write(&path, random_hex()).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(told().contains("mode 640"), "{}", told());

        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        of(folder.path()).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(told().contains("not 64 hexadecimal digits"), "{}", told());
        assert_eq!(std::fs::read(&path).unwrap(), b"short", "it is left alone");

        std::fs::remove_file(&path).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert!(told().contains("symbolic link"), "{}", told());
        assert!(!folder.path().join("elsewhere").exists());

        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(told().contains("it is not a file"), "{}", told());
    }

    #[test]
    fn a_folder_of_no_use_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let good = folder.path().join("good");
        assert_eq!(first_usable([file.clone(), good.clone()]).unwrap(), of(&good).unwrap());
        assert!(matches!(of(&file), Err(RendezvousError::UserSecret { .. })));
    }
}
