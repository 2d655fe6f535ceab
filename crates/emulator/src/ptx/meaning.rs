//! What instructions do, as C++ over the functions of `device/memory.hpp`.

use super::{
    Instruction, Operand,
    copies::{copied, mbarrier},
};

/// The modifiers of an instruction that nothing has asked for yet.
pub(super) struct Modifiers<'i> {
    pub left: Vec<&'i str>,
}

impl<'i> Modifiers<'i> {
    pub(super) fn take(&mut self, name: &str) -> bool {
        let at = self.left.iter().position(|modifier| *modifier == name);
        at.map(|at| self.left.remove(at)).is_some()
    }

    /// These change nothing here.
    pub(super) fn skip(&mut self, names: &[&str]) {
        self.left.retain(|name| !names.contains(name));
    }

    fn take_of<T: Copy>(&mut self, known: &[(&str, T)]) -> Option<T> {
        known.iter().find(|(name, _)| self.take(name)).map(|(_, value)| *value)
    }

    /// The type, which is the last modifier: the C++ type and its bits.
    pub(super) fn kind(&mut self) -> Result<(&'static str, u32), String> {
        let name = self.left.pop().ok_or("a type is missing")?;
        kind(name).ok_or_else(|| format!("the emulator does not know the type .{name}"))
    }

    /// The scope as a constant of device/memory.hpp, or what holds without one.
    fn scope(&mut self, without: &'static str) -> &'static str {
        self.take_of(&[("cta", "CTA"), ("cluster", "CLUSTER"), ("gpu", "GPU"), ("sys", "SYSTEM")])
            .unwrap_or(without)
    }

    pub(super) fn space(&mut self) -> Space {
        let known = [
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("shared::cluster", Space::Cluster),
        ];
        self.take_of(&known).unwrap_or(Space::Global)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// Global and generic addresses are pointers.
    Global,
    Shared,
    Cluster,
}

fn kind(name: &str) -> Option<(&'static str, u32)> {
    Some(match name {
        "b8" | "u8" => ("uint8_t", 8),
        "s8" => ("int8_t", 8),
        "b16" | "u16" => ("uint16_t", 16),
        "s16" => ("int16_t", 16),
        "b32" | "u32" => ("uint32_t", 32),
        "s32" => ("int32_t", 32),
        "b64" | "u64" => ("uint64_t", 64),
        "s64" => ("int64_t", 64),
        "f32" => ("float", 32),
        "f64" => ("double", 64),
        "b128" => ("emulator::whole", 128),
        "pred" => ("bool", 1),
        _ => return None,
    })
}

pub(super) fn registers(name: &str, names: &[String]) -> Result<String, String> {
    let (cpp, _) = kind(name).ok_or_else(|| format!("the emulator does not know registers of .{name}"))?;
    Ok(format!("{cpp} ptx_{};", names.join(", ptx_")))
}

/// The C++ of a value.
pub(super) fn value(operand: &Operand) -> Result<String, String> {
    Ok(match operand {
        Operand::Argument(index) => format!("${index}"),
        Operand::Register(name) => format!("ptx_{name}"),
        Operand::Number(number) => number.clone(),
        Operand::Special(name) => special(name)?.to_owned(),
        Operand::Vector(_) | Operand::Address(..) => return Err(format!("{operand:?} is no value")),
    })
}

fn special(name: &str) -> Result<&'static str, String> {
    Ok(match name {
        "cluster_ctarank" => "emulator::cluster_rank()",
        "cluster_nctaid.x" => "emulator::cluster_size()",
        "clusterid.x" => "emulator::cluster_index()",
        "nclusterid.x" => "emulator::cluster_count()",
        "gridid" => "emulator::grid_number()",
        "globaltimer" => "emulator::global_timer()",
        "laneid" => "emulator::lane()",
        "tid.x" => "threadIdx.x",
        "ntid.x" => "blockDim.x",
        "ctaid.x" => "blockIdx.x",
        "nctaid.x" => "gridDim.x",
        _ => return Err(format!("the emulator does not know the register %{name}")),
    })
}

/// The C++ of an address in a space: a pointer.
pub(super) fn pointer(operand: &Operand, space: Space) -> Result<String, String> {
    let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is no address")) };
    let base = value(base)?;
    Ok(match (space, offset) {
        (Space::Global, 0) => format!("(void*)({base})"),
        (Space::Global, _) => format!("((char*)({base}) + {offset})"),
        (Space::Shared, 0) => format!("emulator::shared({base})"),
        (Space::Shared, _) => format!("emulator::shared({base} + {offset})"),
        (Space::Cluster, _) => format!("emulator::shared_of_cluster({base} + {offset})"),
    })
}

/// An address of shared memory, as a number.
pub(super) fn number_of(operand: &Operand) -> Result<String, String> {
    match operand {
        Operand::Address(base, 0) => value(base),
        Operand::Address(base, offset) => Ok(format!("({} + {offset})", value(base)?)),
        _ => Err(format!("{operand:?} is no address")),
    }
}

pub(super) fn instruction(instruction: &Instruction) -> Result<String, String> {
    let whole = || [std::slice::from_ref(&instruction.opcode), &instruction.modifiers[..]].concat().join(".");
    let left = instruction.modifiers.iter().map(String::as_str).collect();
    let mut modifiers = Modifiers { left };
    let code = code(instruction, &mut modifiers).map_err(|error| format!("{error}, in {}", whole()))?;
    if let Some(name) = modifiers.left.first() {
        return Err(format!("the emulator does not know the modifier .{name} of {}", whole()));
    }
    Ok(match &instruction.guard {
        Some((of, true)) => format!("if (!({})) {{ {code} }}", value(of)?),
        Some((of, false)) => format!("if ({}) {{ {code} }}", value(of)?),
        None => code,
    })
}

fn code(instruction: &Instruction, modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let operands = &instruction.operands;
    let operand = |at: usize| operands.get(at).ok_or_else(|| format!("operand {at} is missing"));
    let v = |at: usize| operand(at).and_then(value);
    Ok(match instruction.opcode.as_str() {
        "ld" => load(operand(0)?, operand(1)?, modifiers)?,
        "st" => store(operand(0)?, operand(1)?, modifiers)?,
        "red" => format!("{};", atomic(operand(0)?, &operands[1..], modifiers)?),
        "atom" => format!("{} = {};", v(0)?, atomic(operand(1)?, &operands[2..], modifiers)?),
        "fence" | "membar" => fence(&instruction.opcode, modifiers)?,
        "mov" => moved(operand(0)?, operand(1)?, modifiers)?,
        "selp" => {
            modifiers.kind()?;
            format!("{} = {} ? {} : {};", v(0)?, v(3)?, v(1)?, v(2)?)
        }
        "min" | "max" => {
            let function = if instruction.opcode == "min" { "minimum" } else { "maximum" };
            match (modifiers.take("NaN"), modifiers.take("f32")) {
                (true, true) => format!("{} = emulator::{function}({}, {});", v(0)?, v(1)?, v(2)?),
                _ => return Err("the emulator knows no other than .NaN.f32".to_owned()),
            }
        }
        "cvt" => converted(operands, modifiers)?,
        "mapa" => {
            modifiers.skip(&["shared::cluster", "u32"]);
            format!("{} = emulator::address_in_block({}, {});", v(0)?, v(1)?, v(2)?)
        }
        "barrier" => {
            let is_cluster = modifiers.take("cluster");
            modifiers.take("aligned");
            match (is_cluster, modifiers.take("arrive"), modifiers.take("wait")) {
                (true, true, false) => {
                    let orders = !modifiers.take("relaxed");
                    modifiers.take("release");
                    format!("emulator::cluster_arrive({orders});")
                }
                (true, false, true) => {
                    modifiers.take("acquire");
                    "emulator::cluster_wait();".to_owned()
                }
                _ => return Err("the emulator knows barriers of clusters only".to_owned()),
            }
        }
        "mbarrier" => mbarrier(operands, modifiers)?,
        "cp" => copied(operands, modifiers)?,
        "griddepcontrol" => match (modifiers.take("wait"), modifiers.take("launch_dependents")) {
            (true, false) => "emulator::grid_wait();".to_owned(),
            (false, true) => "emulator::grid_trigger();".to_owned(),
            _ => return Err("a wait or launch_dependents is missing".to_owned()),
        },
        name => return Err(format!("the emulator does not know the instruction {name}")),
    })
}

/// What an access is, as constants of device/memory.hpp: its order and its scope.
fn order(modifiers: &mut Modifiers<'_>, without: &'static str) -> String {
    if modifiers.take("volatile") {
        return "emulator::STRONG | emulator::SYSTEM".to_owned();
    }
    modifiers.take("weak");
    let known = [
        ("relaxed", " "),
        ("acquire", " | emulator::ACQUIRE"),
        ("release", " | emulator::RELEASE"),
        ("acq_rel", " | emulator::ACQUIRE | emulator::RELEASE"),
    ];
    match modifiers.take_of(&known) {
        Some(more) => format!("emulator::STRONG{} | emulator::{}", more.trim_end(), modifiers.scope("GPU")),
        None => without.to_owned(),
    }
}

/// How many values an instruction moves.
fn vector(modifiers: &mut Modifiers<'_>) -> usize {
    modifiers.take_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
}

/// Caches have no meaning for the values.
fn caching(modifiers: &mut Modifiers<'_>) {
    modifiers.left.retain(|name| !name.starts_with("L1::") && !name.starts_with("L2::"));
}

fn parts(operand: &Operand, count: usize) -> Result<Vec<String>, String> {
    match operand {
        Operand::Vector(all) if all.len() == count => all.iter().map(value).collect(),
        one if count == 1 => Ok(vec![value(one)?]),
        _ => Err(format!("{count} values are meant")),
    }
}

fn load(to: &Operand, from: &Operand, modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    caching(modifiers);
    let (cpp, _) = modifiers.kind()?;
    let count = vector(modifiers);
    let space = modifiers.space();
    let what = order(modifiers, if modifiers.left.contains(&"nc") { "emulator::CONSTANT" } else { "0" });
    modifiers.take("nc");
    let (to, from) = (parts(to, count)?, pointer(from, space)?);
    if count == 1 {
        return Ok(format!("{} = emulator::load<{cpp}>({from}, {what});", to[0]));
    }
    let moved: String = to.iter().enumerate().map(|(at, to)| format!(" {to} = ptx_got.of[{at}];")).collect();
    Ok(format!(
        "{{ const auto ptx_got = emulator::load<emulator::vector<{cpp}, {count}>>({from}, {what});{moved} }}"
    ))
}

fn store(to: &Operand, from: &Operand, modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    caching(modifiers);
    let (cpp, _) = modifiers.kind()?;
    let count = vector(modifiers);
    let space = modifiers.space();
    let what = order(modifiers, "0");
    let (to, from) = (pointer(to, space)?, parts(from, count)?);
    if count == 1 {
        return Ok(format!("emulator::store<{cpp}>({to}, ({cpp})({}), {what});", from[0]));
    }
    let values: Vec<String> = from.iter().map(|value| format!("({cpp}){value}")).collect();
    let vector = format!("emulator::vector<{cpp}, {count}>");
    Ok(format!("emulator::store<{vector}>({to}, {vector}{{{{{}}}}}, {what});", values.join(", ")))
}

fn atomic(at: &Operand, with: &[Operand], modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let (cpp, _) = modifiers.kind()?;
    let names = ["add", "and", "or", "xor", "min", "max", "exch", "cas"].map(|name| (name, name));
    let operation = modifiers.take_of(&names).ok_or("the emulator does not know the operation")?;
    let space = modifiers.space();
    let scope_alone = format!("emulator::STRONG | emulator::{}", modifiers.scope("GPU"));
    let is_ordered =
        ["relaxed", "acquire", "release", "acq_rel"].iter().any(|name| modifiers.left.contains(name));
    let mut what = scope_alone;
    if is_ordered {
        what = [("acquire", " | emulator::ACQUIRE"), ("release", " | emulator::RELEASE")]
            .into_iter()
            .chain([("acq_rel", " | emulator::ACQUIRE | emulator::RELEASE"), ("relaxed", "")])
            .fold(what, |what, (name, more)| if modifiers.take(name) { what + more } else { what });
    }
    let at = pointer(at, space)?;
    let with: Result<Vec<String>, String> =
        with.iter().map(|with| Ok(format!("({cpp})({})", value(with)?))).collect();
    Ok(format!("emulator::fetch_{operation}<{cpp}>({at}, {}, {what})", with?.join(", ")))
}

fn fence(opcode: &str, modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    if modifiers.take("mbarrier_init") {
        modifiers.skip(&["release", "cluster"]);
        return Ok(String::new());
    }
    if modifiers.take("proxy") {
        if !modifiers.take("async") {
            return Err("the emulator knows the async proxy only".to_owned());
        }
        let known = [
            ("global", "emulator::OF_GLOBAL"),
            ("shared::cta", "emulator::OF_SHARED"),
            ("shared::cluster", "emulator::OF_SHARED"),
        ];
        let space = modifiers.take_of(&known).unwrap_or("emulator::OF_GLOBAL | emulator::OF_SHARED");
        return Ok(format!("emulator::proxy_fence({space});"));
    }
    if opcode == "membar" {
        let scope = modifiers
            .take_of(&[("cta", "CTA"), ("gl", "GPU"), ("sys", "SYSTEM")])
            .ok_or("a level is missing")?;
        return Ok(format!("emulator::fence(emulator::SEQUENTIAL | emulator::{scope});"));
    }
    let sequential = if modifiers.take("sc") { "emulator::SEQUENTIAL | " } else { "" };
    modifiers.skip(&["acq_rel"]);
    Ok(format!("emulator::fence({sequential}emulator::{});", modifiers.scope("GPU")))
}

fn moved(to: &Operand, from: &Operand, modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let (cpp, bits) = modifiers.kind()?;
    match (to, from) {
        (Operand::Vector(to), from) => {
            let (to, from) = (parts(&Operand::Vector(to.clone()), to.len())?, value(from)?);
            let each = bits as usize / to.len();
            let (part, _) = kind(&format!("u{each}")).ok_or("parts of no type")?;
            let moved: String =
                to.iter().enumerate().map(|(at, to)| format!(" {to} = ptx_all.of[{at}];")).collect();
            Ok(format!(
                "{{ const auto ptx_all = emulator_cast<emulator::vector<{part}, {}>>(({cpp})({from}));{moved} }}",
                to.len()
            ))
        }
        (to, Operand::Vector(from)) => {
            let (to, parts) = (value(to)?, parts(&Operand::Vector(from.clone()), from.len())?);
            let (part, _) = kind(&format!("u{}", bits as usize / parts.len())).ok_or("parts of no type")?;
            let values: Vec<String> = parts.iter().map(|value| format!("({part})({value})")).collect();
            let vector = format!("emulator::vector<{part}, {}>", parts.len());
            Ok(format!("{to} = emulator_cast<{cpp}>({vector}{{{{{}}}}});", values.join(", ")))
        }
        _ => Ok(format!("{} = {};", value(to)?, value(from)?)),
    }
}

fn converted(operands: &[Operand], modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let values: Result<Vec<String>, String> = operands.iter().map(value).collect();
    let values = values?;
    let value = |at: usize| values.get(at).cloned().ok_or_else(|| format!("operand {at} is missing"));
    modifiers.take("rn");
    let kinds = std::mem::take(&mut modifiers.left);
    Ok(match kinds[..] {
        ["f16x2", "f32"] => {
            format!(
                "{} = emulator::pair<uint32_t>(emulator::narrow_f16({}), emulator::narrow_f16({}));",
                value(0)?,
                value(2)?,
                value(1)?
            )
        }
        ["bf16x2", "f32"] => {
            format!(
                "{} = emulator::pair<uint32_t>(emulator::narrow_bf16({}), emulator::narrow_bf16({}));",
                value(0)?,
                value(2)?,
                value(1)?
            )
        }
        ["f16", "f32"] => format!("{} = emulator::narrow_f16({});", value(0)?, value(1)?),
        ["bf16", "f32"] => format!("{} = emulator::narrow_bf16({});", value(0)?, value(1)?),
        ["f32", "f16"] => format!("{} = emulator::widen_f16({});", value(0)?, value(1)?),
        _ => return Err(format!("the emulator does not know the conversion .{}", kinds.join("."))),
    })
}
