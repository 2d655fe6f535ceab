//! What kernels are compiled to, without a GPU.

use antiphon_device::cuda::{Architecture, Program};
use antiphon_sass::{MachineCode, Rules};
use antiphon_testing::{disassembler, nvrtc};

use crate::compile::{ARCHITECTURES, PRELUDE_USE};

/// The machine code of programs, if there are tools to make and to read it.
fn machine_code(programs: &[Program]) -> Option<Vec<MachineCode>> {
    let disassembler = disassembler()?;
    let nvrtc = nvrtc()?;
    let cubins: Vec<_> = programs.iter().map(|program| nvrtc.compile(program).unwrap().cubin).collect();
    Some(disassembler.read(&cubins).unwrap())
}

#[test]
fn the_prelude_is_compiled_to_what_was_meant() {
    let programs = ARCHITECTURES.map(|to| Program::new("prelude_use.cu", PRELUDE_USE, to));
    let Some(codes) = machine_code(&programs) else { return };
    for (architecture, code) in ARCHITECTURES.iter().zip(codes) {
        assert_eq!(architecture.to_string().trim_end_matches('a'), format!("sm_{}", code.architecture));
        for kernel in &code.kernels {
            let rules = Rules { registers: 40, forbidden: &["FFMA", "DFMA"], ..Rules::default() };
            assert_eq!(kernel.broken(&rules), [""; 0], "{architecture}");
        }

        let exchange = Rules {
            needed: &[
                "LDG.128.STRONG.SYS",   // load16_volatile
                "STG.128.STRONG.SYS",   // store16_volatile
                "MEMBAR.SYS",           // st_release_sys, fence_sys
                "STG.E.STRONG.SYS",     // ... and its store
                "LDG.E.STRONG.SYS",     // ld_acquire_sys
                "ATOMG.ADD.STRONG.GPU", // atom_add_acq_rel_gpu
                "ATOMG.CAS.STRONG.GPU", // the first report wins
            ],
            ..Rules::default()
        };
        let kernel = code.kernel("exchange").unwrap();
        assert_eq!(kernel.broken(&exchange), [""; 0], "{architecture}");
        // A plain reduction, of which sm_80 writes the name without a G.
        assert_eq!(kernel.count("RED.ADD.STRONG.SYS") + kernel.count("REDG.ADD.STRONG.SYS"), 4);
        if *architecture != Architecture::SM_80 {
            assert_eq!((kernel.count("ACQBULK"), kernel.count("PREEXIT")), (1, 1), "{architecture}");
        }

        let reduce = code.kernel("reduce_bf16").unwrap();
        let needed: &[&str] = match *architecture {
            Architecture::SM_80 => &["LDG.128", "STG.128"],
            _ => &["LDG.128", "STG.128", "F2FP.BF16.F32.PACK_AB"],
        };
        assert_eq!(reduce.broken(&Rules { needed, ..Rules::default() }), [""; 0], "{architecture}");
    }
}

#[test]
fn what_breaks_the_rules_is_seen() {
    let spills = "extern \"C\" __global__ void spills(u32* p, u32 n) {\n\
                      u32 a[64];\n\
                      for (u32 i = 0; i < 64; ++i) a[i] = p[i];\n\
                      for (u32 i = 0; i < n; ++i) a[a[i & 63] & 63] += i;\n\
                      *p = a[n & 63];\n\
                  }\n\
                  extern \"C\" __global__ void fuses(float* p) {\n\
                      p[0] = __fmaf_rn(p[1], p[2], p[3]);\n\
                      p[4] = p[5] * p[6] + p[7];\n\
                  }\n";
    let program = Program::new("broken.cu", spills, Architecture::SM_90A);
    let fused = program.clone().option("-fmad=true");
    let Some(codes) = machine_code(&[program, fused]) else { return };
    let [code, fused] = &codes[..] else { panic!("two programs became {}", codes.len()) };
    let kernel = code.kernel("spills").unwrap();
    assert_eq!(kernel.local_bytes, 256);
    let broken = kernel.broken(&Rules::default()).join("\n");
    assert!(broken.contains("256 bytes of local memory") && broken.contains("STL"), "{broken}");
    // Where a kernel asks for one it gets one; that products and sums are not fused is the options' doing.
    assert_eq!(code.kernel("fuses").unwrap().count("FFMA"), 1);
    assert_eq!(fused.kernel("fuses").unwrap().count("FFMA"), 2);
}
