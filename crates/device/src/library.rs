//! Opening libraries that may be missing.
//!
//! Neither CUDA nor UCX is linked: a program that uses this crate starts on any machine. A [`Library`] is looked for
//!
//! 1. at the path in its variable (`ANTIPHON_NVRTC`, `ANTIPHON_NVJITLINK`, `ANTIPHON_NCCL`, `ANTIPHON_NVSHMEM`, `ANTIPHON_UCX`; a file,
//!    or the folder it is in). A variable that names nothing usable is an error, not a hint;
//! 2. in this process, where PyTorch may have loaded it already;
//! 3. where the dynamic loader looks: `LD_LIBRARY_PATH`, then the system's folders;
//! 4. among the packages of Python, where pip puts `nvidia-cuda-nvrtc`, `nvidia-nvjitlink`, `nvidia-nccl`, `nvidia-nvshmem` and
//!    `libucx`: of the Python that this process is, then of `VIRTUAL_ENV`, `CONDA_PREFIX`, the `python3` in `PATH`, and the user's own;
//! 5. where it is usually installed beside the system: a CUDA toolkit, HPC-X.
//!
//! The CUDA driver's own libraries, libcuda and libnvidia-ml, come with the kernel module. They are looked for only where the dynamic
//! loader looks.

use std::{
    env,
    ffi::OsString,
    fs,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

/// A library to look for.
#[derive(Debug)]
pub struct Wanted {
    /// What the library is, for error texts.
    pub what: &'static str,
    /// The variable with its path.
    pub variable: Option<&'static str>,
    /// The file's names, the preferred one first.
    pub names: &'static [&'static str],
    /// Folders inside Python's site-packages.
    pub packages: &'static [&'static str],
    /// Where it may be installed: paths, or variables that begin with `$` and hold one.
    pub roots: &'static [&'static str],
    /// Folders inside those.
    pub folders: &'static [&'static str],
    /// How the names begin of libraries in the same folder that it opens by name while it works, and would not find.
    pub companions: Option<&'static str>,
    /// The remedy if the library is missing.
    pub install: &'static str,
}

/// A library that is opened at run time cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It is not there.
    #[error("no {library}: {install} (looked for {searched})")]
    Missing {
        /// What the library is.
        library: &'static str,
        /// What to install, or which variable to set.
        install: &'static str,
        /// Where it was looked for, with the loader's words.
        searched: String,
    },
    /// It was opened, but lacks a function: it is another library, or a much older one.
    #[error("{path} has no function {symbol}: it is not a {library} that this program can use")]
    Symbol {
        /// What the library should be.
        library: &'static str,
        /// The file that was opened.
        path: PathBuf,
        /// The function that it lacks.
        symbol: &'static str,
    },
}

/// An open library. It stays open until the process ends: closing what has threads and exit handlers is asking
/// for trouble.
#[derive(Debug)]
pub struct Library {
    what: &'static str,
    path: PathBuf,
    handle: ManuallyDrop<Handle>,
}

impl Library {
    /// Opens a library, looking where [the module's page](self) says.
    ///
    /// # Errors
    /// [`LibraryError::Missing`].
    pub fn open(wanted: &Wanted) -> Result<Self, LibraryError> {
        Self::open_with(wanted, |name| env::var_os(name))
    }

    /// Opens the file of `wanted` at this path, or in this folder.
    ///
    /// # Errors
    /// [`LibraryError::Missing`].
    pub fn open_at(wanted: &Wanted, path: &Path) -> Result<Self, LibraryError> {
        let files: Vec<PathBuf> = match path.is_dir() {
            true => wanted.names.iter().map(|name| path.join(name)).collect(),
            false => vec![path.to_owned()],
        };
        first(wanted, files)
    }

    fn open_with(wanted: &Wanted, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, LibraryError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let Some(path) = wanted.variable.and_then(&variable) {
            return Self::open_at(wanted, Path::new(&path));
        }
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if let Some(Ok(library)) = loaded(&maps, wanted.names).map(|file| first(wanted, [file])) {
            return Ok(library);
        }
        let found = first(wanted, wanted.names.iter().map(PathBuf::from));
        let Err(LibraryError::Missing { mut searched, library, install }) = found else { return found };

        if !wanted.packages.is_empty() {
            let folders = site_packages(&maps, variable)
                .into_iter()
                .flat_map(|site| wanted.packages.iter().map(move |package| site.join(package)))
                .chain(installations(wanted, &variable));
            let files: Vec<PathBuf> = folders
                .flat_map(|folder| wanted.names.iter().map(move |name| folder.join(name)))
                .filter(|file| file.exists())
                .collect();
            if !files.is_empty() {
                return first(wanted, files);
            }
            let roots = wanted.roots.join(", ");
            searched.push_str(&format!("; not among Python's packages nor in {roots} either"));
        }
        Err(LibraryError::Missing { library, install, searched })
    }

    /// The file, or the name that the dynamic loader found it by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the file, for what lies beside it, if the system tells.
    pub fn folder(&self) -> Option<PathBuf> {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let name = self.path.file_name()?.to_str()?;
        // A path may be a link to where the file lies alone.
        let beside = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        beside.map(Path::to_owned).or_else(|| loaded(&maps, &[name])?.parent().map(Path::to_owned))
    }

    /// A function of the library.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`].
    ///
    /// # Safety
    /// `F` is the function's type, a function pointer.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, LibraryError> {
        // SAFETY: passed on to the caller.
        match unsafe { self.handle.get::<F>(symbol) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(LibraryError::Symbol { library: self.what, path: self.path.clone(), symbol }),
        }
    }
}

/// The first that opens.
fn first(wanted: &Wanted, candidates: impl IntoIterator<Item = PathBuf>) -> Result<Library, LibraryError> {
    let mut searched = Vec::new();
    for path in candidates {
        // SAFETY: the libraries of NVIDIA and UCX have no initialiser that depends on this program's state; what the variable
        // names is the user's responsibility, as with LD_LIBRARY_PATH.
        match unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(handle) => {
                wanted.companions.iter().for_each(|name| open_companions(&path, name));
                return Ok(Library { what: wanted.what, path, handle: ManuallyDrop::new(handle) });
            }
            Err(error) => searched.push(reason(&path, &error)),
        }
    }
    Err(LibraryError::Missing {
        library: wanted.what,
        install: wanted.install,
        searched: searched.join("; "),
    })
}

/// Opens, for good, the files beside a library whose names begin like this: the loader then finds them by name.
fn open_companions(library: &Path, prefix: &str) {
    let Some(folder) = library.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return };
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        if file.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            // SAFETY: as for the library itself. One that does not open is for the library to complain about.
            std::mem::forget(unsafe { Handle::open(Some(file.path()), RTLD_NOW | RTLD_LOCAL) });
        }
    }
}

/// The file of a library that is loaded in this process; `maps` is /proc/self/maps.
fn loaded(maps: &str, names: &[&str]) -> Option<PathBuf> {
    let is_it = |path: &Path| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        names.iter().any(|wanted| name.starts_with(wanted.as_bytes()))
    };
    maps.lines().filter_map(path_in_map).find(|path| is_it(path)).map(Path::to_owned)
}

/// The file of a line of /proc/self/maps.
fn path_in_map(line: &str) -> Option<&Path> {
    line.find('/').map(|from| Path::new(&line[from..]))
}

/// The loader's words, which begin with the path in most cases.
fn reason(path: &Path, error: &libloading::Error) -> String {
    let text =
        std::error::Error::source(error).map_or_else(|| error.to_string(), |source| source.to_string());
    let path = path.display().to_string();
    if text.contains(&path) { text } else { format!("{path}: {text}") }
}

/// The folders of Python's packages, each once, the likeliest first. `maps` is /proc/self/maps.
fn site_packages(maps: &str, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut add = |path: PathBuf| {
        if !found.contains(&path) {
            found.push(path);
        }
    };
    for path in maps.lines().filter_map(path_in_map) {
        let is_packages =
            |folder: &&Path| folder.ends_with("site-packages") || folder.ends_with("dist-packages");
        path.ancestors().filter(is_packages).for_each(|folder| add(folder.to_owned()));
    }
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name).map(PathBuf::from)).collect();
    // Not resolved: the python3 of a virtual environment is a link to another one's.
    let python = variable("PATH")
        .and_then(|path| env::split_paths(&path).map(|bin| bin.join("python3")).find(|file| file.exists()));
    if let Some(prefix) = python.as_deref().and_then(Path::parent).and_then(Path::parent) {
        prefixes.push(prefix.to_owned());
        prefixes.push(prefix.join("local"));
    }
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    for prefix in prefixes {
        let mut versions: Vec<PathBuf> =
            fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten().map(|e| e.path()).collect();
        versions.retain(|path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"python3"))
        });
        versions.sort();
        for version in versions.iter().rev() {
            for folder in ["site-packages", "dist-packages"] {
                if version.join(folder).is_dir() {
                    add(version.join(folder));
                }
            }
        }
    }
    found
}

/// The folders of what is installed beside the system.
fn installations(
    wanted: &Wanted,
    variable: impl Fn(&str) -> Option<OsString>,
) -> impl Iterator<Item = PathBuf> {
    let root = |root: &&str| match root.strip_prefix('$') {
        Some(name) => variable(name).map(PathBuf::from),
        None => Some(PathBuf::from(*root)),
    };
    let roots: Vec<PathBuf> = wanted.roots.iter().filter_map(root).collect();
    roots.into_iter().flat_map(|root| wanted.folders.iter().map(move |folder| root.join(folder)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Wanted = Wanted {
        what: "Nothing (libnothing)",
        variable: Some("ANTIPHON_NOTHING"),
        names: &["libantiphon-nothing.so.1"],
        packages: &["nvidia/nothing/lib"],
        roots: &["$NOTHING_HOME", "/usr/local/nothing"],
        folders: &["lib64", "lib"],
        companions: None,
        install: "there is nothing to install",
    };

    #[test]
    fn a_missing_library_is_named_with_what_to_install() {
        let error = Library::open_with(&NOTHING, |_| None).unwrap_err().to_string();
        assert!(error.starts_with("no Nothing (libnothing): there is nothing to install"), "{error}");
        assert!(error.contains("libantiphon-nothing.so.1: cannot open shared object file"), "{error}");
        assert!(error.contains("nor in $NOTHING_HOME, /usr/local/nothing either"), "{error}");
    }

    #[test]
    fn the_variable_is_an_order_and_not_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libantiphon-nothing.so.1");
        fs::write(&file, "not a library").unwrap();
        for path in [file.as_path(), folder.path()] {
            let variable = |name: &str| (name == "ANTIPHON_NOTHING").then(|| path.into());
            let error = Library::open_with(&NOTHING, variable).unwrap_err().to_string();
            assert!(error.contains(&format!("{}: file too short", file.display())), "{error}");
            assert!(!error.contains("Python"), "{error}");
        }
    }

    #[test]
    fn a_library_among_pythons_packages_is_found() {
        let root = tempfile::tempdir().unwrap();
        let site = root.path().join("lib/python3.12/site-packages");
        fs::create_dir_all(site.join("nvidia/nothing/lib")).unwrap();
        let file = site.join("nvidia/nothing/lib/libantiphon-nothing.so.1");
        fs::write(&file, "not a library, but found").unwrap();
        let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| root.path().into());
        let error = Library::open_with(&NOTHING, variable).unwrap_err().to_string();
        assert!(error.contains(&file.display().to_string()), "{error}");
    }

    #[test]
    fn what_is_loaded_in_the_process_tells_where_to_look() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 42   /opt/env/lib/python3.11/site-packages/torch/lib/libc10.so\n\
                    7f01-7f02 rw-p 00000000 00:00 0 \n\
                    7f03-7f04 r-xp 00000000 08:01 43   /usr/local/cuda/lib64/libnvrtc.so.13.0.88\n";
        let maps = maps.repeat(2);
        assert_eq!(site_packages(&maps, |_| None), [Path::new("/opt/env/lib/python3.11/site-packages")]);
        let nvrtc = Path::new("/usr/local/cuda/lib64/libnvrtc.so.13.0.88");
        assert_eq!(loaded(&maps, &["libnvrtc.so.13", "libnvrtc.so.12"]).as_deref(), Some(nvrtc));
        assert_eq!(loaded(&maps, &["libnccl.so.2"]), None);
    }

    #[test]
    fn a_library_of_an_installation_is_found() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("lib")).unwrap();
        let file = root.path().join("lib/libantiphon-nothing.so.1");
        fs::write(&file, "not a library, but found").unwrap();
        let variable = |name: &str| (name == "NOTHING_HOME").then(|| root.path().into());
        let error = Library::open_with(&NOTHING, variable).unwrap_err().to_string();
        assert!(error.contains(&file.display().to_string()), "{error}");
    }

    #[test]
    fn a_function_that_is_not_there_is_named_with_its_file() {
        let libc = Wanted { names: &["libc.so.6"], ..NOTHING };
        let library = Library::open_with(&libc, |_| None).unwrap();
        // SAFETY: getpid takes nothing and returns a pid_t.
        let getpid: extern "C" fn() -> i32 = unsafe { library.function("getpid") }.unwrap();
        assert_eq!(getpid() as u32, std::process::id());
        // SAFETY: never called.
        let missing = unsafe { library.function::<extern "C" fn()>("antiphon_nothing") };
        let error = missing.unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no function antiphon_nothing"), "{error}");
    }
}
