//! A cubin's ELF file: where the code of each kernel is, and what the compiler says that it needs.

/// A kernel before it is disassembled.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Text<'a> {
    pub(crate) name: &'a str,
    pub(crate) registers: u32,
    pub(crate) local_bytes: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) code: &'a [u8],
}

/// Ten times the compute capability, and the kernels.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cubin<'a> {
    pub(crate) architecture: u32,
    pub(crate) kernels: Vec<Text<'a>>,
}

/// The layout of cubins that is read here: that of CUDA 13.
const ABI_VERSION: u8 = 8;

/// Attributes of `.nv.info`, by the names that nvdisasm prints.
const EIATTR_FRAME_SIZE: u8 = 0x11;
const EIATTR_REGCOUNT: u8 = 0x2F;
/// The format of an attribute whose value follows its header.
const EIFMT_SVAL: u8 = 0x04;

const SYMBOL_BYTES: usize = 24;

struct Section<'a> {
    name: &'a str,
    /// In memory; those without a content in the file have a size too.
    size: u32,
    bytes: &'a [u8],
}

/// Reads the file.
pub(crate) fn read(file: &[u8]) -> Result<Cubin<'_>, &'static str> {
    if !file.starts_with(b"\x7FELF\x02\x01") {
        return Err("not an ELF file");
    }
    if *file.get(8).ok_or(TRUNCATED)? != ABI_VERSION {
        return Err("not of CUDA 13, whose cubins alone are understood");
    }
    let architecture = number(file, 48, 4)? as u32 >> 8 & 0xFF;
    let sections = sections(file)?;
    let find = |name: &str| sections.iter().find(|section| section.name == name).map(|section| section.bytes);
    let (symbols, names) = (find(".symtab").ok_or(INCOMPLETE)?, find(".strtab").ok_or(INCOMPLETE)?);
    let info = find(".nv.info").ok_or(INCOMPLETE)?;

    let mut kernels = Vec::new();
    for section in &sections {
        if let Some(name) = section.name.strip_prefix(".text.") {
            let ask = |attribute| {
                attribute_of(info, attribute, |symbol| symbol_name(symbols, names, symbol) == Ok(name))
            };
            let shared = format!(".nv.shared.{name}");
            let shared = sections.iter().find(|section| section.name == shared);
            kernels.push(Text {
                name,
                registers: ask(EIATTR_REGCOUNT)?.ok_or(INCOMPLETE)?,
                local_bytes: ask(EIATTR_FRAME_SIZE)?.unwrap_or(0),
                shared_bytes: shared.map_or(0, |section| section.size),
                code: section.bytes,
            });
        }
    }
    Ok(Cubin { architecture, kernels })
}

const TRUNCATED: &str = "truncated";
const INCOMPLETE: &str = "without the tables that tell of its kernels";

fn sections(file: &[u8]) -> Result<Vec<Section<'_>>, &'static str> {
    let at = |index: u64| -> Result<usize, &'static str> {
        Ok((number(file, 40, 8)? + index * number(file, 58, 2)?) as usize)
    };
    let bytes = |header: usize| -> Result<&[u8], &'static str> {
        const NO_BITS: u64 = 8;
        if number(file, header + 4, 4)? == NO_BITS {
            return Ok(&[]);
        }
        let (from, len) = (number(file, header + 24, 8)? as usize, number(file, header + 32, 8)? as usize);
        file.get(from..).and_then(|rest| rest.get(..len)).ok_or(TRUNCATED)
    };
    let names = bytes(at(number(file, 62, 2)?)?)?;
    (0..number(file, 60, 2)?)
        .map(|index| {
            let header = at(index)?;
            let size = number(file, header + 32, 8)? as u32;
            Ok(Section { name: text(names, number(file, header, 4)? as usize)?, size, bytes: bytes(header)? })
        })
        .collect()
}

/// The value of an attribute of the symbol that is meant.
fn attribute_of(
    mut info: &[u8],
    attribute: u8,
    is_meant: impl Fn(u32) -> bool,
) -> Result<Option<u32>, &'static str> {
    // A header is the format, the attribute, and either the value or the length of the value that follows.
    while let [format, found, ..] = *info {
        let len = if format == EIFMT_SVAL { number(info, 2, 2)? as usize } else { 0 };
        let value = info.get(4..4 + len).ok_or(TRUNCATED)?;
        if format == EIFMT_SVAL && found == attribute && is_meant(number(value, 0, 4)? as u32) {
            return Ok(Some(number(value, 4, 4)? as u32));
        }
        info = &info[4 + len..];
    }
    Ok(None)
}

fn symbol_name<'a>(symbols: &[u8], names: &'a [u8], symbol: u32) -> Result<&'a str, &'static str> {
    text(names, number(symbols, symbol as usize * SYMBOL_BYTES, 4)? as usize)
}

/// A number in little-endian order.
fn number(bytes: &[u8], at: usize, len: usize) -> Result<u64, &'static str> {
    let bytes = bytes.get(at..).and_then(|rest| rest.get(..len)).ok_or(TRUNCATED)?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// A text that ends with NUL.
fn text(bytes: &[u8], at: usize) -> Result<&str, &'static str> {
    let text = bytes.get(at..).and_then(|rest| rest.split(|&byte| byte == 0).next()).ok_or(TRUNCATED)?;
    std::str::from_utf8(text).map_err(|_| "with names that are no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_cubin_is_refused_with_the_reason() {
        assert_eq!(read(b"// PTX"), Err("not an ELF file"));
        let mut header = [0u8; 64];
        header[..6].copy_from_slice(b"\x7FELF\x02\x01");
        assert_eq!(read(&header[..7]), Err("truncated"));
        assert_eq!(read(&header), Err("not of CUDA 13, whose cubins alone are understood"));
        header[8] = ABI_VERSION;
        header[47] = 0x7F; // the table of sections is far beyond the end
        assert_eq!(read(&header), Err("truncated"));
    }

    #[test]
    fn attributes_are_found_behind_those_of_another_format_and_symbol() {
        let mut info = vec![0x02, 0x09, 1, 0]; // the value is in the header
        for (symbol, registers) in [(1u8, 30u8), (7, 64)] {
            info.extend([EIFMT_SVAL, EIATTR_REGCOUNT, 8, 0, symbol, 0, 0, 0, registers, 0, 0, 0]);
        }
        let ask = |attribute, symbol| attribute_of(&info, attribute, |found| found == symbol);
        assert_eq!(ask(EIATTR_REGCOUNT, 7), Ok(Some(64)));
        assert_eq!(ask(EIATTR_FRAME_SIZE, 7), Ok(None));
        assert_eq!(
            attribute_of(&info[..info.len() - 1], EIATTR_REGCOUNT, |found| found == 7),
            Err("truncated")
        );
    }
}
