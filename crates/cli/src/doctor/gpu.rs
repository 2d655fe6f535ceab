//! What there is for GPUs. Only looked for by name: nothing of a driver is loaded.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{env, os::unix::ffi::OsStrExt};

use super::Check;
use crate::machine::Files;

const DRIVER: &str = "libcuda.so.1";

/// Where a driver is even when the linker's cache does not list it.
const FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

pub(super) fn checks(files: &Files) -> Vec<Check> {
    let searched = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    vec![libcuda(find(files, &searched))]
}

fn libcuda(found: Option<PathBuf>) -> Check {
    const LATER: &str = "The CUDA backend is not part of this build yet: ranks use the processor.";
    match found {
        Some(path) => Check::ok("libcuda", format!("found: {}", path.display()), LATER),
        None => Check::missing("libcuda", "not found", LATER),
    }
}

/// The driver, in the order in which the dynamic linker would look.
fn find(files: &Files, library_path: &OsStr) -> Option<PathBuf> {
    let named = env::split_paths(library_path).filter(|folder| folder.is_absolute()).map(|f| f.join(DRIVER));
    let cached = cached(&files.bytes("etc/ld.so.cache").unwrap_or_default());
    let usual = FOLDERS.iter().map(|folder| Path::new(folder).join(DRIVER));
    named.chain(cached).chain(usual).find(|path| files.path(path).is_file())
}

/// The paths of the driver in the linker's cache. The file ends in a table of strings that end in NUL, of which
/// the paths are those that start with a slash.
fn cached(cache: &[u8]) -> Vec<PathBuf> {
    let strings = cache.split(|&byte| byte == 0).filter(|string| string.starts_with(b"/"));
    let paths = strings.map(|string| Path::new(OsStr::from_bytes(string)));
    paths.filter(|path| path.file_name() == Some(OsStr::new(DRIVER))).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(path: &str) -> (tempfile::TempDir, Files) {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::at(folder.path());
        let library = files.path(path);
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::write(library, "").unwrap();
        (folder, files)
    }

    #[test]
    fn the_library_path_the_cache_and_the_usual_folders_are_searched() {
        let (_folder, files) = fake("/opt/driver/libcuda.so.1");
        assert_eq!(find(&files, OsStr::new("")), None);
        let found = Some(PathBuf::from("/opt/driver/libcuda.so.1"));
        assert_eq!(find(&files, OsStr::new("relative:/elsewhere:/opt/driver")), found);
        std::fs::create_dir(files.path("etc")).unwrap();
        let cache =
            b"glibc-ld.so.cache1.1\x01\x00\x00libcuda.so.1\0/opt/driver/libcuda.so.1\0/lib/libc.so.6\0";
        std::fs::write(files.path("etc/ld.so.cache"), cache).unwrap();
        assert_eq!(find(&files, OsStr::new("")), found);

        let (_folder, files) = fake("/usr/lib64/libcuda.so.1");
        assert_eq!(find(&files, OsStr::new("")), Some("/usr/lib64/libcuda.so.1".into()));
    }

    #[test]
    fn a_stale_cache_entry_is_not_a_driver() {
        let (_folder, files) = fake("/etc/ld.so.cache");
        std::fs::write(files.path("etc/ld.so.cache"), b"\0/gone/libcuda.so.1\0").unwrap();
        assert_eq!(find(&files, OsStr::new("")), None);
    }
}
