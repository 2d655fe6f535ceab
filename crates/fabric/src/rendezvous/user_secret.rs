//! The secret of ranks whose environment has none: random bytes in a file that only their user can read.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use antiphon_tuning::{CacheFolder, TuningError};
use rustix::{fs::FlockOperation, io::Errno};

use super::{PATIENCE, RETRY, RendezvousError, Secret, secret::random_hex};

/// In which file of its folder.
const FILE: &str = "secret";
/// How long the file is: 32 bytes in hexadecimal.
const LENGTH: usize = 64;

/// The secret of this process's user on this machine, made by the first process that needs it: in the cache folder, or, if there is
/// none and none can be made, in a folder of the user's among the temporary files.
///
/// # Errors
/// [`RendezvousError::UserSecret`] with the file or folder and what is wrong with it.
pub(super) fn of_user() -> Result<Secret, RendezvousError> {
    let user = rustix::process::geteuid().as_raw();
    let temporary = std::env::temp_dir().join(format!("antiphon-{user}"));
    let folders = antiphon_tuning::cache_dir().ok().into_iter().chain([temporary]);
    first_usable(folders)
}

/// The secret in the first of the folders that this user can have. Ranks that pass over different folders would have different
/// secrets, so what stands in a folder's or a file's place is an error and not passed over.
fn first_usable(folders: impl IntoIterator<Item = PathBuf>) -> Result<Secret, RendezvousError> {
    let mut failed = None;
    for folder in folders {
        let path = folder.join(FILE);
        match CacheFolder::create_private(&folder).and_then(|folder| folder.open_private(FILE)) {
            Ok(file) => return of_file(file, &path),
            Err(error) if is_passed_over(&error, &folder) => {
                failed.get_or_insert(problem(&path, error.to_string()));
            }
            Err(error) => return Err(problem(&path, error.to_string())),
        }
    }
    Err(failed.expect("at least one folder was tried"))
}

/// Whether a folder cannot have the secret, and nothing that another process put there is the reason: it cannot be created or
/// reached, or is on a file system that is only read, or root keeps it for all users.
fn is_passed_over(error: &TuningError, folder: &Path) -> bool {
    match error {
        TuningError::Io { source, .. } => {
            source.kind() == ErrorKind::ReadOnlyFilesystem || folder.symlink_metadata().is_err()
        }
        TuningError::Owner { path, owner: 0, .. } => path == folder,
        _ => false,
    }
}

fn of_file(mut file: File, path: &Path) -> Result<Secret, RendezvousError> {
    let failed = |error: std::io::Error| problem(path, error.to_string());
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

// Tests that need root ask antiphon-testing, which is empty under loom.
#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        fs::{Permissions, create_dir, metadata, remove_dir, remove_file, set_permissions},
        os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    };

    use antiphon_testing::{Need, need};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn private_folder() -> tempfile::TempDir {
        tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn of(folder: &Path) -> Result<Secret, RendezvousError> {
        first_usable([folder.to_owned()])
    }

    /// What is said of a folder, in front of one that would serve.
    fn refused(folder: &Path) -> String {
        let good = private_folder();
        let told = first_usable([folder.to_owned(), good.path().to_owned()]).unwrap_err().to_string();
        assert!(!good.path().join(FILE).exists(), "no other secret is made");
        told
    }

    #[test]
    fn concurrent_callers_get_the_same_random_secret() {
        let folder = private_folder();
        let inner = folder.path().join("not/there/yet");
        let secrets: Vec<Secret> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| of(&inner).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        assert_eq!(metadata(inner.join(FILE)).unwrap().mode() & 0o777, 0o600);
        assert_eq!(metadata(&inner).unwrap().mode() & 0o777, 0o700);
        assert_ne!(secrets[0], of(folder.path()).unwrap(), "another folder has another one");
    }

    #[test]
    fn what_stands_in_the_files_place_is_an_error_that_names_it() {
        let folder = private_folder();
        let path = folder.path().join(FILE);
        let told = |what: &str| {
            let told = refused(folder.path());
            assert!(told.contains(what) && told.contains(path.to_str().unwrap()), "{told}");
        };
        symlink("elsewhere", &path).unwrap();
        told("is a symbolic link");
        assert!(!folder.path().join("elsewhere").exists());

        remove_file(&path).unwrap();
        create_dir(&path).unwrap();
        told("is a folder");

        remove_dir(&path).unwrap();
        for (kind, name) in [(FileType::Fifo, "is a FIFO"), (FileType::Socket, "is a socket")] {
            mknodat(CWD, &path, kind, Mode::RUSR | Mode::WUSR, 0).unwrap();
            told(name);
            remove_file(&path).unwrap();
        }
    }

    #[test]
    fn a_file_that_is_not_the_users_alone_is_refused_and_left_alone() {
        let folder = private_folder();
        let path = folder.path().join(FILE);
        std::fs::write(&path, random_hex()).unwrap();
        for mode in [0o640, 0o604, 0o620] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let told = refused(folder.path());
            assert!(told.contains(&format!("mode is {mode:04o}")), "{told}");
        }
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        of(folder.path()).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(refused(folder.path()).contains("not 64 hexadecimal digits"));
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
    }

    #[test]
    fn a_folder_that_is_not_the_users_alone_is_refused_by_name() {
        let around = private_folder();
        let folder = around.path().join("folder");
        create_dir(&folder).unwrap();
        let told = |place: &Path, what: &str| {
            let told = refused(place);
            assert!(told.contains(what) && told.contains(place.to_str().unwrap()), "{told}");
            assert!(!folder.join(FILE).exists());
        };
        for mode in [0o755, 0o750, 0o777, 0o1777] {
            set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            told(&folder, &format!("mode is {mode:04o}): `chmod go=` it"));
        }
        set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        let link = around.path().join("link");
        symlink(&folder, &link).unwrap();
        told(&link, "is a symbolic link");
        let file = around.path().join("file");
        std::fs::write(&file, "").unwrap();
        told(&file, "is a regular file, not a folder");
    }

    #[test]
    fn a_folder_of_another_user_is_refused_by_name() {
        let folder = private_folder();
        let Some(()) = need(Need::Root, chown(folder.path(), Some(12_345), None)) else { return };
        assert!(refused(folder.path()).contains("belongs to user 12345"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_passed_over() {
        let folder = private_folder();
        let (nowhere, good) = (Path::new("/dev/null/cache").to_owned(), folder.path().join("good"));
        assert_eq!(first_usable([nowhere.clone(), good.clone()]).unwrap(), of(&good).unwrap());
        assert!(matches!(of(&nowhere), Err(RendezvousError::UserSecret { .. })));
    }

    #[test]
    fn folders_of_root_and_file_systems_that_are_only_read_are_passed_over() {
        let around = private_folder();
        let folder = around.path();
        let owned = |path: PathBuf, owner| TuningError::Owner { path, owner, user: 1000 };
        let io = |error: Errno| TuningError::Io { action: "open", path: folder.into(), source: error.into() };
        for error in [owned(folder.into(), 0), io(Errno::ROFS)] {
            assert!(is_passed_over(&error, folder), "{error}");
        }
        for error in [owned(folder.into(), 1001), owned(folder.join(FILE), 0), io(Errno::ACCESS)] {
            assert!(!is_passed_over(&error, folder), "{error}");
        }
    }
}
