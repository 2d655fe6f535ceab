//! NVRTC without a GPU: what the kernels are compiled to, and what is said when they are not.

use std::time::Instant;

use antiphon_device::cuda::{Architecture, CudaError, KernelCache, Origin, Program};

use antiphon_testing::{nvrtc, sized};

pub(crate) const PRELUDE_USE: &str = include_str!("kernels/prelude_use.cu");
pub(crate) const ARCHITECTURES: [Architecture; 3] =
    [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

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
    let line = sized("broken.cu(2): error: identifier \"nonsense\" is undefined", "broken.cu:2:5: error: ");
    assert!(text.contains(line), "{text}");

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
