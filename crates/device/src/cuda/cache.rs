//! Machine code that outlives a process.
//!
//! One file per program, named by the SHA-256 of everything that went into it (source, options, NVRTC's version,
//! architecture, the device library that it is linked with), so an entry is never out of date. A file contains its key, its length
//! and a checksum. It is written under another name and then renamed, so a reader sees a whole file or none, and
//! several writers write the same bytes. A truncated or corrupt file is compiled again and
//! replaced. A GPU executes these files, so the cache does not use a file or folder that another user may have written, and
//! warns of it.

use std::path::{Path, PathBuf};

use antiphon_tuning::{CacheFolder, warn_once};
use sha2::{Digest, Sha256};

use super::{CudaError, DeviceLibrary, NvJitLink, Nvrtc, Program};

/// The beginning of a file: the format, then the key, the checksum and the length of the code.
const MAGIC: &[u8; 8] = b"ANTIPHK1";
const HEADER: usize = 8 + 32 + 32 + 8;
/// The largest file that is read. The largest kernels take some hundred KB.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Where in the library's cache folder.
const FOLDER: &str = "kernels";

/// A folder of compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelCache {
    /// The folder, or the reason why there is none.
    folder: Result<PathBuf, String>,
    /// Whether the folder around it is this library's too, and must be trusted alike.
    is_inner: bool,
}

/// A program's machine code, ready to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The code.
    pub bytes: Vec<u8>,
    /// Where it is from.
    pub origin: Origin,
}

/// Where machine code is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Loaded from the cache.
    Cached,
    /// Compiled, and now in the cache.
    Compiled,
    /// Compiled, but not stored, for this reason; the next process compiles it again.
    NotStored(String),
}

impl KernelCache {
    /// The user's cache: `kernels` in [the library's cache folder](antiphon_tuning::cache_dir). Without a folder that
    /// [can be trusted](CacheFolder) everything is compiled every time.
    pub fn open() -> Self {
        let folder = antiphon_tuning::cache_dir().map(|folder| folder.join(FOLDER));
        Self { folder: folder.map_err(|error| error.to_string()), is_inner: true }
    }

    /// A cache in this folder, which is created when something is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Ok(folder.into()), is_inner: false }
    }

    /// The folder, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref().ok()
    }

    /// The program's machine code, from the cache or compiled now. A cache that cannot be used is no error:
    /// [`Cubin::origin`] says what was wrong with it.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`].
    pub fn compile(&self, nvrtc: &Nvrtc, program: &Program) -> Result<Cubin, CudaError> {
        self.get_or_make(program.key(nvrtc.version()), || Ok(nvrtc.compile(program)?.cubin))
    }

    /// The machine code of a [relocatable](Program::relocatable) program that is linked with a device library, from the cache or made
    /// now. The key has the content of the library too.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`] and [`NvJitLink::link`].
    pub fn link(
        &self,
        (nvrtc, linker): (&Nvrtc, &NvJitLink),
        program: &Program,
        library: &DeviceLibrary,
    ) -> Result<Cubin, CudaError> {
        let mut hash = Sha256::new_with_prefix(program.key(nvrtc.version()));
        hash.update(format!("nvJitLink {}", linker.version()));
        hash.update(library.digest());
        self.get_or_make(hash.finalize().into(), || {
            linker.link(program, &nvrtc.compile(program)?.cubin, library)
        })
    }

    fn get_or_make<E>(&self, key: [u8; 32], make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Cubin, E> {
        let name = file_name(&key);
        let folder = self.open_folder();
        match folder.as_ref().map(|folder| folder.read(&name, MAX_FILE_BYTES)) {
            Ok(Ok(Some(file))) => {
                if let Some(bytes) = open(file, &key) {
                    return Ok(Cubin { bytes, origin: Origin::Cached });
                }
            }
            Ok(Ok(None)) => {}
            Ok(Err(why)) => warn_once(&format!("a compiled kernel is not used: {why}")),
            Err(why) => warn_once(&format!("compiled kernels are not kept: {why}")),
        }
        let bytes = make()?;
        let stored = folder
            .and_then(|folder| folder.replace(&name, &contents(&key, &bytes)).map_err(|why| why.to_string()));
        let origin = stored.map_or_else(Origin::NotStored, |()| Origin::Compiled);
        Ok(Cubin { bytes, origin })
    }

    /// The folder, created if it does not exist; or why it cannot be used.
    fn open_folder(&self) -> Result<CacheFolder, String> {
        let path = self.folder.clone()?;
        let opened = match path.parent() {
            Some(parent) if self.is_inner => {
                CacheFolder::create(parent).and_then(|parent| parent.subfolder(FOLDER))
            }
            _ => CacheFolder::create(&path),
        };
        opened.map_err(|why| why.to_string())
    }
}

fn file_name(key: &[u8; 32]) -> String {
    let mut name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    name.push_str(".cubin");
    name
}

/// The code of a file, if the file is what it should be.
fn open(mut file: Vec<u8>, key: &[u8; 32]) -> Option<Vec<u8>> {
    let (header, code) = file.split_at_checked(HEADER)?;
    let (magic, header) = header.split_at(8);
    let (its_key, header) = header.split_at(32);
    let (checksum, len) = header.split_at(32);
    let right = magic == MAGIC
        && its_key == key
        && len == (code.len() as u64).to_le_bytes()
        && checksum == Sha256::digest(code).as_slice();
    right.then(|| {
        file.drain(..HEADER);
        file
    })
}

/// The content of a file with this code.
fn contents(key: &[u8; 32], code: &[u8]) -> Vec<u8> {
    let mut contents = Vec::with_capacity(HEADER + code.len());
    contents.extend_from_slice(MAGIC);
    contents.extend_from_slice(key);
    contents.extend_from_slice(&Sha256::digest(code));
    contents.extend_from_slice(&(code.len() as u64).to_le_bytes());
    contents.extend_from_slice(code);
    contents
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{convert::Infallible, fs, os::unix::fs::PermissionsExt};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    const KEY: [u8; 32] = [7; 32];

    fn get(cache: &KernelCache, key: [u8; 32], code: &[u8]) -> Cubin {
        cache.get_or_make(key, || Ok::<_, Infallible>(code.to_vec())).unwrap()
    }

    #[test]
    fn what_was_compiled_once_is_not_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path().join("new"));
        assert_eq!(get(&cache, KEY, b"code").origin, Origin::Compiled);
        let again = get(&cache, KEY, b"never made");
        assert_eq!((&again.bytes[..], again.origin), (&b"code"[..], Origin::Cached));
        assert_eq!(get(&cache, [8; 32], b"other").origin, Origin::Compiled);
        let files: Vec<_> = fs::read_dir(folder.path().join("new")).unwrap().collect();
        assert_eq!(files.len(), 2, "temporary files were left: {files:?}");
    }

    #[test]
    fn what_is_corrupt_or_truncated_in_any_byte_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
        get(&cache, KEY, b"code");
        let path = folder.path().join(file_name(&KEY));
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut flipped = good.clone();
            flipped[at] ^= 0x10;
            for bad in [&flipped[..], &good[..at]] {
                fs::write(&path, bad).unwrap();
                let cubin = get(&cache, KEY, b"code");
                assert_eq!(
                    (&cubin.bytes[..], cubin.origin),
                    (&b"code"[..], Origin::Compiled),
                    "at byte {at}"
                );
                assert_eq!(fs::read(&path).unwrap(), good);
            }
        }
        // A whole and valid file, but of another program.
        get(&cache, [8; 32], b"other");
        fs::copy(folder.path().join(file_name(&[8; 32])), &path).unwrap();
        assert_eq!(get(&cache, KEY, b"code").bytes, b"code");
    }

    #[test]
    fn writers_and_readers_at_once_see_whole_files() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
        let code: Vec<u8> = (0..100_000u32).map(|index| index as u8).collect();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (cache, code) = (&cache, &code);
                scope.spawn(move || {
                    for round in 0..20u8 {
                        let cubin = get(cache, [round; 32], code);
                        assert_eq!(&cubin.bytes, code, "thread {thread}");
                        assert!(!matches!(cubin.origin, Origin::NotStored(_)), "{:?}", cubin.origin);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 20);
    }

    #[test]
    fn a_cache_that_cannot_be_written_says_so_and_does_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let cubin = get(&KernelCache::at(file.join("kernels")), KEY, b"code");
        assert_eq!(cubin.bytes, b"code");
        assert!(
            matches!(&cubin.origin, Origin::NotStored(why) if why.contains("Not a directory")),
            "{cubin:?}"
        );
        let cubin = get(&KernelCache { folder: Err("no folder".into()), is_inner: true }, KEY, b"code");
        assert_eq!(cubin.origin, Origin::NotStored("no folder".into()));
    }

    #[test]
    fn what_others_may_have_put_there_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = folder.path().join("kernels");
        let cache = KernelCache::at(&kernels);
        get(&cache, KEY, b"code");
        let path = kernels.join(file_name(&KEY));
        let elsewhere = folder.path().join("elsewhere");
        let plant = |what: &dyn Fn()| {
            fs::rename(&path, &elsewhere).unwrap();
            what();
            let cubin = get(&cache, KEY, b"fresh");
            assert_eq!((&cubin.bytes[..], &cubin.origin), (&b"fresh"[..], &Origin::Compiled));
            assert_eq!(get(&cache, KEY, b"never made").origin, Origin::Cached);
            assert!(fs::symlink_metadata(&path).unwrap().is_file());
        };
        plant(&|| std::os::unix::fs::symlink(&elsewhere, &path).unwrap());
        plant(&|| mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap());
        plant(&|| fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap());
        plant(&|| {
            fs::copy(&elsewhere, &path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        });
        // And the folder itself, and the one around it.
        let inner = KernelCache { folder: Ok(kernels.clone()), is_inner: true };
        for (cache, open) in
            [(&cache, kernels.as_path()), (&inner, kernels.as_path()), (&inner, folder.path())]
        {
            for mode in [0o777, 0o770] {
                fs::set_permissions(open, fs::Permissions::from_mode(mode)).unwrap();
                let cubin = get(cache, KEY, b"fresh");
                let named = format!("others may write {} ", open.display());
                assert!(matches!(&cubin.origin, Origin::NotStored(why) if why.contains(&named)), "{cubin:?}");
            }
            fs::set_permissions(open, fs::Permissions::from_mode(0o700)).unwrap();
        }
        assert_eq!(get(&inner, KEY, b"never made").origin, Origin::Cached);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&kernels, &link).unwrap();
        for link in [link.clone(), link.join("")] {
            let cubin = get(&KernelCache::at(link), KEY, b"fresh");
            assert!(
                matches!(&cubin.origin, Origin::NotStored(why) if why.contains("is a symbolic link")),
                "{cubin:?}"
            );
        }
    }
}
