//! Kernels as counted instructions.

use std::collections::BTreeMap;

use crate::SassError;

/// The kernels of one cubin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineCode {
    /// Ten times the compute capability that the code is for.
    pub architecture: u32,
    /// The kernels.
    pub kernels: Vec<Kernel>,
}

/// One kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spilled registers, and arrays that are indexed at run time.
    pub local_bytes: u32,
    /// Bytes of shared memory of a block, without what a launch adds and what the system reserves.
    pub shared_bytes: u32,
    /// How often each opcode, with all its modifiers, stands in the code.
    pub instructions: BTreeMap<String, usize>,
}

/// What a test asks of a kernel. The default allows whatever the hardware does, but no local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules<'a> {
    /// The most registers of a thread.
    pub registers: u32,
    /// The most bytes of local memory of a thread.
    pub local_bytes: u32,
    /// Instructions that must be there, as [`Kernel::count`] takes them.
    pub needed: &'a [&'a str],
    /// Instructions that must not be there.
    pub forbidden: &'a [&'a str],
}

impl Default for Rules<'_> {
    fn default() -> Self {
        Self { registers: 255, local_bytes: 0, needed: &[], forbidden: &[] }
    }
}

impl MachineCode {
    /// The kernel with this name.
    ///
    /// # Errors
    /// [`SassError::NoSuchKernel`] with the names that there are.
    pub fn kernel(&self, name: &str) -> Result<&Kernel, SassError> {
        self.kernels.iter().find(|kernel| kernel.name == name).ok_or_else(|| SassError::NoSuchKernel {
            name: name.to_owned(),
            names: self.kernels.iter().map(|kernel| &*kernel.name).collect::<Vec<_>>().join(", "),
        })
    }
}

impl Kernel {
    /// How many instructions have this opcode and, in this order, these modifiers among theirs: `STG.128` counts
    /// `STG.E.128` and `STG.E.128.STRONG.SYS`, and `ST` counts neither.
    pub fn count(&self, instruction: &str) -> usize {
        self.instructions
            .iter()
            .filter(|(words, _)| matches(words, instruction))
            .map(|(_, count)| count)
            .sum()
    }

    /// What breaks the rules, in words; empty if nothing does.
    pub fn broken(&self, rules: &Rules<'_>) -> Vec<String> {
        let mut broken = Vec::new();
        for (what, found, most) in [
            ("registers", self.registers, rules.registers),
            ("bytes of local memory", self.local_bytes, rules.local_bytes),
        ] {
            if found > most {
                broken.push(format!("{}: {found} {what}, at most {most} allowed", self.name));
            }
        }
        let local: &[&str] = if rules.local_bytes == 0 { &["LDL", "STL"] } else { &[] };
        for forbidden in rules.forbidden.iter().chain(local) {
            match self.count(forbidden) {
                0 => {}
                count => broken.push(format!("{}: {count} × {forbidden}, none allowed", self.name)),
            }
        }
        for needed in rules.needed.iter().filter(|needed| self.count(needed) == 0) {
            broken.push(format!("{}: no {needed}", self.name));
        }
        broken
    }
}

/// Whether an instruction has the opcode and the modifiers asked for, in their order.
fn matches(words: &str, asked: &str) -> bool {
    let (mut words, mut asked) = (words.split('.'), asked.split('.'));
    words.next() == asked.next() && asked.all(|modifier| words.any(|word| word == modifier))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        let instructions = [("STG.E.128", 3), ("STG.E.128.STRONG.SYS", 4), ("STL.64", 1), ("ST.E", 7)];
        let instructions = instructions.map(|(words, count)| (words.to_owned(), count)).into();
        Kernel { name: "k".into(), registers: 40, local_bytes: 8, shared_bytes: 0, instructions }
    }

    #[test]
    fn modifiers_are_asked_for_one_by_one_and_in_order() {
        let count = |words| kernel().count(words);
        assert_eq!((count("STG"), count("STG.128"), count("STG.STRONG"), count("STG.128.SYS")), (7, 7, 4, 4));
        assert_eq!((count("ST"), count("STG.SYS.STRONG"), count("STG.12"), count("LDG")), (7, 0, 0, 0));
    }

    #[test]
    fn what_breaks_the_rules_is_said_with_its_numbers() {
        let rules =
            Rules { registers: 32, needed: &["STG.128", "MEMBAR"], forbidden: &["ST"], local_bytes: 0 };
        let expected = [
            "k: 40 registers, at most 32 allowed",
            "k: 8 bytes of local memory, at most 0 allowed",
            "k: 7 × ST, none allowed",
            "k: 1 × STL, none allowed",
            "k: no MEMBAR",
        ];
        assert_eq!(kernel().broken(&rules), expected);
        assert_eq!(kernel().broken(&Rules { local_bytes: 8, ..Rules::default() }), [""; 0]);
    }

    #[test]
    fn a_kernel_that_is_not_there_is_named_among_those_that_are() {
        let code = MachineCode { architecture: 90, kernels: vec![kernel()] };
        let error = code.kernel("other").unwrap_err().to_string();
        assert_eq!(error, "no kernel other among: k");
    }
}
