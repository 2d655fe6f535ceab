//! The disassembler: nvdisasm, found and run.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use crate::{
    Kernel, MachineCode,
    cubin::{self, Cubin, Text},
};

const TOOL: &str = "nvdisasm";

/// nvdisasm, ready to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disassembler {
    path: PathBuf,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SassError {
    /// There is no disassembler.
    #[error(
        "no nvdisasm: `pip install nvidia-cuda-nvdisasm`, or install the CUDA toolkit (looked at {searched})"
    )]
    MissingTool {
        /// Where it was looked for.
        searched: String,
    },
    /// A file that is not a cubin of the kind that is understood.
    #[error("cubin {index} is {reason}")]
    NotMachineCode {
        /// Which of the files.
        index: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A name that no kernel has.
    #[error("no kernel {name} among: {names}")]
    NoSuchKernel {
        /// The name.
        name: String,
        /// The names that there are.
        names: String,
    },
    /// The disassembler failed.
    #[error("{tool} failed for sm_{architecture}: {message}")]
    Tool {
        /// Its file.
        tool: PathBuf,
        /// For which architecture.
        architecture: u32,
        /// What it says.
        message: String,
    },
    /// A temporary file or a process could not be made.
    #[error("nvdisasm cannot be run: {0}")]
    Io(#[from] std::io::Error),
}

impl Disassembler {
    /// Looks for nvdisasm: the file in `ANTIPHON_NVDISASM`; among the packages of `VIRTUAL_ENV`, and of this
    /// workspace's `.venv`; in `PATH`; in a CUDA toolkit.
    ///
    /// # Errors
    /// [`SassError::MissingTool`].
    pub fn find() -> Result<Self, SassError> {
        if let Some(path) = env::var_os("ANTIPHON_NVDISASM") {
            return Self::first(vec![path.into()]);
        }
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
        let environments = env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().chain([workspace]);
        let packaged = environments.flat_map(|environment| {
            let versions = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
            versions.map(|version| version.path().join("site-packages/nvidia/cu13/bin"))
        });
        let in_path = env::var_os("PATH").unwrap_or_default();
        let folders = packaged.chain(env::split_paths(&in_path)).chain(["/usr/local/cuda/bin".into()]);
        Self::first(folders.map(|folder| folder.join(TOOL)).collect())
    }

    fn first(candidates: Vec<PathBuf>) -> Result<Self, SassError> {
        match candidates.iter().find(|path| path.is_file()) {
            Some(path) => Ok(Self { path: path.clone() }),
            None => {
                let searched: Vec<String> =
                    candidates.iter().map(|path| path.display().to_string()).collect();
                Err(SassError::MissingTool { searched: searched.join(", ") })
            }
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes cubins apart, in their order. Sixty of them take a few seconds: nvdisasm is run once for each
    /// architecture, on the code of all kernels in a row.
    ///
    /// # Errors
    /// [`SassError`].
    pub fn read(&self, cubins: &[impl AsRef<[u8]>]) -> Result<Vec<MachineCode>, SassError> {
        let open = |(index, cubin)| {
            let reason = |reason| SassError::NotMachineCode { index, reason };
            cubin::read(AsRef::as_ref(cubin)).map_err(reason)
        };
        let cubins: Vec<Cubin<'_>> = cubins.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let architectures: BTreeSet<u32> = cubins.iter().map(|cubin| cubin.architecture).collect();
        let listings = thread::scope(|scope| {
            let runs: Vec<_> = architectures
                .iter()
                .map(|&architecture| {
                    let of_it = cubins.iter().filter(move |cubin| cubin.architecture == architecture);
                    let code = of_it.flat_map(|cubin| &cubin.kernels).flat_map(|kernel| kernel.code);
                    let code: Vec<u8> = code.copied().collect();
                    (architecture, scope.spawn(move || self.list(architecture, &code)))
                })
                .collect();
            let joined = runs.into_iter().map(|(architecture, run)| {
                let listing = run.join().expect("reading a listing does not panic")?;
                Ok((architecture, listing))
            });
            joined.collect::<Result<BTreeMap<_, _>, SassError>>()
        })?;
        let mut rests: BTreeMap<u32, &[String]> =
            listings.iter().map(|(&architecture, listing)| (architecture, &listing[..])).collect();
        Ok(cubins
            .iter()
            .map(|cubin| {
                let rest = rests.get_mut(&cubin.architecture).expect("every architecture has a listing");
                let kernels = cubin.kernels.iter().map(|kernel| count(kernel, rest)).collect();
                MachineCode { architecture: cubin.architecture, kernels }
            })
            .collect())
    }

    /// The instructions of raw code, one by one, without their operands.
    fn list(&self, architecture: u32, code: &[u8]) -> Result<Vec<String>, SassError> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), code)?;
        // Kernels for Hopper and newer GPUs are compiled with the features that only this very architecture has.
        let specific = if architecture >= 90 { "a" } else { "" };
        let output = Command::new(&self.path)
            .args(["-ndf", "--binary", &format!("SM{architecture}{specific}")])
            .arg(file.path())
            .output()?;
        let failed = |message: String| SassError::Tool { tool: self.path.clone(), architecture, message };
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let listing = String::from_utf8_lossy(&output.stdout);
        let instructions: Vec<String> = listing.lines().filter_map(instruction).map(str::to_owned).collect();
        let expected = code.len() / INSTRUCTION_BYTES;
        match instructions.len() == expected {
            true => Ok(instructions),
            false => Err(failed(format!("{} instructions listed instead of {expected}", instructions.len()))),
        }
    }
}

/// Since Volta.
const INSTRUCTION_BYTES: usize = 16;

/// Counts a kernel's instructions, which are the next of a listing.
fn count(kernel: &Text<'_>, rest: &mut &[String]) -> Kernel {
    let (its, others) = rest.split_at(kernel.code.len() / INSTRUCTION_BYTES);
    *rest = others;
    let mut instructions = BTreeMap::new();
    its.iter().for_each(|words| *instructions.entry(words.clone()).or_default() += 1);
    let Text { name, registers, local_bytes, shared_bytes, .. } = *kernel;
    Kernel { name: name.to_owned(), registers, local_bytes, shared_bytes, instructions }
}

/// The opcode with its modifiers of a line such as `/*0030*/  @!P0 LDG.E.128 R4, [R2.64] ;`.
fn instruction(line: &str) -> Option<&str> {
    let (offset, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    u64::from_str_radix(offset, 16).ok()?;
    rest.split([' ', '\t', ';']).find(|word| !word.is_empty() && !word.starts_with('@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_what_stands_behind_its_offset_and_predicate() {
        let cases = [
            ("        /*0030*/              @!P0 LDG.E.128 R4, [R2.64] ;", Some("LDG.E.128")),
            ("        /*10a0*/                   EXIT ;", Some("EXIT")),
            ("        /*10b0*/                   NOP;", Some("NOP")),
            ("\t.headerflags\t@\"EF_CUDA_SM90\"", None),
            ("/* a comment */ NOP", None),
            ("", None),
        ];
        for (line, expected) in cases {
            assert_eq!(instruction(line), expected, "{line}");
        }
    }

    #[test]
    fn a_tool_that_is_not_there_is_said_with_where_it_was_sought() {
        let error = Disassembler::first(vec!["/nowhere/nvdisasm".into()]).unwrap_err().to_string();
        assert!(error.contains("pip install nvidia-cuda-nvdisasm"), "{error}");
        assert!(error.contains("/nowhere/nvdisasm"), "{error}");
    }
}
