//! The prelude's conversions have the host's bits.

use antiphon_device::cuda::{Context, DeviceMemory, Function, LaunchConfig, Program};
use antiphon_tensor::{E2M1, E4M3, E5M2, round};

use crate::{gpu, kernel, load};

pub const SOURCE: &str = include_str!("kernels/conversions.cu");

/// A kernel of `conversions.cu`, twice: with the instructions that the device has, and with integer arithmetic.
fn both(context: &Context, name: &str) -> Option<[Function; 2]> {
    let program = Program::new("conversions.cu", SOURCE, context.device().architecture().unwrap());
    let software = program.clone().define("ANTIPHON_SOFTWARE_FLOATS", 1);
    Some([load(context, program, name)?, load(context, software, name)?])
}

/// Runs a kernel of `conversions.cu` on these bytes, and returns what it makes of `len` bytes.
fn run(context: &Context, function: &Function, input: Option<&[u8]>, count: u32, len: usize) -> Vec<u8> {
    let (stream, output) = (context.stream().unwrap(), DeviceMemory::allocate(context, len).unwrap());
    let config = LaunchConfig::new(256, 256);
    let to = output.pointer();
    let memory = input.map(|input| {
        let memory = DeviceMemory::allocate(context, input.len()).unwrap();
        memory.write(&stream, 0, input).unwrap();
        memory
    });
    let from = memory.as_ref().map(DeviceMemory::pointer);
    let mut given = vec![(&to).into()];
    if let Some(from) = &from {
        given.push(from.into());
        given.push((&count).into());
    }
    // SAFETY: the callers below pass what each kernel takes, with memory of the sizes that it uses.
    unsafe { function.launch(&stream, &config, &given) }.unwrap();
    let mut bytes = vec![0; len];
    output.read(&stream, 0, &mut bytes).unwrap();
    bytes
}

/// Floats of every sign, exponent and upper fraction, on, just below and just above each rounding boundary.
fn patterns() -> Vec<u32> {
    let lows = (0..16).flat_map(|step| [step << 12, (step << 12) + 1, (step << 12) + 0xFFF]);
    let lows: Vec<u32> = lows.collect();
    (0..=u16::MAX).flat_map(|high| lows.iter().map(move |low| u32::from(high) << 16 | low)).collect()
}

#[test]
fn narrowing_has_the_hosts_bits() {
    let Some(context) = gpu() else { return };
    let Some(functions) = both(&context, "narrow_all") else { return };
    let patterns = patterns();
    let bytes: Vec<u8> = patterns.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let results = functions
        .map(|function| run(&context, &function, Some(&bytes), patterns.len() as u32, patterns.len() * 16));
    for (index, bits) in patterns.iter().enumerate() {
        let value = f32::from_bits(*bits);
        let [f16_low, f16_high] = round::f32_to_f16(value).to_le_bytes();
        let [bf16_low, bf16_high] = round::f32_to_bf16(value).to_le_bytes();
        let [e4m3, e5m2] = [E4M3::from_f32(value).to_bits(), E5M2::from_f32(value).to_bits()];
        let e2m1 = E2M1::from_f32(value).to_bits();
        let expected = [f16_low, f16_high, bf16_low, bf16_high, e4m3, e5m2, e2m1, 0];
        for (how, results) in ["by instruction", "in software"].into_iter().zip(&results) {
            let result = &results[index * 16..][..16];
            assert_eq!(result[..8], expected, "{value:e} ({bits:#010x}) alone, {how}");
            assert_eq!(result[8..], expected, "{value:e} ({bits:#010x}) in pairs, {how}");
        }
    }
}

#[test]
fn widening_has_the_hosts_bits() {
    let Some(context) = gpu() else { return };
    let Some(functions) = both(&context, "widen_all") else { return };
    for function in functions {
        let results = run(&context, &function, None, 0, 65536 * 24);
        let word = |code: u16, index: usize| {
            let at = usize::from(code) * 24 + index * 4;
            u32::from_le_bytes(results[at..at + 4].try_into().unwrap())
        };
        for code in 0..=u16::MAX {
            let byte = code as u8;
            for (index, host) in [round::f16_to_f32(code), round::bf16_to_f32(code)].into_iter().enumerate() {
                let device = f32::from_bits(word(code, index));
                let same = device.to_bits() == host.to_bits() || (device.is_nan() && host.is_nan());
                assert!(same, "{code:#06x}: {device:e} instead of {host:e}");
            }
            let (low, high) = E2M1::unpack(byte);
            let (e4m3, e5m2) = (E4M3::from_bits(byte), E5M2::from_bits(byte));
            let host = [e4m3.to_f32(), e5m2.to_f32(), low.to_f32(), high.to_f32()].map(f32::to_bits);
            let device = [2, 3, 4, 5].map(|index| word(code, index));
            assert_eq!(device, host, "{byte:#04x}");
        }
    }
}

#[test]
fn vectors_there_and_back_change_nothing_but_nans() {
    let Some(context) = gpu() else { return };
    let codes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let f16 = |bits: [u8; 2]| round::f32_to_f16(round::f16_to_f32(u16::from_le_bytes(bits))).to_le_bytes();
    let bf16 = |bits: [u8; 2]| round::f32_to_bf16(round::bf16_to_f32(u16::from_le_bytes(bits))).to_le_bytes();
    // An infinity saturates.
    let e4m3 = |bits: [u8; 2]| bits.map(|b| E4M3::from_f32(E4M3::from_bits(b).to_f32()).to_bits());
    let e5m2 = |bits: [u8; 2]| bits.map(|b| E5M2::from_f32(E5M2::from_bits(b).to_f32()).to_bits());
    type Both = fn([u8; 2]) -> [u8; 2];
    let all: [(&str, Both, u32); 4] = [
        ("back_f16", f16, 65536),
        ("back_bf16", bf16, 65536),
        ("back_e4m3", e4m3, 131072),
        ("back_e5m2", e5m2, 131072),
    ];
    for (name, host, count) in all {
        let Some(function) = kernel(&context, "conversions.cu", SOURCE, name) else { return };
        let (stream, data) =
            (context.stream().unwrap(), DeviceMemory::allocate(&context, codes.len()).unwrap());
        data.write(&stream, 0, &codes).unwrap();
        let to = data.pointer();
        // SAFETY: the kernel rewrites `count` elements, which are all of the memory.
        unsafe { function.launch(&stream, &LaunchConfig::new(32, 128), &[(&to).into(), (&count).into()]) }
            .unwrap();
        let mut results = vec![0; codes.len()];
        data.read(&stream, 0, &mut results).unwrap();
        for (code, result) in codes.chunks_exact(2).zip(results.chunks_exact(2)) {
            assert_eq!(result, host(code.try_into().unwrap()), "{name}: {code:x?}");
        }
    }
}
