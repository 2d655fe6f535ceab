//! NVRTC without a GPU: what the kernels are compiled to, and what is said when they are not.

use std::{path::PathBuf, process::Command, time::Instant};

use antiphon_device::cuda::{Architecture, CudaError, KernelCache, Origin, Program};

use crate::{nvrtc, packages, skip};

const PRELUDE_USE: &str = include_str!("kernels/prelude_use.cu");
const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

#[test]
fn the_prelude_compiles_without_warnings_for_every_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    for architecture in ARCHITECTURES {
        let start = Instant::now();
        let compiled = nvrtc.compile(&Program::new("prelude_use.cu", PRELUDE_USE, architecture)).unwrap();
        eprintln!("{architecture}: {} bytes in {:?}", compiled.cubin.len(), start.elapsed());
        assert_eq!(compiled.log, "", "{architecture}");
        assert_eq!(&compiled.cubin[..4], b"\x7FELF", "{architecture}");
    }
}

#[test]
fn the_tests_kernels_compile_without_warnings_too() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = [
        ("conversions.cu", crate::conversions::SOURCE),
        ("launch.cu", crate::launch::SOURCE),
        ("reductions.cu", crate::reductions::SOURCE),
        ("waiting.cu", crate::waiting::SOURCE),
    ];
    for (name, source) in sources {
        for architecture in ARCHITECTURES {
            let program = Program::new(name, source, architecture);
            assert_eq!(nvrtc.compile(&program).unwrap().log, "", "{name} for {architecture}");
            if source == crate::conversions::SOURCE {
                let software = program.define("ANTIPHON_SOFTWARE_FLOATS", 1);
                assert_eq!(
                    nvrtc.compile(&software).unwrap().log,
                    "",
                    "{name} in software for {architecture}"
                );
            }
        }
    }
}

#[test]
fn an_error_has_the_compilers_words_with_the_line_in_the_kernels_own_file() {
    let Some(nvrtc) = nvrtc() else { return };
    let program = Program::new(
        "broken.cu",
        "extern \"C\" __global__ void f() {\n    nonsense();\n}\n",
        Architecture::SM_90A,
    );
    let error = nvrtc.compile(&program).unwrap_err();
    assert!(matches!(error, CudaError::Compile { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("NVRTC {} cannot compile broken.cu for sm_90a", nvrtc.version())),
        "{text}"
    );
    assert!(text.contains("broken.cu(2): error: identifier \"nonsense\" is undefined"), "{text}");

    let text = nvrtc.compile(&program.option("--no-such-option")).unwrap_err().to_string();
    assert!(text.contains("no-such-option"), "{text}");

    let nul = Program::new("nul.cu", "\0", Architecture::SM_90A);
    assert!(matches!(nvrtc.compile(&nul), Err(CudaError::Nul(_))));
}

#[test]
fn a_definition_reaches_the_kernel() {
    let Some(nvrtc) = nvrtc() else { return };
    let source = "static_assert(WORLD == 4 && sizeof(T) == 2, \"\");";
    let program = Program::new("definition.cu", source, Architecture::SM_80);
    assert!(nvrtc.compile(&program).is_err());
    assert!(nvrtc.compile(&program.define("WORLD", 4).define("T", "bf16")).is_ok());
}

#[test]
fn the_second_process_finds_what_the_first_compiled() {
    let Some(nvrtc) = nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = Program::new("tiny.cu", "extern \"C\" __global__ void tiny() {}", Architecture::SM_90A);
    let first = KernelCache::at(folder.path()).compile(nvrtc, &program).unwrap();
    let second = KernelCache::at(folder.path()).compile(nvrtc, &program).unwrap();
    assert_eq!((first.origin, second.origin), (Origin::Compiled, Origin::Cached));
    assert_eq!(first.bytes, second.bytes);
    let other = KernelCache::at(folder.path()).compile(nvrtc, &program.define("X", 1)).unwrap();
    assert_eq!(other.origin, Origin::Compiled);
}

#[test]
fn the_machine_code_of_the_prelude_is_what_was_meant() {
    let (Some(nvrtc), Some(nvdisasm)) = (nvrtc(), nvdisasm()) else { return };
    let compiled = nvrtc.compile(&Program::new("prelude_use.cu", PRELUDE_USE, Architecture::SM_90A)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prelude_use.cubin");
    std::fs::write(&file, compiled.cubin).unwrap();
    let output = Command::new(nvdisasm).arg("-c").arg(&file).output().unwrap();
    let code = String::from_utf8(output.stdout).unwrap();
    let section = |kernel: &str| {
        let start = code.find(&format!(".text.{kernel}:")).unwrap_or_else(|| panic!("no {kernel} in {code}"));
        let rest = &code[start..];
        rest[1..].find(".section").map_or(rest, |end| &rest[..end])
    };

    for instruction in ["LDL", "STL"] {
        assert!(!code.contains(&format!(" {instruction}")), "local memory is used:\n{code}");
    }
    let exchange = section("exchange");
    let meant = [
        "ACQBULK",                // griddepcontrol.wait
        "LDG.E.128.STRONG.SYS",   // load16_volatile
        "STG.E.128.STRONG.SYS",   // store16_volatile
        "MEMBAR.ALL.SYS",         // st_release_sys, fence_sys
        "STG.E.STRONG.SYS",       // ... and its store
        "LDG.E.STRONG.SYS",       // ld_acquire_sys
        "REDG.E.ADD.STRONG.SYS",  // red_add_release_sys
        "ATOMG.E.ADD.STRONG.GPU", // atom_add_acq_rel_gpu
        "ATOMG.E.CAS.STRONG.SYS", // the first report wins
    ];
    for instruction in meant {
        assert!(exchange.contains(instruction), "no {instruction} in:\n{exchange}");
    }
    let reduce = section("reduce_bf16");
    for instruction in ["LDG.E.128", "STG.E.128", "F2FP.BF16.F32.PACK_AB", "VIMNMX.S16x2"] {
        assert!(reduce.contains(instruction), "no {instruction} in:\n{reduce}");
    }
}

/// A disassembler: in PATH, or the one that comes with Triton, which comes with PyTorch.
fn nvdisasm() -> Option<PathBuf> {
    let in_path = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path).map(|folder| folder.join("nvdisasm")).find(|file| file.exists())
    });
    let triton = || {
        let file = packages()?.join("triton/backends/nvidia/bin/nvdisasm");
        file.exists().then_some(file)
    };
    in_path.or_else(triton).or_else(|| skip("nvdisasm", "it comes with the CUDA toolkit, and with Triton"))
}
